"""Matrix products: `FusedMatMul` of float32, batched, with strided operands and an epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from core.ir.dim import product
from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import Dim, DType
from core.kernels.catalog import body as bodies
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, Scratch, covers
from core.kernels.catalog.nest import Nest, broadcast_strides, has_plannable_types, row_major, traffic
from core.kernels.catalog.panels import Tile, choose_tile, pack_panels, packed_size

F32 = DType.FLOAT32
Strides = tuple[Dim, ...]


@dataclass(frozen=True)
class GemmSpec(KernelSpec):
    """Y[b, i, j] = epilogue(sum over k of A[b, i, k] * B[b, k, j], extras[b, i, j]).

    The loops of `nest` are the batch axes and then the rows i; its operands are A, B (which does not move along i), the
    extras and Y. Strides count elements. `packed`: B lies in panels (`core.kernels.catalog.panels`), and the batch
    strides of B are those of packed matrices.
    """

    family: ClassVar[str] = "gemm"
    nest: Nest
    depth: int
    columns: int
    a_step: int  # stride of A along k
    b_steps: tuple[int, int]  # strides of B along k and j, when it is not packed
    extra_steps: tuple[int, ...]  # stride of each extra along j
    y_step: int  # stride of Y along j
    packed: bool
    epilogue: Graph | None
    extra_dtypes: tuple[DType, ...]
    dtype: DType  # of Y
    tile: Tile

    @property
    def summary(self) -> str:
        return f"gemm {self.tile}, B {'packed' if self.packed else 'packed on the fly' if self.repacks else 'as it is'}"

    @property
    def rows(self) -> Dim:
        return self.nest.extents[-1]

    @property
    def repacks(self) -> bool:
        """Whether every task first gathers its panel of B: its rows are not contiguous."""
        return not self.packed and self.b_steps[1] != 1 and self.columns > 1


@covers("FusedMatMul", "MatMul")
def gemm(request: Request) -> KernelCall | None:
    """None for other element types, unplannable shapes, or a depth or width that depends on the batch."""
    node = request.node
    if not has_plannable_types(node) or not _is_covered(node):
        return None
    a, b = node.inputs[0], node.inputs[1]
    if a is None or b is None:
        return None
    a_shape, a_strides = _permuted(a, node.attrs.get("perm_a"))
    b_shape, b_strides = _permuted(b, node.attrs.get("perm_b"))
    depth, columns = a_shape[-1], b_shape[-1]
    steps = (a_strides[-1], *b_strides[-2:])
    if not isinstance(depth, int) or not isinstance(columns, int) or not all(isinstance(s, int) for s in steps):
        return None
    batch = _broadcast(a_shape[:-2], b_shape[:-2])
    shape = (*batch, a_shape[-2], columns)
    y_strides = _unpermuted(row_major(node.output.shape), node.attrs.get("perm_y"))
    if not isinstance(y_strides[-1], int):
        return None
    constant = request.constant(1)
    tile = choose_tile(request.target, a_shape[-2] if len(b_shape) > 2 else product(shape[:-1]), columns)
    b_batch = b_strides[:-2]
    if constant is not None:
        b_batch = tuple(s * packed_size(depth, columns, tile) for s in row_major(b_shape[:-2]))
    extras = [(i, value) for i, value in enumerate(node.inputs[2:], start=2) if value is not None]
    extra_strides = [broadcast_strides(value.shape, shape) for _, value in extras]
    rows_of = [
        (*_spread(a_shape[:-2], a_strides[:-2], batch), a_strides[-2]),
        (*_spread(b_shape[:-2], b_batch, batch), 0),
        *(strides[:-1] for strides in extra_strides),
        y_strides[:-1],
    ]
    nest = _rows_last(Nest(shape[:-1], tuple(tuple(s) for s in rows_of)).collapsed())
    epilogue = node.attrs.get("epilogue")
    spec = GemmSpec(
        nest, depth, columns, steps[0], (steps[1], steps[2]), tuple(int(bool(s[-1])) for s in extra_strides), y_strides[-1],
        constant is not None, bodies.canonical(epilogue, {}) if isinstance(epilogue, Graph) else None,
        tuple(value.dtype for _, value in extras), node.output.dtype,
        tile,
    )  # fmt: skip
    return KernelCall(
        spec, _operands(spec, constant, node, [i for i, _ in extras]),
        inplace=tuple(
            i for (i, v), s in zip(extras, extra_strides, strict=True)
            if s == y_strides and _same_bytes(v, node) and v is not a and v is not b
        ),
        flops=product(shape) * depth * 2, bytes=traffic(node),
    )  # fmt: skip


def _operands(spec: GemmSpec, constant: Array | None, node: Node, extras: Sequence[int]) -> tuple[Operand, ...]:
    """A, B, the extras, Y, and scratch for a panel where B must be gathered."""
    perm = node.attrs.get("perm_b")
    b: Operand = In(1)
    if constant is not None:
        b = Packed(
            1, f"panels{spec.tile.columns}x{spec.tile.lanes}{perm or ''}", partial(_pack, perm=perm, tile=spec.tile)
        )
    scratch = (Scratch(spec.depth * spec.tile.columns * F32.itemsize),) if spec.repacks else ()
    return (In(0), b, *(In(i) for i in extras), Out(0), *scratch)


def _pack(array: Array, perm: tuple[int, ...] | None, tile: Tile) -> Array:
    return pack_panels(array if perm is None else np.transpose(array, perm), tile)


def _is_covered(node: Node) -> bool:
    epilogue = node.attrs.get("epilogue")
    if epilogue is not None and not (isinstance(epilogue, Graph) and bodies.is_scalar(epilogue)):
        return False
    matrices = node.inputs[:2]
    return all(value is not None and value.dtype is F32 and len(value.shape) >= 2 for value in matrices)


def _permuted(value: Value, perm: object) -> tuple[tuple[Dim, ...], Strides]:
    """Shape and strides of an operand as the product sees it."""
    shape, strides = value.shape, row_major(value.shape)
    if not isinstance(perm, tuple):
        return shape, strides
    return tuple(shape[axis] for axis in perm), tuple(strides[axis] for axis in perm)


def _unpermuted(strides: Strides, perm: object) -> Strides:
    """Strides of the product's axes, given those of the transposed output."""
    if not isinstance(perm, tuple):
        return strides
    return tuple(strides[perm.index(axis)] for axis in range(len(perm)))


def _broadcast(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[Dim, ...]:
    rank = max(len(a), len(b))
    pairs = zip((*(1,) * (rank - len(a)), *a), (*(1,) * (rank - len(b)), *b), strict=True)
    return tuple(right if left == 1 else left for left, right in pairs)


def _spread(shape: Sequence[Dim], strides: Sequence[Dim], batch: Sequence[Dim]) -> Strides:
    """Strides along the batch axes: 0 where the operand is repeated."""
    missing = len(batch) - len(shape)
    own = [
        0 if extent == 1 and full != 1 else s for extent, s, full in zip(shape, strides, batch[missing:], strict=True)
    ]
    return (*(0,) * missing, *own)


def _rows_last(nest: Nest) -> Nest:
    """The last loop must be one that B does not move along; a product of one row has none left."""
    if nest.strides[1][-1] == 0:
        return nest
    return Nest((*nest.extents, 1), tuple((*strides, 0) for strides in nest.strides))


def _same_bytes(value: Value, node: Node) -> bool:
    return value.shape == node.output.shape and value.dtype.itemsize == node.output.dtype.itemsize
