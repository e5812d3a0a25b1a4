"""Register tiles, and weights packed for them: what matrix products and convolutions share.

A weight matrix [K, N] is cut into panels of `Tile.columns` columns, each stored [K][columns], the last one padded with
zeros to whole vectors. A kernel keeps `rows` x `vectors` accumulators in registers while it walks down a panel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from core.ir.dim import affine
from core.ir.graph import Array, Graph
from core.ir.types import Dim, DType
from core.kernels.catalog import body as bodies
from core.kernels.catalog.words import WORD_BYTES
from core.kernels.target import Target

LINE = 16  # words of a cache line
LINE_BYTES = LINE * WORD_BYTES

RowChoices = dict[int, tuple[int, ...]]

# Row counts per panel width in vectors that measured fast where 32, 16 and 16 registers hold the tile.
_ROWS_32: RowChoices = {1: (10, 8), 2: (10, 8, 7), 3: (9, 8, 7), 4: (6, 7, 5)}
_ROWS_16: RowChoices = {1: (10, 6), 2: (6, 5, 4), 3: (4, 3)}
_ROWS_PLAIN: RowChoices = {1: (8, 6), 2: (5, 4)}
_REUSES = 4
_WEIGHTS = 0.5  # of the second-level cache, for weights that stay there
BLOCK_TILES = 8  # tiles of rows that go through all panels while what they read and write is in the cache
SHORT_EPILOGUE = 8  # additions
_FMA_LATENCY = 4.0  # cycles; two start per cycle, and so do two loads
_SAMPLE_BATCHES = (1, 2, 8, 32)  # where the cost of a tile is weighed when the row count depends on the batch


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` x `vectors` accumulators of `lanes` elements each."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


def choose_tile(target: Target, rows: Dim, columns: int, rank: int = 0) -> Tile:
    """The tile for a product with so many rows and columns; `rank` asks for the second best, and so on."""
    ranked = ranked_tiles(target, rows, columns)
    return ranked[min(rank, len(ranked) - 1)]


@lru_cache(maxsize=4096)
def ranked_tiles(target: Target, rows: Dim, columns: int) -> tuple[Tile, ...]:
    """Tiles for such a product: the one that should be fastest, then the best of every width, their second best, ..."""
    table, counts = _row_choices(target), _sample_rows(rows)
    total = -(-columns // target.lanes)
    preferred = _panel_vectors(total, sorted(table))

    def cycles(vectors: int, height: int, total: int) -> float:
        whole, rest = divmod(total, vectors)
        panels = [(whole, vectors), (1, rest)] if rest else [(whole, vectors)]
        return sum(times * _cost(target, count, height, width) / count for count in counts for times, width in panels)

    first = min(table[preferred], key=lambda height: cycles(preferred, height, preferred))
    by_width = [
        sorted((cycles(vectors, height, total), vectors, height) for height in heights)
        for vectors, heights in table.items()
        if vectors <= total
    ]
    by_place = [shape for place in zip_longest(*by_width) for shape in sorted(filter(None, place))]
    shapes = [(preferred, first), *((vectors, height) for _, vectors, height in by_place)]
    return tuple(dict.fromkeys(Tile(min(height, max(counts)), vectors, target.lanes) for vectors, height in shapes))


class Tails(NamedTuple):
    """Heights of the smaller tiles below the last full one, the greatest first.

    `additive`: those that add up to the remainder are used; otherwise the one that equals it.
    """

    heights: tuple[int, ...]
    additive: bool


def tails(rows: Dim, height: int) -> Tails:
    """When few remainders can occur each has its tile; otherwise powers of two add up to any."""
    form = affine(rows, "n")
    if form is None:
        remainders = set(range(1, height))
    else:
        remainders = {(form[0] * n + form[1]) % height for n in range(height)} - {0}
    if len(remainders) <= 2:
        return Tails(tuple(sorted(remainders, reverse=True)), additive=False)
    return Tails(tuple(size for size in (8, 4, 2, 1) if size < height), additive=True)


def tiles_ahead(rows: Dim, tile: Tile, in_blocks: bool) -> int:
    """The tiles of a panel over which fetching the next one is spread. 0 where a batch of one has few: panels pass by
    at the speed of memory anyway, and fetching only competes."""
    form = affine(rows, "n")
    tiles = sum(form) // tile.rows if form is not None else BLOCK_TILES
    return 0 if tiles < _REUSES else min(tiles, BLOCK_TILES) if in_blocks else tiles


def stays_cached(target: Target, depth: int, columns: int) -> bool:
    """Whether all panels of such weights stay in the second-level cache while rows go through them."""
    return depth * columns * WORD_BYTES <= target.l2_bytes * _WEIGHTS


def packed_size(depth: int, columns: int, tile: Tile) -> int:
    """Elements of one packed matrix."""
    return depth * -(-columns // tile.lanes) * tile.lanes


def pack_panels(matrix: Array, tile: Tile) -> Array:
    """[..., K, N] as panels, flattened behind the leading axes."""
    *batch, depth, columns = matrix.shape
    flat = matrix.reshape(-1, depth, columns)
    packed = np.empty((flat.shape[0], packed_size(depth, columns, tile)), matrix.dtype)
    for start in range(0, columns, tile.columns):
        width = min(tile.columns, columns - start)
        padded = packed_size(1, width, tile)
        panel = packed[:, start * depth : (start + padded) * depth].reshape(-1, depth, padded)
        panel[..., :width] = flat[..., start : start + width]
        panel[..., width:] = 0
    return packed.reshape(*batch, -1)


def is_deferred(epilogue: Graph | None, dtype: DType, step: int) -> bool:
    """Whether an epilogue runs over a finished block of rows instead of inside every tile.

    One copy of long code is enough; the results wait in the output meanwhile, so nothing else may lie in its buffer.
    """
    return _is_long(epilogue) and step == 1 and _holds_sums(epilogue, dtype)


def is_staged(epilogue: Graph | None, dtype: DType, step: int) -> bool:
    """Whether a long epilogue that cannot wait in the output runs tile by tile over a copy of the sums."""
    return _is_long(epilogue) and step == 1 and not _holds_sums(epilogue, dtype)


def _is_long(epilogue: Graph | None) -> bool:
    return epilogue is not None and bodies.cost(epilogue) > SHORT_EPILOGUE


def _holds_sums(epilogue: Graph | None, dtype: DType) -> bool:
    """Whether sums fit the output as they are."""
    return dtype is DType.FLOAT32 and epilogue is not None and epilogue.inputs[0].dtype is DType.FLOAT32


def stage_bytes(tile: Tile) -> int:
    """Room for the sums of a tile."""
    return tile.rows * tile.columns * WORD_BYTES


def row_pitch(depth: int, tile: Tile) -> int:
    """Words from one row to the next of those that are copied for a tile, each filled up to whole vectors."""
    return -(-depth // tile.lanes) * tile.lanes


def _row_choices(target: Target) -> RowChoices:
    if target.registers >= 32:
        return _ROWS_32
    return _ROWS_PLAIN if target.name == "plain" else _ROWS_16


def _panel_vectors(total: int, widths: Iterable[int]) -> int:
    """Panel width in vectors for a matrix `total` vectors wide: the last panel should be as full as can be."""
    if total in widths:
        return total
    return max(widths, key=lambda width: (total % width == 0 and width > 2, total % width if width > 2 else 0, width))


def _sample_rows(rows: Dim) -> tuple[int, ...]:
    form = affine(rows, "n")
    if form is None:
        return (1024,)
    return tuple(max(form[0] * n + form[1], 1) for n in _SAMPLE_BATCHES) if form[0] else (max(form[1], 1),)


@lru_cache(maxsize=4096)
def _cost(target: Target, rows: int, height: int, vectors: int) -> float:
    """Cycles per step of K to cover `rows` with tiles of `height` and smaller ones."""
    full, rest = divmod(rows, height)
    cycles = full * tile_cycles(target, height, vectors)
    for size in (8, 4, 2, 1):
        if size <= rest:
            cycles += tile_cycles(target, size, vectors)
            rest -= size
    return cycles


def tile_cycles(target: Target, rows: int, vectors: int) -> float:
    """Cycles per step of K for one register tile."""
    products = rows * vectors
    spare = target.registers - products - vectors
    loads = vectors + (rows if spare > 0 else products)  # no register left for a broadcast: every product loads it
    return max(products / 2, loads / 2, _FMA_LATENCY / 2)
