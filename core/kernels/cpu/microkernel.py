"""The inner loop of matrix products and convolutions: a tile of accumulators in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lathe.core.codegen.dot import multiply_add
from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.shared.panels import BLOCK_TILES, LINE, Tile, tail_heights

Grid: TypeAlias = list[list[Val]]  # [rows][vectors]

_BUSY = 8  # products that must be independent to keep two pipelines of latency 4 busy
_TASKS_PER_THREAD = 4
_MOST_AHEAD = 2 * LINE  # the most words that are prefetched per step down a panel
_BODY = 112  # products in the loop body: enough to hide the loop overhead, few enough for the instruction cache


@dataclass(frozen=True)
class Prefetch:
    """Prefetches into the second-level cache while a tile walks down its panel.

    Each step fetches `pace` words from `place` on, which then moves by `step` words. A tile with nothing to prefetch
    fetches the lines that it reads itself.
    """

    place: Pointer
    step: Val
    pace: int

    def after(self, steps: Val) -> Prefetch:
        """The same prefetches for code that starts `steps` steps further down the panel."""
        return Prefetch(self.place.at(steps * self.step), self.step, self.pace)

    def fetch(self, step: Val, count: int) -> None:
        """Generate the prefetches of the `count` steps from number `step` on."""
        place = self.place.at(step * self.step)
        for line in range(0, count * self.pace, LINE):
            place.prefetch(line)


def zeros(k: Kernel, rows: int, vectors: int, lanes: int, dtype: DType = DType.FLOAT32) -> Grid:
    return [[k.zeros(dtype, lanes) for _ in range(vectors)] for _ in range(rows)]


def accumulate(
    k: Kernel,
    grid: Grid,
    rows: Sequence[Pointer],
    row_step: int | Val,
    panel: Pointer,
    panel_step: int | Val,
    depth: int | Val,
    mask: Val | None = None,
    element: DType = DType.FLOAT32,
    ahead: Prefetch | None = None,
    panel_vectors: int = 0,
) -> Grid:
    """grid[r][v] + the sum over `depth` of rows[r][i * row_step] * panel[i * panel_step + vector v].

    `mask` guards the last vector of a panel that is not padded. `element` is the type in the words of `rows` (see
    `lathe.core.codegen.dot`). `ahead` is prefetched meanwhile, see `prefetch_of`. Small tiles run several chains of
    sums, so that a product need not wait for the one before.

    `panel_vectors` is the width of the product's widest panel, if this panel may be the narrower last one. Both then
    add up in the same order, so that equal columns give equal results in every panel.
    """
    height, width, lanes = len(grid), len(grid[0]), grid[0][0].lanes
    chains = _chain_count(height * max(width, panel_vectors), depth)
    unroll = _unroll_count(height * width, chains)
    flat = [value for row in grid for value in row]
    init = flat + [k.zeros(flat[0].dtype, lanes) for _ in range((chains - 1) * len(flat))]

    def step(values: list[Val], chain: int, sources: Sequence[Pointer], line: Pointer, i: int) -> None:
        vectors = [line.load(i * panel_step + v * lanes, lanes, mask if v == width - 1 else None) for v in range(width)]
        for r, source in enumerate(sources):
            factor = source.load(i * row_step).splat(lanes)
            for v, vector in enumerate(vectors):
                at = (chain * height + r) * width + v
                values[at] = multiply_add(k, element, factor, vector, values[at])

    whole = depth // unroll * unroll
    with k.fold(0, whole, init, unroll) as fold:
        values = list(fold.values)
        sources, line = _advance(rows, fold.index * row_step), panel.at(fold.index * panel_step)
        if ahead is not None:
            ahead.fetch(fold.index, unroll)
        for i in range(unroll):
            step(values, i % chains, sources, line, i)
        fold.values = values
    values = list(fold.values)
    if isinstance(depth, int):
        for i in range(depth // unroll * unroll, depth):
            step(values, i % chains, rows, panel, i)
        return _as_grid(_add_chains(k, values, chains), width)
    with k.fold(whole, depth, values) as fold:
        values = list(fold.values)
        step(values, 0, _advance(rows, fold.index * row_step), panel.at(fold.index * panel_step), 0)
        fold.values = values
    values = list(fold.values)
    return _as_grid(_add_chains(k, values, chains), width)


def _chain_count(products: int, depth: int | Val) -> int:
    """The number of independent partial sums per accumulator, for a tile with `products` products per step.

    At least 1, and no more than the depth if that is known.
    """
    return max(1, min(_BUSY // products, depth if isinstance(depth, int) else _BUSY))


def _unroll_count(products: int, chains: int) -> int:
    """The number of steps of the depth in the loop body, a multiple of `chains`, for `products` products per step."""
    return max(chains, min(max(_BODY // products, 1), 8) // chains * chains)


def for_each_tile(k: Kernel, start: Val, stop: Val, rows: Dim, height: int, emit: Callable[[Val, int], None]) -> None:
    """Cover the rows `start` to `stop` of `rows` by tiles of `height` rows: `emit(row, rows in the tile)`.

    `start` is a multiple of `height`. Lower tiles cover the rows after the last full tile (`panels.tail_heights`).
    """
    full = start + (stop - start) // height * height
    with k.loop(start, full, height) as row:
        emit(row, height)
    rest, (heights, additive) = stop - full, tail_heights(rows, height)
    for size in heights:
        with k.when(k.ops.bit_and(rest, size).equals(size) if additive else rest.equals(size)):
            emit(full, size)
        if additive:
            full = full + k.ops.bit_and(rest, size)


def for_each_panel(
    k: Kernel,
    entries: Val,
    columns: int,
    rows: Dim,
    tile: Tile,
    emit: Callable[[Val, Val, int, Val, Val, Val | None], None],
    in_blocks: bool = False,
    prepare: Callable[[Val, Val, Val], None] | None = None,
    block_tiles: int = BLOCK_TILES,
) -> None:
    """Split products into tasks: `emit(entry, panel, columns, start, stop, first)` computes some rows of one panel.

    `entry` is the number of the product, below `entries`, and `panel` that of the panel; the `columns` passed to `emit`
    are the panel's width, and `start` to `stop` the rows. `first` is true in the first blocks of rows, one for each
    thread, where a thread usually reads its panels for the first time; None without `in_blocks`.

    A single thread takes all rows of a panel at once; several threads share them in blocks of whole tiles, several
    blocks per thread. With `in_blocks`, for weights that stay in the cache, a block of few rows goes through all panels
    before the next block; if there are too few blocks for the threads, they share the panels too. A task then begins
    with `prepare(entry, start, stop)`, if it is given. Such a block has `block_tiles` tiles of rows.
    """
    full, rest = divmod(columns, tile.columns)
    panels = full + bool(rest)
    count = k.dim(rows)

    def one(entry: Val, panel: Val, start: Val, stop: Val, first: Val | None) -> None:
        if full:
            with k.when(panel < full):
                emit(entry, panel, tile.columns, start, stop, first)
        if rest:
            with k.when(panel.equals(full)):
                emit(entry, k.index(full), rest, start, stop, first)

    if not in_blocks:
        block = _block_rows(k, count, entries * panels, tile.rows)
        with k.parallel(entries, panels, (count + block - 1) // block) as (entry, panel, part):
            one(entry, panel, part * block, k.ops.min((part + 1) * block, count), None)
        return
    block = k.index(block_tiles * tile.rows)
    blocks = (count + block - 1) // block
    groups = k.ops.min(
        (_least_tasks(k) + _at_least_one(entries * blocks) - 1) // _at_least_one(entries * blocks), panels
    )
    width = (groups + (panels - 1)) // groups
    with k.parallel(entries, blocks, groups) as (entry, part, group):
        stop = k.ops.min((part + 1) * block, count)
        if prepare is not None:
            prepare(entry, part * block, stop)
        with k.loop(group * width, k.ops.min((group + 1) * width, panels)) as panel:
            one(entry, panel, part * block, stop, part < k.threads)


def _least_tasks(k: Kernel) -> Val:
    """The number of tasks to aim for at least: 1 for a single thread, otherwise `_TASKS_PER_THREAD` per thread."""
    return k.ops.select(k.threads.equals(1), 1, k.threads * _TASKS_PER_THREAD)


def _at_least_one(count: Val) -> Val:
    """`count`, or 1 for an empty batch, to divide by."""
    return count.kernel.ops.max(count, 1)


def _block_rows(k: Kernel, rows: Val, panels: Val, height: int) -> Val:
    """Rows per task: whole tiles of `height` rows, and few enough that there are at least `_least_tasks` tasks.

    There may be fewer tasks if there are fewer tiles. `panels` is the number of panels of all products.
    """
    panels_or_one = _at_least_one(panels)
    wanted = k.ops.max((_least_tasks(k) + panels_or_one - 1) // panels_or_one, 1)
    tiles = (rows + (height - 1)) // height
    return k.ops.max((tiles + wanted - 1) // wanted, 1) * height


def prefetch_of(
    panel: Pointer, further: int | Val, columns: int, tile: Tile, number: Val, tiles: int, depth: int | Val,
    first: Val | None = None,
) -> Prefetch:  # fmt: skip
    """The prefetches of tile `number` of a panel: the tile's share of the panel `further` words after this one.

    The first `tiles` tiles of a panel share them evenly, so that memory, which is slower than the products, is busy all
    the time. If `first` is false, the panel is in the cache already: a tile then fetches only the lines that it reads.
    """
    k, products = panel.kernel, tile.rows * tile.vectors
    pace = max(-(-columns // tiles), LINE // _unroll_count(products, _chain_count(products, depth)))
    pace = min(pace, _MOST_AHEAD)
    wanted = number * pace < columns
    wanted = wanted if first is None else wanted & first
    offset = k.ops.select(wanted, k.index(further) + number * pace * depth, 0)
    return Prefetch(panel.at(offset), k.ops.select(wanted, k.index(pace), columns), pace)


def _advance(rows: Sequence[Pointer], by: Val) -> list[Pointer]:
    return [row.at(by) for row in rows]


def _add_chains(k: Kernel, values: list[Val], chains: int) -> list[Val]:
    """The sums of a tile: `values` holds the accumulators of each chain, one chain after the other, to be added up."""
    parts = [values[i * len(values) // chains : (i + 1) * len(values) // chains] for i in range(chains)]
    while len(parts) > 1:
        pairs = [[a + b for a, b in zip(*parts[i : i + 2], strict=True)] for i in range(0, len(parts) - 1, 2)]
        parts = pairs + ([parts[-1]] if len(parts) % 2 else [])
    return parts[0]


def _as_grid(values: list[Val], width: int) -> Grid:
    return [values[i : i + width] for i in range(0, len(values), width)]
