"""Every kernel that the catalog offers for an H200, of every family, compiles for sm_90 with the installed Triton.

`make test-cuda` runs this with each version that Lathe supports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.choose import candidates
from lathe.core.kernels.cuda import generate
from lathe.core.kernels.cuda.compiler import compile_source
from lathe.core.kernels.cuda.toolchain import TESTED, triton_version
from lathe.core.runtime.device.absent_gpu import parse_target
from loadtest.gpu.families import IMAGE
from tests.core.cuda.test_sources import CASES, request
from tests.core.kernels.sweep import floats

H200 = parse_target("sm_90/132/232448/62914560")
NARROW = [
    (op, tuple(text.replace("float32", dtype) if isinstance(text, str) else text for text in inputs), attrs)
    for dtype in ("bfloat16", "float16")
    for op, inputs, attrs in [
        ("FusedMatMul", ("float32[n,256]", floats(256, 256)), {}),
        ("FusedMatMul", ("float32[n,128,1024]", floats(1024, 4096)), {}),
        ("FusedConv", ("float32[n,14,14,256]", floats(256, 256, 3, 3)), IMAGE),
        ("FusedConv", ("float32[n,56,56,64]", floats(256, 64, 1, 1)), {"layout": "NHWC"}),
        ("FusedAttention", ("float32[n,12,128,32]", "float32[n,12,32,128]", "float32[n,12,128,32]"), {}),
        ("Softmax", ("float32[n,512]",), {}),
        ("LayerNormalization", ("float32[n,384]", floats(384), floats(384)), {}),
        ("Transpose", ("float32[n,40,50]",), {"perm": (0, 2, 1)}),
    ]
]  # fmt: skip
LARGE = [(op, tuple(text.replace(dtype, "float32") if isinstance(text, str) else text for text in inputs), attrs)
         for dtype in ("bfloat16",) for op, inputs, attrs in NARROW[: len(NARROW) // 2]]  # fmt: skip


def offers() -> list[KernelSpec]:
    """Distinct kernels of all cases; products of float32 also as TF32."""
    found: dict[str, KernelSpec] = {}
    for target in (H200, replace(H200, tf32=True)):
        for case in (*CASES, *NARROW, *LARGE):
            found |= {call.spec.key: call.spec for call in candidates(request(*case, target))}
    return list(found.values())


def test_the_installed_triton_is_a_tested_version() -> None:
    assert triton_version() in TESTED


@pytest.mark.parametrize("spec", offers(), ids=lambda spec: f"{spec.family}-{spec.digest[:8]}")
def test_compiles(spec: Any) -> None:
    source = generate(spec, H200)
    binary = compile_source(source, H200)
    assert binary.cubin[:4] == b"\x7fELF" and (binary.arch, binary.ptx) == (90, "")
    assert binary.shared_bytes <= H200.shared_bytes and binary.compiler == f"triton {triton_version()}"
