"""Matrix products on a GPU: `FusedMatMul` of floats, batched, with strided operands and an epilogue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from itertools import product as product_of
from typing import ClassVar

import numpy as np

from core.ir.dim import product
from core.ir.graph import Array, Graph
from core.ir.types import Dim, DType
from core.kernels.catalog import body as bodies
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, covers, offers
from core.kernels.catalog.cuda.elementwise import is_computable
from core.kernels.catalog.cuda.library import by_library
from core.kernels.catalog.cuda.product import (
    F32,
    FACTORS,
    HALVES,
    I8,
    SHIFT,
    ProductTile,
    Results,
    parts_of,
    precisions,
    ranked_tiles,
    rounded,
    split_operands,
)
from core.kernels.catalog.cuda.tiling import blocks
from core.kernels.catalog.gemm import can_be_replaced, extras_of, operand_of, product_shape
from core.kernels.catalog.matrices import Perm, perm_attribute, unpermuted
from core.kernels.catalog.nest import Nest, has_plannable_types, traffic

_OFFERED = 4  # tiles


@dataclass(frozen=True)
class GemmSpec(KernelSpec):
    """Y[b, i, j] = epilogue(sum over k of A[b, i, k] * B[b, k, j], extras[b, i, j]).

    The operands of both nests are A, B, the extras and Y: `batch` are the loops that B moves along, `rows` those that
    it does not, which together are one index. `b_steps` are B's strides along k and j. `element` is what is multiplied.
    Where there are few tiles, `parts` programs share the depth of each.

    Bytes: A is uint8 and B int8, and tensor cores multiply int8. So A is taken less 128, and what the sums lack then is
    an operand of its own, behind B.
    """

    family: ClassVar[str] = "gemm"
    batch: Nest
    rows: Nest
    depth: Dim
    columns: Dim
    a_step: Dim  # stride of A along k
    b_steps: tuple[Dim, Dim]
    factors: tuple[DType, DType]  # of A and B in memory
    element: DType
    results: Results
    tile: ProductTile
    precision: str
    parts: int

    @property
    def programs(self) -> Dim:
        """Tiles of all matrices."""
        high = blocks(product(self.rows.extents), self.tile.rows)
        return product(self.batch.extents) * high * blocks(self.columns, self.tile.columns)

    @property
    def summary(self) -> str:
        return f"gemm {self.element} {self.tile}{'' if self.precision == 'ieee' else f' by {self.precision}'}"


@covers("FusedMatMul", "MatMul", device="cuda")
def gemm(request: Request) -> KernelCall | None:
    """None for other element types and unplannable shapes."""
    return next(_calls(request), None)


@offers("FusedMatMul", "MatMul", device="cuda")
def other_ways(request: Request) -> Iterator[KernelCall]:
    """First what the vendor's library does, where it is there, since it needs no compiling; then other tiles."""
    calls = _calls(request)
    for first in islice(calls, 1):
        library = by_library(first, first.spec, request) if isinstance(first.spec, GemmSpec) else None
        yield from [library] if library is not None else []
    yield from calls


def _calls(request: Request) -> Iterator[KernelCall]:
    """The kernel with every tile and precision that may win."""
    node = request.node
    element = _element(request)
    if element is None:
        return
    shape, extras = product_shape(node), extras_of(node)
    a, b = operand_of(request, 0), operand_of(request, 1)
    y = unpermuted(request.strides_of(node.output), perm_attribute(node, "perm_y"))
    walks = {i: request.walk(value, shape) for i, value in extras.items()}
    batch = shape[:-2]
    moves = ((*a.along(batch), a.strides[-2]), (*b.along(batch), 0), *(s[:-1] for s in walks.values()), y[:-1])
    nest = Nest(shape[:-1], moves)
    batches, rows = (
        nest.take(k for k in range(nest.rank) if (nest.strides[1][k] != 0) is moving).collapsed()
        for moving in (True, False)
    )
    epilogue = node.attrs.get("epilogue")
    results = Results(
        bodies.canonical(epilogue, {}) if isinstance(epilogue, Graph) else None,
        epilogue.inputs[0].dtype if isinstance(epilogue, Graph) else node.output.dtype,
        tuple(value.dtype for value in extras.values()),
        tuple(strides[-1] for strides in walks.values()),
        node.output.dtype,
        y[-1],
    )
    second, factors = _right_operand(request, element)
    inplace = tuple(i for i, strides in walks.items() if strides == y and can_be_replaced(node, i))
    count = product(batches.extents)
    b_steps = (b.strides[-2], b.strides[-1]) if element is not I8 else (1, a.shape[-1])
    offsets = (Packed(1, "offsets", partial(_offsets, perm=perm_attribute(node, "perm_b"))),) if element is I8 else ()
    tiles = ranked_tiles(request.gpu, product(rows.extents), b.shape[-1], a.shape[-1], count, element)
    for precision, tile in product_of(precisions(element, request.gpu), tiles[:_OFFERED]):
        spec = GemmSpec(
            batches, rows, a.shape[-1], b.shape[-1], a.strides[-1], b_steps,
            factors, element, results, tile, precision, 1,
        )  # fmt: skip
        parts = parts_of(request.gpu, tile, spec.programs, spec.depth) if element.is_float else 1
        given: tuple[In | Out, ...] = (In(0), *(In(i) for i in extras), Out())
        yield KernelCall(
            replace(spec, parts=parts),
            (In(0), second, *offsets, *(In(i) for i in extras), Out(), *split_operands(tile, spec.programs, parts)),
            inplace,
            strided=(*given, In(1)) if isinstance(second, In) else given,
            flops=product(shape) * a.shape[-1] * 2,
            bytes=traffic(node),
            grid=(spec.programs, parts),
        )


def _element(request: Request) -> DType | None:
    """What is multiplied; None for types and epilogues without a kernel. Bytes only meet constant matrices."""
    node, (a, b) = request.node, request.node.inputs[:2]
    if a is None or b is None or not has_plannable_types(node) or min(len(a.shape), len(b.shape)) < 2:
        return None
    epilogue = node.attrs.get("epilogue")
    if epilogue is not None and not (isinstance(epilogue, Graph) and is_computable(epilogue)):
        return None
    if (a.dtype, b.dtype) == (DType.UINT8, I8):
        return I8 if request.constant(1) is not None and len(b.shape) == 2 else None
    return a.dtype if a.dtype in FACTORS and (b.dtype is a.dtype or (a.dtype in HALVES and b.dtype is F32)) else None


def _right_operand(request: Request, element: DType) -> tuple[Operand, tuple[DType, DType]]:
    """A constant is rounded to what is multiplied once and for all."""
    a, b = (value.dtype for value in request.node.inputs[:2] if value is not None)
    if element is I8:
        return Packed(1, "turned", partial(_turned, perm=perm_attribute(request.node, "perm_b"))), (a, b)
    if b is element or request.constant(1) is None:
        return In(1), (a, b)
    return Packed(1, f"{element}", partial(rounded, element=element)), (a, element)


def _turned(array: Array, perm: Perm | None) -> Array:
    """Columns as rows: bytes that are multiplied with each other are neighbours, as tensor cores want them."""
    return np.ascontiguousarray(_matrix(array, perm).T)


def _offsets(array: Array, perm: Perm | None) -> Array:
    """What the sums lack, column by column, when the left factors are smaller by the shift."""
    return SHIFT * _matrix(array, perm).sum(0, dtype=np.int32)


def _matrix(array: Array, perm: Perm | None) -> Array:
    return array if perm is None else np.transpose(array, perm)
