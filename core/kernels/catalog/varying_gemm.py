"""Matrix products whose depth or width only a run shows: those of a few rows with what has been kept of a past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import product
from core.ir.dims import is_sized
from core.ir.graph import Graph
from core.ir.types import Dim, DType
from core.kernels.catalog import body as bodies
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Request
from core.kernels.catalog.gemm import extras_of, operand_of, product_shape
from core.kernels.catalog.matrices import perm_attribute, unpermuted
from core.kernels.catalog.nest import Nest, has_plannable_types, is_plannable, traffic

F32 = DType.FLOAT32
_MOST_ROWS = 32  # of a product: each reads the whole of B


@dataclass(frozen=True)
class VaryingGemmSpec(KernelSpec):
    """Y[b, i, j] = epilogue(sum over k of A[b, i, k] * B[b, k, j], extras[b, i, j]), of float32.

    The loops of `nest` are the batch axes and then the rows i; its operands are A, B, the extras and Y. B is
    contiguous along j, or both A and B are along k.
    """

    family: ClassVar[str] = "varying_gemm"
    nest: Nest
    depth: Dim
    columns: Dim
    a_step: Dim  # stride of A along k
    b_steps: tuple[Dim, Dim]  # strides of B along k and j
    result_steps: tuple[Dim, ...]  # strides of the extras and of Y along j
    epilogue: Graph | None
    extra_dtypes: tuple[DType, ...]
    dtype: DType  # of Y

    @property
    def summary(self) -> str:
        return (
            f"product of {self.depth} by {self.columns}, {'along columns' if self.b_steps[1] == 1 else 'along depth'}"
        )


def varying_gemm(request: Request) -> KernelCall | None:
    """None for other element types, a known number of many rows, and rows and columns that are both no neighbours.
    Asked where no other kernel does the product."""
    node = request.node
    if not has_plannable_types(node) or any(len(value.shape) < 2 for value in node.inputs[:2] if value is not None):
        return None
    if any(value is None or value.dtype is not F32 for value in node.inputs[:2]):
        return None
    epilogue = node.attrs.get("epilogue")
    if epilogue is not None and not (isinstance(epilogue, Graph) and bodies.is_scalar(epilogue)):
        return None
    a, b, shape = operand_of(request, 0), operand_of(request, 1), product_shape(node)
    y = unpermuted(request.strides_of(node.output), perm_attribute(node, "perm_y"))
    walks = {i: request.walk(value, shape) for i, value in extras_of(node).items()}
    few = shape[-2] <= _MOST_ROWS if isinstance(shape[-2], int) else is_sized(shape[-2])
    ready = b.strides[-1] == 1 or (b.strides[-2] == 1 and a.strides[-1] == 1)
    if not few or not ready:
        return None
    batch = shape[:-2]
    strides = (
        (*a.along(batch), a.strides[-2]),
        (*b.along(batch), 0),
        *(steps[:-1] for steps in walks.values()),
        y[:-1],
    )
    spec = VaryingGemmSpec(
        nest=Nest(shape[:-1], strides).collapsed(),
        depth=a.shape[-1],
        columns=shape[-1],
        a_step=a.strides[-1],
        b_steps=(b.strides[-2], b.strides[-1]),
        result_steps=(*(steps[-1] for steps in walks.values()), y[-1]),
        epilogue=bodies.canonical(epilogue, {}) if isinstance(epilogue, Graph) else None,
        extra_dtypes=tuple(value.dtype for value in extras_of(node).values()),
        dtype=node.output.dtype,
    )
    dims = (*spec.nest.dims, spec.depth, spec.columns, spec.a_step, *spec.b_steps, *spec.result_steps)
    if not all(map(is_plannable, dims)):
        return None
    operands: tuple[Operand, ...] = (In(0), In(1), *(In(i) for i in walks), Out(0))
    return KernelCall(spec, operands, flops=product(shape) * spec.depth * 2, bytes=traffic(node))
