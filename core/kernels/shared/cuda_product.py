"""Shared parts of matrix products and convolutions on a GPU: tiles, precision, split depth, and the epilogue."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import Block, Operand, Scratch
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.nest import BATCH
from lathe.core.kernels.target import GpuTarget

F32, F16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
HALVES = frozenset({F16, BF16})
FACTORS = HALVES | {F32}
_SAMPLES = (1, 8, 32, 128)  # batch sizes for which tiles are ranked
_LARGE = 128  # extent assumed where a size depends on the batch
_TYPICAL = 32  # batch size assumed when the depth is split
_MOST_PARTS = 64  # of a split depth
_LEAST_STEPS = 4  # steps of the depth loop in each part of a split depth
I8 = DType.INT8
SHIFT = 128  # subtracted from uint8, since tensor cores multiply int8
LEAST_BYTES = 32  # smallest depth of a tensor core product of bytes
LEAST = 16  # smallest rows, columns and depth of other tensor core products


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The tile of one program: `rows` x `columns` sums, to which each step adds `depth` products.

    `warps` of 32 threads run it, and loads are pipelined in `stages`. All numbers but `stages` are powers of two.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}"


_TILES = tuple(
    ProductTile(*facts)
    for facts in (
        (128, 256, 32, 8, 3), (128, 128, 32, 8, 3), (128, 64, 32, 4, 4), (64, 128, 32, 4, 4), (64, 64, 32, 4, 4),
        (128, 32, 32, 4, 4), (32, 128, 32, 4, 4), (64, 32, 64, 4, 3), (32, 64, 64, 4, 3), (32, 32, 64, 4, 4),
        (16, 128, 64, 4, 3), (16, 64, 64, 4, 4), (128, 16, 64, 4, 3), (64, 16, 64, 4, 4), (16, 32, 128, 4, 3),
        (16, 16, 128, 4, 3),
    )
)  # fmt: skip
_LINE = 24  # multiply-adds in the time of loading one row or column of factors, for the cost model


@dataclass(frozen=True)
class Results:
    """How sums are stored: the epilogue, whose first input has type `computed`, and the output Y.

    Along the columns the extra inputs and Y move by the steps given here; along the rows by a nest in the kernel's
    spec.
    """

    epilogue: Graph | None
    computed: DType
    extra_dtypes: tuple[DType, ...]
    extra_steps: tuple[Dim, ...]
    dtype: DType  # of Y
    y_step: Dim = 1


def precisions(element: DType, target: GpuTarget) -> tuple[str, ...]:
    """Triton's `input_precision` values for elements of this type; the one expected to be fastest comes first.

    "tf32x3" makes three tensor core products of mantissa halves and is nearly as exact as "ieee", which runs without
    tensor cores.
    """
    if element is not F32:
        return ("ieee",)
    return ("tf32",) if target.tf32 else ("tf32x3", "ieee")


def ranked_tiles(
    target: GpuTarget, rows: Dim, columns: Dim, depth: Dim, batch: Dim, element: DType
) -> tuple[ProductTile, ...]:
    """Tiles that fit into shared memory and the product's size, in the order in which they should be tried.

    First the tile with the least total regret (its cost relative to the best tile) over the batch sizes 1, 8, 32 and
    128, then the best tile for 128, 32, 8 and 1, then the rest. `batch` is the number of products. The depth of a
    tile is reduced to that of a shallow product.
    """
    sizes = [(_at(rows, n), _at(columns, n), _at(batch, n)) for n in _SAMPLES]
    most = [max(_power(max(size[axis] for size in sizes)), LEAST) for axis in (0, 1)]
    deepest = max(_power(_at(depth, max(_SAMPLES))), LEAST if element.itemsize > 1 else LEAST_BYTES)
    fitting = dict.fromkeys(
        replace(tile, depth=min(tile.depth, deepest))
        for tile in _TILES
        if tile.rows <= most[0]
        and tile.columns <= most[1]
        and (tile.rows + tile.columns) * tile.depth * element.itemsize * tile.stages <= target.shared_bytes
    )
    fixed = all(isinstance(dim, int) for dim in (rows, columns, batch))
    depths = [_at(depth, n) if fixed else 0 for n in _SAMPLES]  # 0: the depth cannot be split among programs
    costs = {
        tile: [max(_cost(target, tile, *size, deep), 1) for size, deep in zip(sizes, depths, strict=True)]
        for tile in fitting
    }
    least = [min(column) for column in zip(*costs.values(), strict=True)]
    regret = {tile: sum(c / best for c, best in zip(each, least, strict=True)) for tile, each in costs.items()}
    ranked = sorted(fitting, key=regret.__getitem__)
    best_of = [min(ranked, key=lambda tile: costs[tile][at]) for at in reversed(range(len(sizes)))]
    return tuple(dict.fromkeys([ranked[0], *best_of, *ranked]))


def _cost(target: GpuTarget, tile: ProductTile, rows: int, columns: int, batch: int, depth: int) -> float:
    """The estimated time for `batch` products, in arbitrary units: waves of programs times the cost of a tile.

    A `depth` other than 0 may be split among programs.
    """
    count = evaluate(blocks(rows, tile.rows) * blocks(columns, tile.columns) * batch, {})
    parts = _parts(target, tile, count, depth)
    waves = -(-count * parts // target.multiprocessors)
    return waves / parts * (tile.rows * tile.columns + _LINE * (tile.rows + tile.columns))


def _parts(target: GpuTarget, tile: ProductTile, count: int, depth: int) -> int:
    """The number of parts of the depth with which `count` tiles give each multiprocessor about two programs.

    Each part has at least `_LEAST_STEPS` steps, and there are at most `_MOST_PARTS` parts and at least one.
    """
    wanted = 2 * target.multiprocessors // max(count, 1)
    return max(min(wanted, depth // (_LEAST_STEPS * tile.depth), _MOST_PARTS), 1)


def parts_of(target: GpuTarget, tile: ProductTile, programs: Dim, depth: Dim) -> int:
    """The number of parts into which to split the depth (split-K) of a product with too few tiles to fill the GPU.

    `programs` is the number of tiles. The result is 1 if there are enough tiles, or if their number depends on the
    batch.
    """
    return _parts(target, tile, programs, _at(depth, _TYPICAL)) if isinstance(programs, int) else 1


def split_operands(tile: ProductTile, programs: Dim, parts: int) -> tuple[Operand, ...]:
    """The operands of a split depth: scratch for partial sums, and one counter per tile.

    There are no operands if `parts` is 1, or if the number of tiles, `programs`, is not known.

    The programs of a tile count themselves when they are done. The last program adds up all partial sums in order, and
    resets the counter to 0 for the next run.
    """
    if parts == 1 or not isinstance(programs, int):
        return ()
    sums = Scratch(programs * parts * tile.rows * tile.columns * F32.itemsize, shared=True)
    return sums, Block("counts", np.zeros(programs, np.int32))


def cast_array(array: Array, element: DType) -> Array:
    """A copy of the array, converted to the NumPy type of `element`."""
    return array.astype(element.numpy)


def padded(size: Dim) -> int:
    """The block extent for `size` rows or columns: a power of two, at least `LEAST`; 128 if it depends on the batch."""
    return max(_power(size), LEAST) if isinstance(size, int) else _LARGE


def _at(dim: Dim, n: int) -> int:
    return evaluate(dim, {BATCH: n})


def _power(number: int) -> int:
    """The smallest power of two >= `number`."""
    return 1 << max(number - 1, 0).bit_length()
