"""Matrix products by one step of Strassen's algorithm in Winograd's form: seven products of quarters instead of eight.

Rows are paired only within one sample of the batch, so data of one request never enter the sums of another. The sums of
quarters of the weights are computed at compile time; with them the weights take 7/4 of their size. The error is bounded
by the largest elements of a sample and of the weights, not by those of one row and one column (Higham, Accuracy and
Stability of Numerical Algorithms, 2002, chapter 23).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np

from lathe.core.ir.dim import product, symbol
from lathe.core.ir.graph import Array, Node
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch
from lathe.core.kernels.conv.spec import ConvSpec, Finish
from lathe.core.kernels.gemm.spec import GemmSpec
from lathe.core.kernels.shared.matrices import perm_attribute, to_product_axes
from lathe.core.kernels.shared.nest import BATCH, Nest, row_major
from lathe.core.kernels.shared.panels import LINE, Tile, tile_cycles
from lathe.core.kernels.shared.words import WORD_BYTES
from lathe.core.kernels.target import Target

F32 = DType.FLOAT32
PRODUCTS = 7

_LEAST_DEPTH = 128
_DEEP = 384  # below this depth, plain products with a residual sum are 1.06 to 1.2 times as fast (on a Zen 5)
_LEAST_COLUMNS = 256  # with fewer, the left factors are not reused often enough
_LEAST_ROWS = 64  # of a sample; with fewer, the larger weights are not reused often enough
_LEAST_BLOCK = 4  # tiles that share a read of the weights
_MOST_PADDING = 1.05  # limit for the rows of all tiles, relative to those of a sample: padding rows are wasted work
_FACTORS = 0.45  # share of the second-level cache for the left factors of a block

# Register tiles as rows by vectors where 32 and 16 registers hold them.
_TILES_32 = ((14, 2), (13, 2), (12, 2), (11, 2), (10, 2), (9, 3), (8, 3), (7, 3), (6, 4), (5, 4))
_TILES_16 = ((6, 2), (5, 2), (4, 3))


@dataclass(frozen=True)
class StrassenSpec(KernelSpec):
    """Y = finish(A B), where `rows` rows of A and of Y belong to each of the samples.

    Row i of a sample's first half is paired with row i of its second half, tile by tile, and panel 2 j with panel 2 j +
    1. A task computes the left factors of at most `block` tiles and multiplies them by all panels, or by a part of the
    panels if there are few tiles. A tile goes through the seven products of a pair of panels at once. With `in_turn`,
    each product runs for all tiles before the next product: that is for panels that would leave the first-level cache
    otherwise.
    """

    family: ClassVar[str] = "strassen"
    generator: ClassVar[str] = "strassen.cpu"
    represents_family: ClassVar[bool] = True
    samples: Dim
    rows: int
    depth: int
    columns: int
    source: Nest  # walks the rows of A
    finish: Finish  # walks those of Y
    tile: Tile
    block: int
    in_turn: bool

    @property
    def first_rows(self) -> int:
        """Rows of a sample's first half. If the number of rows is odd, the second half has one row fewer."""
        return -(-self.rows // 2)

    @property
    def tiles(self) -> int:
        """The number of tile pairs in a sample."""
        return -(-self.first_rows // self.tile.rows)

    @property
    def is_even(self) -> bool:
        """Whether all tiles are full: the rows of a sample are a multiple of two tiles."""
        return self.rows % (2 * self.tile.rows) == 0

    @property
    def half(self) -> int:
        """The depth of each of the seven products: half of `depth`."""
        return self.depth // 2

    @property
    def pitch(self) -> int:
        """Words between rows of a left factor: a row and a cache line.

        Without that line, and with depths that are powers of two, all rows of a tile would map to the same few sets of
        the first-level cache.
        """
        return self.half + LINE

    @property
    def pairs(self) -> int:
        """The number of panel pairs."""
        return self.columns // (2 * self.tile.columns)

    @property
    def factor_words(self) -> int:
        """Words of the left factors of a tile's seven products."""
        return PRODUCTS * self.tile.rows * self.pitch

    @property
    def kept_words(self) -> int:
        """Words (of 4 bytes) for saved register tiles: the two whose numbers several results need.

        With `in_turn`, these two and the accumulators, for each of the `block` tiles of a task.
        """
        return (3 * self.block if self.in_turn else 2) * self.tile.rows * self.tile.columns

    @property
    def scratch_bytes(self) -> int:
        return (self.block * self.factor_words + self.kept_words) * WORD_BYTES

    @property
    def summary(self) -> str:
        return f"gemm {self.tile}, 7/8 of the products (Strassen)"


def strassen(request: Request) -> KernelCall | None:
    """Selector of MatMul, FusedMatMul and 1x1 convolutions of float32 by a large constant matrix: Strassen's algorithm.

    The matrix has a depth of at least 384, a multiple of two vectors, and at least 256 columns; a sample has at least
    64 rows. None for other nodes, if neither the first axis alone is the batch nor all sizes are numbers, if the rows
    or columns do not fit a register tile, on CPUs whose vectors have fewer than 8 float32 numbers, and if the request
    demands the definition (`winograd` False).

    With a `request.rank` r above 0 it returns, for the same products, the kernel of rank r - 1 that computes them by
    their definition.
    """
    weight = request.constant(1)
    if not request.winograd or weight is None or weight.size < _LEAST_DEPTH * _LEAST_COLUMNS:
        return None
    if "Conv" in request.node.op and prod(weight.shape[2:]) != 1:
        return None
    plain = request.select_with(winograd=False, rank=max(request.rank - 1, 0))
    spec = _variant(plain.spec, request) if plain is not None else None
    if plain is None or spec is None or spec.depth < _DEEP:
        return None
    return _call(spec, plain, request.node, weight) if request.rank == 0 else plain


def unlikely_candidates(request: Request) -> Iterator[KernelCall]:
    """Offers that are rarely faster: Strassen for shallow products, and tiles that do all seven products at once."""
    weight = request.constant(1)
    plain = request.select_with(winograd=False)
    spec = _variant(plain.spec, request) if plain is not None and weight is not None and request.winograd else None
    if plain is None or weight is None or spec is None:
        return
    if spec.depth < _DEEP:
        yield _call(spec, plain, request.node, weight)
    if spec.in_turn:
        yield _call(replace(spec, in_turn=False), plain, request.node, weight)


def _call(spec: StrassenSpec, plain: KernelCall, node: Node, weight: Array) -> KernelCall:
    order = _order(node, weight)
    key = f"strassen{spec.tile.columns}x{spec.tile.lanes}{order}"
    others = [operand for operand in plain.operands[2:] if isinstance(operand, In | Out)]
    weights = Packed(1, key, partial(_pack, order=order, tile=spec.tile))
    return replace(plain, spec=spec, operands=(In(0), weights, *others, Scratch(spec.scratch_bytes)))


def _variant(plain: KernelSpec, request: Request) -> StrassenSpec | None:
    """The Strassen spec of the product that `plain` computes.

    None if `plain` is no float32 product of a constant matrix, if its rows or sizes do not fit the tiles, or if the
    product is too small to gain.
    """
    found, rows = product_of(plain), _rows(request.node)
    if found is None or rows is None or found.finish.dtype is not F32 or found.finish.staged:
        return None
    target = request.cpu
    small = rows.each < _LEAST_ROWS or found.depth < _LEAST_DEPTH or found.columns < _LEAST_COLUMNS
    tile = _tile(target, rows.each, found.columns)
    if small or tile is None or found.depth % (2 * target.lanes) or target.lanes < 8:
        return None
    line = PRODUCTS * (found.depth // 2) * WORD_BYTES
    in_turn = line * tile.columns > target.l1_bytes
    block = max(int(target.l2_bytes * _FACTORS) // (line * tile.rows), _LEAST_BLOCK)
    return StrassenSpec(
        rows.samples, rows.each, found.depth, found.columns, found.source, found.finish, tile, block, in_turn
    )


class _Rows(NamedTuple):
    """`each` rows in each of `samples` samples."""

    samples: Dim
    each: int


def _rows(node: Node) -> _Rows | None:
    """The rows of a product by sample; None unless the first axis alone is the batch, or all sizes are numbers.

    If all are numbers, all rows count as one sample.
    """
    batch, *inner, _ = to_product_axes(node.output.shape, perm_attribute(node, "perm_y"))
    count = product(inner)
    if not isinstance(count, int):
        return None
    if isinstance(batch, int):
        return _Rows(1, batch * count)
    return _Rows(batch, count) if batch == symbol(BATCH) else None


class Product(NamedTuple):
    """The common description of a matrix product and a 1x1 convolution."""

    depth: int
    columns: int
    source: Nest
    finish: Finish


def product_of(plain: KernelSpec) -> Product | None:
    """The float32 product by one constant matrix that `plain` computes; None if it computes something else."""
    match plain:
        case GemmSpec(element=DType.FLOAT32, packed=True, a_step=1, y_step=1, nest=nest) if not any(nest.strides[1]):
            finish = Finish(
                plain.epilogue, subnest(nest, nest.strides[2:]), plain.extra_steps, plain.extra_dtypes, plain.dtype
            )
            return Product(plain.depth, plain.columns, subnest(nest, nest.strides[:1]), finish)
        case ConvSpec(element=DType.FLOAT32, taps=1, padded=False, groups=1, pair=1, finish=finish):
            counts, sizes = ([getattr(w, name) for w in plain.windows] for name in ("count", "size"))
            batch, *steps, _ = row_major((plain.batch, *sizes, plain.channels))
            strides = (batch, *(step * w.stride for step, w in zip(steps, plain.windows, strict=True)))
            return Product(plain.depth, plain.columns, Nest((plain.batch, *counts), (strides,)).collapsed(), finish)
    return None


def subnest(nest: Nest, strides: Iterable[tuple[Dim, ...]]) -> Nest:
    """The loops of `nest`, merged, over operands with the given strides, which are some of the nest's own."""
    return Nest(nest.extents, tuple(strides)).collapsed()


def _tile(target: Target, rows: int, columns: int) -> Tile | None:
    """The register tile that covers half a sample of `rows` rows in the fewest cycles.

    None if no tile's width divides half of `columns`, or if padding of the rows would waste too much.
    """
    shapes = _TILES_32 if target.registers >= 32 else _TILES_16
    half = -(-rows // 2)

    def cycles(shape: tuple[int, int]) -> float:
        height, vectors = shape
        return -(-half // height) * tile_cycles(target, height, vectors) / vectors

    fitting = [shape for shape in shapes if columns % (2 * shape[1] * target.lanes) == 0]
    best = min(fitting, key=cycles, default=None)
    wasteful = best is None or -(-half // best[0]) * best[0] > _MOST_PADDING * half
    return None if best is None or wasteful else Tile(*best, target.lanes)


def _order(node: Node, weight: Array) -> tuple[int, ...]:
    """The permutation that makes the weights [..., K, N]; all axes before these two have length 1."""
    if "Conv" in node.op:
        return (*range(2, weight.ndim), 1, 0)
    return perm_attribute(node, "perm_b") or tuple(range(weight.ndim))


def _pack(weight: Array, order: tuple[int, ...], tile: Tile) -> Array:
    ordered = np.transpose(weight, order)
    return pack(ordered.reshape(ordered.shape[-2:]), tile)


def pack(matrix: Array, tile: Tile) -> Array:
    """The right factors of the seven products of a matrix [K, N], float32, in one flat array.

    Their order is [pair of panels][product][K/2][columns of a panel].
    """
    depth, columns = matrix.shape
    shape = (2, depth // 2, columns // (2 * tile.columns), 2, tile.columns)
    (b11, b12), (b21, b22) = matrix.reshape(shape).transpose(0, 3, 2, 1, 4)
    factors = np.empty((shape[2], PRODUCTS, shape[1], tile.columns), np.float32)
    f = factors.swapaxes(0, 1)
    f[0], f[1], f[6] = b11, b21, b22
    np.subtract(b12, b11, out=f[5])
    np.subtract(b22, f[5], out=f[2])
    np.subtract(b22, b12, out=f[3])
    np.subtract(b21, f[2], out=f[4])
    return factors.reshape(-1)
