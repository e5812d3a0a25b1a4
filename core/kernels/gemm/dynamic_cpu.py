"""Products with a dynamic number of rows: code for few rows, code for many rows, and a branch between them."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel
from lathe.core.kernels.gemm import varying_cpu, wide_cpu
from lathe.core.kernels.gemm.dynamic_spec import DynamicGemmSpec
from lathe.core.kernels.target import Target

# From this number of rows on, copying a panel of B for tiles of rows takes less time than a pass over all of B for each
# row; measured on an AMD EPYC (Zen 5). The second number is for a B that is not contiguous along columns: it takes
# longer to copy.
_MANY_ROWS, _MANY_ROWS_STRIDED = 4, 12


def generate(spec: DynamicGemmSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    many = k.dim(spec.many.rows) >= (_MANY_ROWS if spec.many.b_steps[1] == 1 else _MANY_ROWS_STRIDED)
    with k.when(many):
        wide_cpu.multiply(k, spec.many)
    with k.when(~many):
        varying_cpu.multiply(k, spec.few)
    return k
