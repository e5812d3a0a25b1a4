"""Matrix products whose number of rows only a run shows: few rows read B where it lies, many copy it in panels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from core.kernels.catalog.base import KernelCall, KernelSpec, Request, covers
from core.kernels.catalog.varying_gemm import VaryingGemmSpec, varying_gemm
from core.kernels.catalog.wide_gemm import WideGemmSpec, wide_gemm


@dataclass(frozen=True)
class OpenGemmSpec(KernelSpec):
    """The code of both; a run takes that for its number of rows. The operands are those of `many`."""

    family: ClassVar[str] = "open_gemm"
    few: VaryingGemmSpec
    many: WideGemmSpec

    @property
    def summary(self) -> str:
        return f"{self.many.summary}, of few rows {self.few.summary}"


@covers("FusedMatMul", "MatMul")
def open_gemm(request: Request) -> KernelCall | None:
    """What multiplies where no other kernel does: either kernel, or both, if only a run shows which is better."""
    few, many = varying_gemm(request), wide_gemm(request)
    if few is None or many is None:
        return few or many
    assert isinstance(few.spec, VaryingGemmSpec) and isinstance(many.spec, WideGemmSpec)
    if isinstance(many.spec.rows, int):
        return few
    return KernelCall(OpenGemmSpec(few.spec, many.spec), many.operands, flops=many.flops, bytes=many.bytes)
