"""Every kernel that the catalog offers for an H200, of every family, compiles for sm_90 with the installed Triton.

`make test-cuda` runs this with each version that Lathe supports."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.choose import candidates, select
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
            calls = (kernel for call in candidates(request(*case, target)) for _, kernel in call.kernels)
            found |= {call.spec.key: call.spec for call in calls}
    return list(found.values())


def test_the_installed_triton_is_a_tested_version() -> None:
    assert triton_version() in TESTED


@pytest.mark.parametrize("spec", offers(), ids=lambda spec: f"{spec.family}-{spec.digest[:8]}")
def test_compiles(spec: Any) -> None:
    source = generate(spec, H200)
    binary = compile_source(source, H200)
    assert binary.cubin[:4] == b"\x7fELF" and (binary.arch, binary.ptx) == (90, "")
    assert binary.shared_bytes <= H200.shared_bytes and binary.compiler == f"triton {triton_version()}"


# -- large products ----------------------------------------------------------------------------------------------------

LARGE_BATCH = 128
PRODUCTS = [
    ("FusedMatMul", ("bfloat16[n,4096]", floats(4096, 4096)), {}),
    ("FusedMatMul", ("bfloat16[n,128,384]", floats(384, 1536)), {}),
    ("FusedMatMul", ("float16[n,128,1536]", floats(1536, 384)), {}),
    ("FusedConv", ("bfloat16[n,14,14,256]", floats(256, 256, 3, 3)), IMAGE),
    ("FusedConv", ("bfloat16[n,7,7,512]", floats(2048, 512, 1, 1)), {"layout": "NHWC"}),
]


def disassembled(cubin: bytes, folder: Path) -> tuple[str, str]:
    """The resources that a kernel uses, and its machine code, as NVIDIA's tools (part of Triton) write them."""
    tools = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin"
    (folder / "kernel.cubin").write_bytes(cubin)
    commands = ([tools / "cuobjdump", "-res-usage"], [tools / "nvdisasm", "-c"])
    usage, code = (
        subprocess.run([*command, folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
        for command in commands
    )
    return usage, code


@pytest.mark.parametrize(("op", "inputs", "attrs"), PRODUCTS, ids=lambda each: each if isinstance(each, str) else "")
def test_large_products_compile_to_wgmma(op: str, inputs: Any, attrs: Any, tmp_path: Path) -> None:
    """All copies into shared memory have 16 bytes, and no register is spilled."""
    call = select(request(op, inputs, attrs, H200))
    assert call is not None
    spec: Any = call.at(LARGE_BATCH).spec
    assert spec.tile.rows >= 64 and spec.tile.columns >= 64
    usage, code = disassembled(compile_source(generate(spec, H200), H200).cubin, tmp_path)
    assert re.search(r"STACK:0\b", usage) and "HGMMA" in code and not re.search(r"\bHMMA", code)
    copies = re.findall(r"LDGSTS\S*", code)
    assert copies and all(".128" in copy for copy in copies)


def test_the_first_convolution_compiles_to_loads_of_whole_pixels(tmp_path: Path) -> None:
    """Four channels of two bytes: 8 bytes at a time."""
    attrs = {**IMAGE, "pads": (3, 3, 3, 3), "strides": (2, 2)}
    call = select(request("FusedConv", ("bfloat16[n,224,224,4]", floats(64, 4, 7, 7)), attrs, H200))
    assert call is not None
    _, code = disassembled(compile_source(generate(call.at(LARGE_BATCH).spec, H200), H200).cubin, tmp_path)
    assert "HGMMA" in code and all(".64" in copy or ".128" in copy for copy in re.findall(r"LDGSTS\S*", code))
