"""Register tiles and packed weight panels, which matrix products and convolutions share.

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

from lathe.core.ir.dim import affine
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.words import WORD_BYTES
from lathe.core.kernels.target import Target

LINE = 16  # words of a cache line
LINE_BYTES = LINE * WORD_BYTES

RowChoices = dict[int, tuple[int, ...]]

# Row counts per panel width in vectors that measured fast: for 32 registers, for 16, and for plain targets with 16.
_ROWS_32: RowChoices = {1: (10, 8), 2: (10, 8, 7), 3: (9, 8, 7), 4: (6, 7, 5)}
_ROWS_16: RowChoices = {1: (10, 6), 2: (6, 5, 4), 3: (4, 3)}
_ROWS_PLAIN: RowChoices = {1: (8, 6), 2: (5, 4)}
_REUSES = 4  # the least number of tiles per panel that hides the prefetch of the next panel
_WEIGHTS = 0.5  # share of the second-level cache for weights that stay there
BLOCK_TILES = 8  # tiles of rows that go through all panels while their inputs and results stay in the cache
SHORT_EPILOGUE = 8  # additions; a longer epilogue is deferred or staged
# The same for an epilogue of plain arithmetic that would be staged, such as that of a quantized sum: storing the sums
# and loading them takes longer than its code in each tile. ResNet-50 in int8 takes 157 instead of 162 ms on a Zen 4.
_SHORT_ARITHMETIC = 24
_FMA_LATENCY = 4.0  # cycles; two multiply-adds and two loads start per cycle
_SAMPLE_BATCHES = (1, 2, 8, 32)  # batch sizes for the cost of a tile when the row count depends on the batch


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
    """The register tile for a product of `rows` x `columns`: number `rank` of `ranked_tiles`, or the last one.

    Rank 0 is expected to be the fastest.
    """
    ranked = ranked_tiles(target, rows, columns)
    return ranked[min(rank, len(ranked) - 1)]


@lru_cache(maxsize=4096)
def ranked_tiles(target: Target, rows: Dim, columns: int) -> tuple[Tile, ...]:
    """Register tiles for a product of `rows` x `columns`, the one expected to be fastest first.

    Then follow the best tile of each width in vectors, the second best of each width, and so on.
    """
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
    """Heights of the smaller tiles below the last full tile, in descending order.

    If `additive`, several of them add up to the remainder; otherwise one of them equals it.
    """

    heights: tuple[int, ...]
    additive: bool


def tail_heights(rows: Dim, height: int) -> Tails:
    """The heights of the smaller tiles that cover what full tiles of `height` rows leave of `rows` rows.

    If at most two remainders above 0 can occur, each has a tile of its own; otherwise tiles of 8, 4, 2 and 1 rows, as
    far as they are lower than `height`, add up.
    """
    form = affine(rows, "n")
    if form is None:
        remainders = set(range(1, height))
    else:
        remainders = {(form[0] * n + form[1]) % height for n in range(height)} - {0}
    if len(remainders) <= 2:
        return Tails(tuple(sorted(remainders, reverse=True)), additive=False)
    return Tails(tuple(size for size in (8, 4, 2, 1) if size < height), additive=True)


def prefetch_tiles(rows: Dim, tile: Tile, in_blocks: bool) -> int:
    """The number of row tiles over which the prefetch of the next panel is spread.

    They are the whole tiles of a batch of one, or 8 if `rows` is not affine in n. 0 (no prefetch) if there are fewer
    than 4: then reading panels is bound by memory, and prefetches compete. `in_blocks`: whether rows go through the
    panels in blocks of 8 tiles (`BLOCK_TILES`); then the result is at most 8.
    """
    form = affine(rows, "n")
    tiles = sum(form) // tile.rows if form is not None else BLOCK_TILES
    return 0 if tiles < _REUSES else min(tiles, BLOCK_TILES) if in_blocks else tiles


def fits_l2(target: Target, depth: int, columns: int) -> bool:
    """Whether all panels of weights [depth, columns], counted in words, fit half of the second-level cache."""
    return depth * columns * WORD_BYTES <= target.l2_bytes * _WEIGHTS


def packed_size(depth: int, columns: int, tile: Tile) -> int:
    """Elements of one packed matrix [depth, columns], padding included."""
    return depth * -(-columns // tile.lanes) * tile.lanes


def pack_panels(matrix: Array, tile: Tile) -> Array:
    """A matrix [..., K, N] as panels, [..., `packed_size` elements]: the last axis holds all panels of one matrix."""
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
    """Whether an epilogue runs over a finished block of rows instead of inside each tile: a long one does.

    Then the code of the epilogue exists only once. Until the epilogue runs, the sums lie in the output, so no other
    value may share that buffer. The output's type `dtype` must be float32 like the sums, and its stride along the
    columns, `step`, must be 1.
    """
    return _is_long(epilogue) and step == 1 and _can_hold_sums(epilogue, dtype)


def is_staged(epilogue: Graph | None, dtype: DType, step: int) -> bool:
    """Whether a long epilogue runs tile by tile over a copy of the sums in scratch.

    That is so if the output cannot hold the sums (its type `dtype` or the type of the sums is not float32), but its
    stride along the columns, `step`, is 1.
    """
    if epilogue is None or step != 1 or _can_hold_sums(epilogue, dtype):
        return False
    return _is_long(epilogue, _SHORT_ARITHMETIC if bodies.is_arithmetic(epilogue) else SHORT_EPILOGUE)


def _is_long(epilogue: Graph | None, short: int = SHORT_EPILOGUE) -> bool:
    return epilogue is not None and bodies.cost(epilogue) > short


def _can_hold_sums(epilogue: Graph | None, dtype: DType) -> bool:
    """Whether output and sums are float32, so that the output can hold the sums until the epilogue runs."""
    return dtype is DType.FLOAT32 and epilogue is not None and epilogue.inputs[0].dtype is DType.FLOAT32


def stage_bytes(tile: Tile) -> int:
    """Bytes of scratch for the sums of one register tile."""
    return tile.rows * tile.columns * WORD_BYTES


def row_pitch(depth: int, tile: Tile) -> int:
    """Words between the rows that are copied for a tile: the depth, rounded up to whole vectors."""
    return -(-depth // tile.lanes) * tile.lanes


def _row_choices(target: Target) -> RowChoices:
    if target.registers >= 32:
        return _ROWS_32
    return _ROWS_PLAIN if target.name == "plain" else _ROWS_16


def _panel_vectors(total: int, widths: Iterable[int]) -> int:
    """The panel width, one of `widths` in vectors, for a matrix of `total` vectors.

    It is chosen so that the last panel is as full as possible; panels of more than two vectors are preferred.
    """
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
    """The estimated cycles per step of K for `rows` rows of a panel of `vectors` vectors.

    The rows are cut into tiles of `height`, and smaller ones for the rest.
    """
    full, rest = divmod(rows, height)
    cycles = full * tile_cycles(target, height, vectors)
    for size in (8, 4, 2, 1):
        if size <= rest:
            cycles += tile_cycles(target, size, vectors)
            rest -= size
    return cycles


def tile_cycles(target: Target, rows: int, vectors: int) -> float:
    """The estimated cycles per step of K for one register tile of `rows` x `vectors` accumulators."""
    products = rows * vectors
    spare = target.registers - products - vectors
    loads = vectors + (rows if spare > 0 else products)  # without a register for a broadcast, every product loads it
    return max(products / 2, loads / 2, _FMA_LATENCY / 2)
