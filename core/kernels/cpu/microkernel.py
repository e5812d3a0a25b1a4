"""The inner loop of matrix products and convolutions: a tile of accumulators in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from core.codegen.dot import multiply_add
from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.types import Dim, DType
from core.kernels.catalog.panels import BLOCK_TILES, LINE, Tile, tails

Grid: TypeAlias = list[list[Val]]  # [rows][vectors]

_BUSY = 8  # products that must be independent to keep two pipelines of latency 4 busy
_TASKS_PER_THREAD = 4
_MOST_AHEAD = 2 * LINE  # words that are fetched per step down a panel
_BODY = 112  # products in the loop body: enough to hide the loop, few enough for the instruction cache


@dataclass(frozen=True)
class Ahead:
    """What a tile asks the second-level cache for while it walks down its panel: `pace` words per step, from `place`
    on, which moves by `step` words. A tile that has nothing to fetch asks for the lines that it reads itself."""

    place: Pointer
    step: Val
    pace: int

    def after(self, steps: Val) -> Ahead:
        """The same, so many steps further down."""
        return Ahead(self.place.at(steps * self.step), self.step, self.pace)

    def fetch(self, step: Val, count: int) -> None:
        """What belongs to `count` steps."""
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
    ahead: Ahead | None = None,
    panel_vectors: int = 0,
) -> Grid:
    """grid[r][v] + the sum over `depth` of rows[r][i * row_step] * panel[i * panel_step + vector v].

    `mask` guards the last vector of a panel that is not padded. `element` is what the words behind `rows` hold (see
    `core.codegen.dot`). `ahead`: what to fetch meanwhile, see `ahead_of`. Small tiles run several chains of sums, so
    that one product need not wait for the one before.

    `panel_vectors`: how wide the widest panel of the product is, where this may be its last, narrower one. Both add up
    in the same order then, so that equal columns give equal results wherever they stand.
    """
    height, width, lanes = len(grid), len(grid[0]), grid[0][0].lanes
    chains = _chains(height * max(width, panel_vectors), depth)
    unroll = _unrolled(height * width, chains)
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
        sources, line = _advanced(rows, fold.index * row_step), panel.at(fold.index * panel_step)
        if ahead is not None:
            ahead.fetch(fold.index, unroll)
        for i in range(unroll):
            step(values, i % chains, sources, line, i)
        fold.values = values
    values = list(fold.values)
    if isinstance(depth, int):
        for i in range(depth // unroll * unroll, depth):
            step(values, i % chains, rows, panel, i)
        return _regrid(_joined(k, values, chains), width)
    with k.fold(whole, depth, values) as fold:
        values = list(fold.values)
        step(values, 0, _advanced(rows, fold.index * row_step), panel.at(fold.index * panel_step), 0)
        fold.values = values
    values = list(fold.values)
    return _regrid(_joined(k, values, chains), width)


def _chains(products: int, depth: int | Val) -> int:
    """Independent sums per accumulator."""
    return max(1, min(_BUSY // products, depth if isinstance(depth, int) else _BUSY))


def _unrolled(products: int, chains: int) -> int:
    """Steps in the loop's body."""
    return max(chains, min(max(_BODY // products, 1), 8) // chains * chains)


def each_tile(k: Kernel, start: Val, stop: Val, rows: Dim, height: int, emit: Callable[[Val, int], None]) -> None:
    """Cover the rows `start` to `stop` of `rows` by tiles: `emit(row, height)`. `start` is a multiple of `height`.

    Below the last full tile comes one of the height that fits, or powers of two in turn where many heights can occur.
    """
    full = start + (stop - start) // height * height
    with k.loop(start, full, height) as row:
        emit(row, height)
    rest, (heights, additive) = stop - full, tails(rows, height)
    for size in heights:
        with k.when(k.ops.bit_and(rest, size).equals(size) if additive else rest.equals(size)):
            emit(full, size)
        if additive:
            full = full + k.ops.bit_and(rest, size)


def each_panel(
    k: Kernel,
    entries: Val,
    columns: int,
    rows: Dim,
    tile: Tile,
    emit: Callable[[Val, Val, int, Val, Val, Val | None], None],
    in_blocks: bool = False,
) -> None:
    """Share a product out in tasks: `emit(entry, panel, columns, start, stop, first)` does some rows of one panel.

    A thread alone takes all rows of a panel at once; a team shares them in blocks of whole tiles, several per thread.
    `in_blocks`, for weights that stay in the cache: few rows go through all panels, then the next ones; a team that has
    too few blocks shares the panels, too. `first` says where a thread meets its panels for the first time.
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
    block = k.index(BLOCK_TILES * tile.rows)
    blocks = (count + block - 1) // block
    groups = k.ops.min((_tasks(k) + _at_least_one(entries * blocks) - 1) // _at_least_one(entries * blocks), panels)
    width = (groups + (panels - 1)) // groups
    with k.parallel(entries, blocks, groups) as (entry, part, group):
        stop = k.ops.min((part + 1) * block, count)
        with k.loop(group * width, k.ops.min((group + 1) * width, panels)) as panel:
            one(entry, panel, part * block, stop, part < k.threads)


def _tasks(k: Kernel) -> Val:
    """How many tasks a product should have at least."""
    return k.ops.select(k.threads.equals(1), 1, k.threads * _TASKS_PER_THREAD)


def _at_least_one(count: Val) -> Val:
    """An empty batch has none."""
    return count.kernel.ops.max(count, 1)


def _block_rows(k: Kernel, rows: Val, panels: Val, height: int) -> Val:
    some = _at_least_one(panels)
    wanted = k.ops.max((_tasks(k) + some - 1) // some, 1)
    tiles = (rows + (height - 1)) // height
    return k.ops.max((tiles + wanted - 1) // wanted, 1) * height


def ahead_of(
    panel: Pointer, further: int | Val, columns: int, tile: Tile, number: Val, tiles: int, depth: int | Val,
    first: Val | None = None,
) -> Ahead:  # fmt: skip
    """What tile `number` of a panel fetches of the one that lies `further` words behind it.

    The first `tiles` of a panel share that evenly: memory is slower than the products, and as busy all the time.
    `first` says whether a panel is new to this thread: what is in the cache is not asked for again.
    """
    k, products = panel.kernel, tile.rows * tile.vectors
    pace = max(-(-columns // tiles), LINE // _unrolled(products, _chains(products, depth)))
    pace = min(pace, _MOST_AHEAD)
    wanted = number * pace < columns
    wanted = wanted if first is None else wanted & first
    offset = k.ops.select(wanted, k.index(further) + number * pace * depth, 0)
    return Ahead(panel.at(offset), k.ops.select(wanted, k.index(pace), columns), pace)


def _advanced(rows: Sequence[Pointer], by: Val) -> list[Pointer]:
    return [row.at(by) for row in rows]


def _joined(k: Kernel, values: list[Val], chains: int) -> list[Val]:
    """The sums of all chains, by halves."""
    parts = [values[i * len(values) // chains : (i + 1) * len(values) // chains] for i in range(chains)]
    while len(parts) > 1:
        pairs = [[a + b for a, b in zip(*parts[i : i + 2], strict=True)] for i in range(0, len(parts) - 1, 2)]
        parts = pairs + ([parts[-1]] if len(parts) % 2 else [])
    return parts[0]


def _regrid(values: list[Val], width: int) -> Grid:
    return [values[i : i + width] for i in range(0, len(values), width)]
