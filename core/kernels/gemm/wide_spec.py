"""Matrix products with dynamic sizes or wide element types, which no other kernel covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Request, Scratch
from lathe.core.kernels.gemm.spec import extras_of, operand_of, product_shape, rows_last
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.matrices import perm_attribute, to_product_axes
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, is_plannable, traffic
from lathe.core.kernels.shared.panels import Tile
from lathe.core.kernels.target import Target

_ELEMENTS = frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64, DType.UINT32, DType.UINT64})
_MANY_REGISTERS = 32
_ROWS = 8  # of a tile, with 32 registers
_FEWER_ROWS = 4  # with 16 registers


@dataclass(frozen=True)
class WideGemmSpec(KernelSpec):
    """Y[b, i, j] = epilogue(sum over k of A[b, i, k] * B[b, k, j], extras[b, i, j]).

    The loops of `batch` are the batch axes; its operands are A, B, the extras and Y. Pairs of strides are those of an
    operand along its rows and its columns. Factors of other types than `element` are converted to it, or multiplied as
    `words` (`lathe.core.kernels.shared.words`).
    """

    family: ClassVar[str] = "wide_gemm"
    generator: ClassVar[str] = "gemm.wide_cpu"
    batch: Nest
    rows: Dim
    columns: Dim
    depth: Dim
    a_steps: tuple[Dim, Dim]
    b_steps: tuple[Dim, Dim]
    result_steps: tuple[tuple[Dim, Dim], ...]
    factors: tuple[DType, DType]  # of A and B as they are stored
    element: DType
    epilogue: Graph | None
    extra_dtypes: tuple[DType, ...]
    dtype: DType  # of Y
    tile: Tile

    @property
    def packs(self) -> bool:
        """Whether every task first copies its panel of B: several tiles read it, or its rows are not contiguous."""
        few = isinstance(self.rows, int) and self.rows <= self.tile.rows
        return not few or self.b_steps[1] != 1

    @property
    def words(self) -> bool:
        """Whether bytes are multiplied in 32-bit words: four elements that are adjacent along the depth."""
        return self.factors[0] is DType.UINT8 and self.packs and self.a_steps[1] == 1

    @property
    def panel_bytes(self) -> Dim:
        return self.depth * (self.tile.columns * self.element.itemsize)

    @property
    def summary(self) -> str:
        return f"product of {self.element} {self.tile}, {self.depth} deep"


def wide_gemm(request: Request) -> KernelCall | None:
    """Selector of MatMul and FusedMatMul of any sizes that code can compute; A and B have rank 2 or more.

    The types are float32, float64, int32, int64, uint32 and uint64, the same for A and B, or uint8 x int8. None for
    other types, such as narrow floats, if generated code cannot compute a dimension or a stride, and if the epilogue
    has operators that are not elementwise.
    """
    node, types = request.node, _types(request)
    epilogue = node.attrs.get("epilogue")
    if types is None or (epilogue is not None and not (isinstance(epilogue, Graph) and bodies.is_scalar(epilogue))):
        return None
    left, right, element = types
    a, b, shape = operand_of(request, 0), operand_of(request, 1), product_shape(node)
    y = to_product_axes(request.strides_of(node.output), perm_attribute(node, "perm_y"))
    extras = extras_of(node)
    walks = [request.walk(value, shape) for value in extras.values()]
    strides = [(*a.along(shape[:-2]), a.strides[-2]), (*b.along(shape[:-2]), 0), *(each[:-1] for each in (*walks, y))]
    nest = rows_last(Nest(shape[:-1], tuple(strides)).collapsed())
    a_row, _, *rows = nest.loop(nest.rank - 1)
    spec = WideGemmSpec(
        batch=nest.take(range(nest.rank - 1)),
        rows=nest.extents[-1],
        columns=shape[-1],
        depth=a.shape[-1],
        a_steps=(a_row, a.strides[-1]),
        b_steps=(b.strides[-2], b.strides[-1]),
        result_steps=tuple(zip(rows, (each[-1] for each in (*walks, y)), strict=True)),
        factors=(left, right),
        element=element,
        epilogue=bodies.canonical(epilogue, {}) if isinstance(epilogue, Graph) else None,
        extra_dtypes=tuple(value.dtype for value in extras.values()),
        dtype=node.output.dtype,
        tile=_tile(request.cpu, element, shape[-1], nest.extents[-1]),
    )
    pairs = (spec.a_steps, spec.b_steps, *spec.result_steps)
    dims = (*spec.batch.dims, spec.rows, spec.columns, spec.depth, *(step for pair in pairs for step in pair))
    if not all(map(is_plannable, dims)):
        return None
    operands: list[Operand] = [In(0), In(1), *(In(i) for i in extras), Out(0)]
    if spec.packs:
        operands.append(Scratch(spec.panel_bytes))
    return KernelCall(spec, tuple(operands), flops=product(shape) * spec.depth * 2, bytes=traffic(node))


def _types(request: Request) -> tuple[DType, DType, DType] | None:
    """The types of A, of B, and of the accumulators; None for operands that the kernel does not cover."""
    node, (a, b) = request.node, request.node.inputs[:2]
    if a is None or b is None or not has_plannable_types(node) or min(len(a.shape), len(b.shape)) < 2:
        return None
    if (a.dtype, b.dtype) == (DType.UINT8, DType.INT8):
        return a.dtype, b.dtype, DType.INT32
    return (a.dtype, b.dtype, a.dtype) if a.dtype is b.dtype and a.dtype in _ELEMENTS else None


def _tile(target: Target, element: DType, columns: Dim, rows: Dim) -> Tile:
    """The register tile: as many accumulators as leave registers for a row of the panel and a factor.

    It has no more rows or vectors than the product, as far as those are numbers.
    """
    lanes = max(target.vector_bytes // element.itemsize, 1)
    widest, height = (3, _ROWS) if target.registers >= _MANY_REGISTERS else (2, _FEWER_ROWS)
    vectors = min(widest, -(-columns // lanes)) if isinstance(columns, int) else widest
    return Tile(min(height, rows) if isinstance(rows, int) else height, vectors, lanes)
