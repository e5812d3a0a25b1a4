"""Tiles of matrix products and convolutions on a GPU, and the cost model that ranks them for batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from lathe.core.ir.dim import evaluate
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.shared.nest import BATCH
from lathe.core.kernels.target import GpuTarget

F32 = DType.FLOAT32
SAMPLES = (1, 8, 32, 128)  # batch sizes for which tiles are ranked
_LARGE = 128  # extent assumed where a size depends on the batch
_TYPICAL = 32  # batch size assumed when the depth is split
_MOST_PARTS = 64  # of a split depth
_LEAST_STEPS = 4  # steps of the depth loop in each part of a split depth
LEAST_BYTES = 32  # smallest depth of a tensor core product of bytes
LEAST = 16  # smallest rows, columns and depth of other tensor core products


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The tile of one program: `rows` x `columns` sums, to which each step adds `depth` products.

    As text `128x64x32/4`: rows, columns, depth, stages. `warps` of 32 threads run it, and loads are pipelined in
    `stages`. All numbers but `stages` are powers of two.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def area(self) -> int:
        return self.rows * self.columns

    @property
    def split_registers(self) -> int:
        """The registers of a thread, with `SPLIT`, for sums, those of a step, and three parts of each left factor."""
        return (2 * self.area + 3 * self.rows * self.depth) // (32 * self.warps)

    def loaded(self, element: DType, halves: int) -> int:
        """The bytes that a step loads; `halves` is the number of arrays of the right factor."""
        return (self.rows + halves * self.columns) * self.depth * element.itemsize

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}/{self.stages}"


_TILES = tuple(
    ProductTile(*facts)
    for facts in (
        (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4), (64, 256, 64, 4, 3), (128, 64, 64, 4, 4),
        (64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (128, 128, 64, 8, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3),
        (128, 256, 32, 8, 3), (128, 128, 32, 8, 3), (128, 64, 32, 4, 4), (64, 128, 32, 4, 4), (64, 64, 32, 4, 4),
        (128, 32, 32, 4, 4), (32, 128, 32, 4, 4), (64, 32, 64, 4, 3), (32, 64, 64, 4, 3), (32, 32, 64, 4, 4),
        (16, 128, 64, 4, 3), (16, 64, 64, 4, 4), (128, 16, 64, 4, 3), (64, 16, 64, 4, 4), (16, 32, 128, 4, 3),
        (16, 16, 128, 4, 3),
    )
)  # fmt: skip
# The cost model (`_microseconds`), fitted on an H100; products are bfloat16 multiply-adds of one multiprocessor.
_WARP_GROUP_PRODUCT = 5.1e-7  # microseconds, by instructions of four warps (wgmma)
_PRODUCT = 8.0e-7  # the same by instructions of one warp (mma)
_LOAD = 1.43e-5  # microseconds of a multiprocessor per byte
_WAIT, _WAIT_OF_WARP = 0.25, 0.38  # microseconds that a step of one program waits, with wgmma and with mma
_BEGIN = 1.15  # microseconds before the first products of a wave
_END = 7.7e-5  # microseconds for each sum that is stored
_REGISTERS, _MOST_REGISTERS, _OTHER_REGISTERS = 65536, 255, 60  # of a multiprocessor; of a thread, beside its sums
_MOST_SPLIT = 192  # registers of `ProductTile.split_registers`; with more, compilers spill them to memory
_RESERVED = 1024  # bytes of shared memory that CUDA takes for itself in each program
HOPPER, _WARP_GROUP_ROWS = 90, 64  # the first architecture with wgmma, and its least rows


@dataclass(frozen=True, slots=True)
class RankedTiles:
    """Tiles of a product: `best` are the best ones for the batch sizes in `SAMPLES`; `tiles` are all in order.

    In that order the best tiles come first, those for large batches before those for small ones; then the second best.
    """

    tiles: tuple[ProductTile, ...]
    best: tuple[ProductTile, ...]

    def changed(self, change: Callable[[ProductTile], ProductTile]) -> RankedTiles:
        """The tiles that `change` makes of these, in the same order, each once."""
        return RankedTiles(tuple(dict.fromkeys(map(change, self.tiles))), tuple(map(change, self.best)))


def ranked_tiles(
    target: GpuTarget, rows: Dim, columns: Dim, depth: Dim, batch: Dim, element: DType, halves: int = 1
) -> RankedTiles:
    """The tiles that fit into shared memory and the product's size, ranked by estimated time (`_microseconds`).

    `batch` is the number of products, `halves` that of the arrays of the right factor (2 with `SPLIT`). The depth of a
    tile is reduced to that of a shallow product.
    """
    sizes = [(_at(rows, n), _at(columns, n), _at(batch, n)) for n in SAMPLES]
    most = [max(_power(max(size[axis] for size in sizes)), LEAST) for axis in (0, 1)]
    deepest = max(_power(_at(depth, max(SAMPLES))), LEAST if element.itemsize > 1 else LEAST_BYTES)
    fitting = dict.fromkeys(
        replace(tile, depth=min(tile.depth, deepest))
        for tile in _TILES
        if tile.rows <= most[0]
        and tile.columns <= most[1]
        and tile.loaded(element, halves) * tile.stages <= target.shared_bytes
        and (halves == 1 or tile.split_registers <= _MOST_SPLIT)
    )
    fixed = all(isinstance(dim, int) for dim in (rows, columns, batch))

    def order(at: int) -> list[ProductTile]:
        deep = _at(depth, SAMPLES[at])
        return sorted(fitting, key=lambda tile: _microseconds(target, tile, *sizes[at], deep, element, fixed, halves))

    orders = [order(at) for at in range(len(SAMPLES))]
    ranked = (each[place] for place in range(len(fitting)) for each in reversed(orders))
    return RankedTiles(tuple(dict.fromkeys(ranked)), tuple(each[0] for each in orders))


def _microseconds(
    target: GpuTarget, tile: ProductTile, rows: int, columns: int, batch: int, depth: int, element: DType, fixed: bool,
    halves: int,
) -> float:  # fmt: skip
    """The estimated time of `batch` products, without what all tiles have in common.

    Multiprocessors are busy with the steps of all their programs; at the beginning of each wave of programs they wait.
    One program also waits for its loads in every step. The constants fit 1,100 measurements of bfloat16 products and
    convolutions on an H100, with a mean error of 18 % (docs/measurements/gpu.md): the tile of least estimated time took
    2 to 4 % longer than the fastest of those measured. If the sizes are `fixed`, the depth may be split among programs.
    """
    count = -(-rows // tile.rows) * -(-columns // tile.columns) * batch
    parts = _parts(target, tile, count, depth) if fixed else 1
    steps = -(-depth // tile.depth) / parts
    loaded = tile.loaded(element, halves)
    work = tile.rows * tile.columns * tile.depth * _cost_of_product(element, target)
    is_wide = target.arch >= HOPPER and tile.rows >= _WARP_GROUP_ROWS
    wait, product = (_WAIT, _WARP_GROUP_PRODUCT) if is_wide else (_WAIT_OF_WARP, _PRODUCT)
    shares = count * parts / target.multiprocessors
    waves = ceil(shares / _programs_at_once(target, tile, loaded))
    end = _END * tile.area
    busy = max(shares, 1.0) * (steps * max(work * product, loaded * _LOAD) + end)
    return max(steps * wait + end, waves * _BEGIN + busy)


def _programs_at_once(target: GpuTarget, tile: ProductTile, loaded: int) -> int:
    """The number of programs that a multiprocessor runs at once, by its shared memory and registers."""
    threads = 32 * tile.warps
    registers = threads * min(tile.area // threads + _OTHER_REGISTERS, _MOST_REGISTERS)
    return max(min(target.shared_bytes // (loaded * tile.stages + _RESERVED), _REGISTERS // registers), 1)


def _cost_of_product(element: DType, target: GpuTarget) -> float:
    """The time of a product of these factors, relative to bfloat16. Three TF32 products make one of float32."""
    if element is F32:
        return 2.0 if target.tf32 else 6.0
    return 0.5 if element.itemsize == 1 else 1.0


def _parts(target: GpuTarget, tile: ProductTile, count: int, depth: int) -> int:
    """The number of parts of the depth with which `count` tiles give each multiprocessor about two programs.

    Each part has at least `_LEAST_STEPS` steps, and there are at most `_MOST_PARTS` parts and at least one.
    """
    wanted = 2 * target.multiprocessors // max(count, 1)
    return max(min(wanted, depth // (_LEAST_STEPS * tile.depth), _MOST_PARTS), 1)


def parts_of(target: GpuTarget, tile: ProductTile, programs: Dim, depth: Dim) -> int:
    """The number of parts, at least 1, into which to split the depth (split-K) of a product with `programs` tiles.

    More parts give a GPU more programs than there are tiles, as `_parts` says. The result is 1 if there are more tiles
    than multiprocessors, if the depth is too short, or if the number of tiles depends on the batch.
    """
    return _parts(target, tile, programs, _at(depth, _TYPICAL)) if isinstance(programs, int) else 1


def padded(size: Dim) -> int:
    """The block extent for `size` rows or columns: a power of two, at least `LEAST`; 128 if it depends on the batch."""
    return max(_power(size), LEAST) if isinstance(size, int) else _LARGE


def _at(dim: Dim, n: int) -> int:
    return evaluate(dim, {BATCH: n})


def _power(number: int) -> int:
    """The smallest power of two >= `number`."""
    return 1 << max(number - 1, 0).bit_length()
