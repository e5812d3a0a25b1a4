"""What matrix products and convolutions on a GPU have in common: tiles, what multiplies, and what becomes of sums."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from core.ir.dim import evaluate
from core.ir.graph import Array, Graph
from core.ir.types import Dim, DType
from core.kernels.catalog.base import Block, Operand, Scratch
from core.kernels.catalog.cuda.tiling import blocks
from core.kernels.catalog.nest import BATCH
from core.kernels.target import GpuTarget

F32, F16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
HALVES = frozenset({F16, BF16})
FACTORS = HALVES | {F32}
_SAMPLES = (1, 8, 32, 128)  # values of n that a tile should be good for
_LARGE = 128
_TYPICAL = 32  # batch
_MOST_PARTS = 64
_LEAST_STEPS = 4  # of a piece of the depth
I8 = DType.INT8
SHIFT = 128  # from uint8 to the int8 that tensor cores multiply
LEAST_BYTES = 32  # depth of what tensor cores multiply
LEAST = 16  # rows, columns and depth of what tensor cores multiply


@dataclass(frozen=True, slots=True)
class ProductTile:
    """A program makes `rows x columns` sums, `depth` products of each at a time, by `warps` of 32 threads; loads run
    `stages` steps ahead. All sizes are powers of two."""

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
_LINE = 24  # products that take as long as loading one row or column of factors


@dataclass(frozen=True)
class Results:
    """What happens to a sum on its way to memory: the epilogue, whose first input is of type `computed`, and a store.

    Extras and Y move along the rows by a nest that lies with the kernel's spec, and along the columns by these steps.
    """

    epilogue: Graph | None
    computed: DType
    extra_dtypes: tuple[DType, ...]
    extra_steps: tuple[Dim, ...]
    dtype: DType  # of Y
    y_step: Dim = 1


def precisions(element: DType, target: GpuTarget) -> tuple[str, ...]:
    """How tensor cores may multiply elements of this type, as Triton calls it, the likeliest fastest first.

    Three products of halves of the mantissa ("tf32x3") are nearly as exact as one of whole numbers ("ieee"), which no
    tensor core can take.
    """
    if element is not F32:
        return ("ieee",)
    return ("tf32",) if target.tf32 else ("tf32x3", "ieee")


def ranked_tiles(
    target: GpuTarget, rows: Dim, columns: Dim, depth: Dim, batch: Dim, element: DType
) -> tuple[ProductTile, ...]:
    """Tiles that fit into shared memory: the one that is never far from the best, whatever the batch size, then the
    best ones for each, then the rest."""
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
    depths = [_at(depth, n) if fixed else 0 for n in _SAMPLES]  # 0: programs cannot share it
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
    """Waves of programs, times the longer of multiplying and loading. `depth` is what programs may share."""
    count = evaluate(blocks(rows, tile.rows) * blocks(columns, tile.columns) * batch, {})
    parts = _parts(target, tile, count, depth)
    waves = -(-count * parts // target.multiprocessors)
    return waves / parts * (tile.rows * tile.columns + _LINE * (tile.rows + tile.columns))


def _parts(target: GpuTarget, tile: ProductTile, count: int, depth: int) -> int:
    """As many pieces of the depth as a GPU needs programs, none of them too short."""
    wanted = 2 * target.multiprocessors // max(count, 1)
    return max(min(wanted, depth // (_LEAST_STEPS * tile.depth), _MOST_PARTS), 1)


def parts_of(target: GpuTarget, tile: ProductTile, programs: Dim, depth: Dim) -> int:
    """Into how many pieces to cut the depth of a product that has too few tiles to occupy a GPU; 1 where it has enough,
    or where their number depends on the batch."""
    return _parts(target, tile, programs, _at(depth, _TYPICAL)) if isinstance(programs, int) else 1


def split_operands(tile: ProductTile, programs: Dim, parts: int) -> tuple[Operand, ...]:
    """Where the programs of one tile leave their sums, and where they count who is done: the last one puts all sums
    together, in order, and leaves the count at 0 for the next run."""
    if parts == 1 or not isinstance(programs, int):
        return ()
    sums = Scratch(programs * parts * tile.rows * tile.columns * F32.itemsize, shared=True)
    return sums, Block("counts", np.zeros(programs, np.int32))


def rounded(array: Array, element: DType) -> Array:
    return array.astype(element.numpy)


def padded(size: Dim) -> int:
    """The extent of a block that holds so many rows or columns of a product; the largest of interest where the size
    depends on the batch."""
    return max(_power(size), LEAST) if isinstance(size, int) else _LARGE


def _at(dim: Dim, n: int) -> int:
    return evaluate(dim, {BATCH: n})


def _power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(number - 1, 0).bit_length()
