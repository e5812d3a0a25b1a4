"""Matrix products of few rows with a dynamic depth or width, such as those with the past keys of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Request
from lathe.core.kernels.gemm.spec import extras_of, operand_of, product_shape
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.matrices import perm_attribute, to_product_axes
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, is_plannable, traffic

F32 = DType.FLOAT32
_MOST_ROWS = 32  # of a product: each row reads the whole of B


@dataclass(frozen=True)
class VaryingGemmSpec(KernelSpec):
    """Y[b, i, j] = epilogue(sum over k of A[b, i, k] * B[b, k, j], extras[b, i, j]), of float32.

    The loops of `nest` are the batch axes and then the rows i; its operands are A, B, the extras and Y. B is
    contiguous along j, or both A and B are along k.
    """

    family: ClassVar[str] = "varying_gemm"
    generator: ClassVar[str] = "gemm.varying_cpu"
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
    """Selector of MatMul and FusedMatMul of float32 with at most 32 rows, or a dynamic number of rows.

    A and B have rank 2 or more. B must be contiguous along columns, or A and B along the depth. None for other nodes,
    if generated code cannot compute a dimension, and if the epilogue has operators that are not elementwise.
    `dynamic_gemm` combines it with `wide_gemm`.
    """
    node = request.node
    if not has_plannable_types(node) or any(len(value.shape) < 2 for value in node.inputs[:2] if value is not None):
        return None
    if any(value is None or value.dtype is not F32 for value in node.inputs[:2]):
        return None
    epilogue = node.attrs.get("epilogue")
    if epilogue is not None and not (isinstance(epilogue, Graph) and bodies.is_scalar(epilogue)):
        return None
    a, b, shape = operand_of(request, 0), operand_of(request, 1), product_shape(node)
    y = to_product_axes(request.strides_of(node.output), perm_attribute(node, "perm_y"))
    walks = {i: request.walk(value, shape) for i, value in extras_of(node).items()}
    few = shape[-2] <= _MOST_ROWS if isinstance(shape[-2], int) else has_only_sizes(shape[-2])
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
