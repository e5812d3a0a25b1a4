"""Every kernel that the catalog prefers compiles for sm_89, too; the other tests compile for sm_80 and sm_90."""

from __future__ import annotations

from typing import Any

import pytest

from lathe.core.kernels.choose import select
from lathe.core.kernels.cuda import generate
from lathe.core.kernels.cuda.compiler import compile_source
from lathe.core.kernels.target import GpuTarget
from tests.core.cuda.test_sources import CASES, request

ADA = GpuTarget(arch=89, multiprocessors=128, shared_bytes=99 << 10, l2_bytes=72 << 20)


@pytest.mark.parametrize(("op", "inputs", "attrs"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_ada(op: str, inputs: tuple[Any, ...], attrs: dict[str, Any]) -> None:
    call = select(request(op, inputs, attrs, ADA))
    assert call is not None
    binary = compile_source(generate(call.spec, ADA), ADA)
    assert binary.cubin[:4] == b"\x7fELF" and ".target sm_89\n" in binary.ptx
    assert binary.shared_bytes <= ADA.shared_bytes
