"""The inner loop of matrix products and convolutions: a tile of accumulators in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from core.codegen.dot import multiply_add
from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.types import Dim, DType
from core.kernels.catalog.panels import LINE, Tile, tails

Grid: TypeAlias = list[list[Val]]  # [rows][vectors]

_BUSY = 8  # products that must be independent to keep two pipelines of latency 4 busy
_TASKS_PER_THREAD = 4
AHEAD = 2 * LINE  # words that are fetched per step down a panel: free beside its products
_TILES_AHEAD = 2  # tiles of a panel that do so: together they fetch four vectors per step
_BODY = 112  # products in the loop body: enough to hide the loop, few enough for the instruction cache


def zeros(k: Kernel, rows: int, vectors: int, lanes: int, dtype: DType = DType.FLOAT32) -> Grid:
    return [[k.zeros(dtype, lanes) for _ in range(vectors)] for _ in range(rows)]


def accumulate(
    k: Kernel,
    grid: Grid,
    rows: Sequence[Pointer],
    row_step: int,
    panel: Pointer,
    panel_step: int,
    depth: int | Val,
    mask: Val | None = None,
    element: DType = DType.FLOAT32,
    ahead: Pointer | None = None,
) -> Grid:
    """grid[r][v] + the sum over `depth` of rows[r][i * row_step] * panel[i * panel_step + vector v].

    `mask` guards the last vector of a panel that is not padded. `element` is what the words behind `rows` hold (see
    `core.codegen.dot`). `ahead`: what to fetch meanwhile, see `ahead_of`. Small tiles run several chains of sums, so
    that one product need not wait for the one before.
    """
    height, width, lanes = len(grid), len(grid[0]), grid[0][0].lanes
    chains = max(1, min(_BUSY // (height * width), depth if isinstance(depth, int) else _BUSY))
    unroll = max(chains, min(max(_BODY // (height * width), 1), 8) // chains * chains)
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
            _prefetch(ahead.at(fold.index * AHEAD), unroll * AHEAD)
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
    k: Kernel, entries: Val, columns: int, rows: Dim, tile: Tile, emit: Callable[[Val, Val, int, Val, Val], None]
) -> None:
    """Share a product out in tasks: `emit(entry, panel, columns, start, stop)` does some rows of one panel.

    A thread alone takes all rows of a panel at once; a team shares them in blocks of whole tiles, several per thread.
    """
    full, rest = divmod(columns, tile.columns)
    panels = full + bool(rest)
    count = k.dim(rows)
    block = _block_rows(k, count, entries * panels, tile.rows)
    with k.parallel(entries, panels, (count + block - 1) // block) as (entry, panel, part):
        start = part * block
        stop = k.ops.min(start + block, count)
        if full:
            with k.when(panel < full):
                emit(entry, panel, tile.columns, start, stop)
        if rest:
            with k.when(panel.equals(full)):
                emit(entry, k.index(full), rest, start, stop)


def _block_rows(k: Kernel, rows: Val, panels: Val, height: int) -> Val:
    some = k.ops.max(panels, 1)  # an empty batch has none
    wanted = k.ops.max((k.threads * _TASKS_PER_THREAD + some - 1) // some, 1)
    wanted = k.ops.select(k.threads.equals(1), 1, wanted)
    tiles = (rows + (height - 1)) // height
    return k.ops.max((tiles + wanted - 1) // wanted, 1) * height


def ahead_of(next_panel: Pointer, tile: Val, depth: int | Val) -> Pointer:
    """What a tile has to prefetch so that the first ones of a panel together fetch the beginning of the next one."""
    k = next_panel.kernel
    return next_panel.at(k.ops.min(tile, _TILES_AHEAD - 1) * (depth * AHEAD))


def _prefetch(place: Pointer, words: int) -> None:
    for line in range(0, words, LINE):
        place.prefetch(line)


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
