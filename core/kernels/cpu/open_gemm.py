"""Products of any number of rows: the code for few of them and that for many, and a branch before both."""

from __future__ import annotations

from core.codegen.lang import Kernel
from core.kernels.catalog.open_gemm import OpenGemmSpec
from core.kernels.cpu import varying_gemm, wide_gemm
from core.kernels.target import Target

# From here on a copied panel of B, read by a tile of rows, takes less time than each row's pass over all of B; measured
# on an AMD EPYC (Zen 5). Columns that are no neighbours take longer to copy.
_MANY_ROWS, _MANY_ACROSS = 4, 12


def generate(spec: OpenGemmSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    many = k.dim(spec.many.rows) >= (_MANY_ROWS if spec.many.b_steps[1] == 1 else _MANY_ACROSS)
    with k.when(many):
        wide_gemm.multiply(k, spec.many)
    with k.when(~many):
        varying_gemm.multiply(k, spec.few)
    return k
