"""Matrix products with a dynamic number of rows: few rows read B in place, many rows copy it into panels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.kernels.call import KernelCall, KernelSpec, Request
from lathe.core.kernels.gemm.varying_spec import VaryingGemmSpec, varying_gemm
from lathe.core.kernels.gemm.wide_spec import WideGemmSpec, wide_gemm


@dataclass(frozen=True)
class DynamicGemmSpec(KernelSpec):
    """A product with a dynamic number of rows, which decides at run time between the code of two specs.

    `few` is for few rows, `many` for more. The operands are those of `many`.
    """

    family: ClassVar[str] = "open_gemm"
    generator: ClassVar[str] = "gemm.dynamic_cpu"
    few: VaryingGemmSpec
    many: WideGemmSpec

    @property
    def summary(self) -> str:
        return f"{self.many.summary}, of few rows {self.few.summary}"


def dynamic_gemm(request: Request) -> KernelCall | None:
    """Selector of MatMul and FusedMatMul that no other kernel covers, such as those with a dynamic number of rows.

    It returns the call of `varying_gemm` (float32, at most 32 rows or a dynamic number) or of `wide_gemm` (types of 32
    or 64 bits, and uint8 x int8), or a combination of both: if each covers the product, and the number of rows is
    dynamic. If that is a number, `varying_gemm` is preferred. None if neither covers the product.
    """
    few, many = varying_gemm(request), wide_gemm(request)
    if few is None or many is None:
        return few or many
    assert isinstance(few.spec, VaryingGemmSpec) and isinstance(many.spec, WideGemmSpec)
    if isinstance(many.spec.rows, int):
        return few
    return KernelCall(DynamicGemmSpec(few.spec, many.spec), many.operands, flops=many.flops, bytes=many.bytes)
