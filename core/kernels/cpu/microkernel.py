"""The inner loop of matrix products and convolutions: a tile of accumulators in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from core.codegen.lang import Index, Kernel, Val
from core.codegen.registers import Pointer
from core.ir.graph import Graph
from core.ir.types import DType
from core.ops.fused import scalar_body

Grid: TypeAlias = list[list[Val]]  # [rows][vectors]

_BUSY = 8  # products that must be independent to keep two pipelines of latency 4 busy
_BODY = 112  # products in the loop body: enough to hide the loop, few enough for the instruction cache


def zeros(k: Kernel, rows: int, vectors: int, lanes: int) -> Grid:
    return [[k.zeros(DType.FLOAT32, lanes) for _ in range(vectors)] for _ in range(rows)]


def accumulate(
    k: Kernel,
    grid: Grid,
    rows: Sequence[Pointer],
    row_step: int,
    panel: Pointer,
    panel_step: int,
    depth: int,
    mask: Val | None = None,
) -> Grid:
    """grid[r][v] + the sum over `depth` of rows[r][i * row_step] * panel[i * panel_step + vector v].

    `mask` guards the last vector of a panel that is not padded. Small tiles run several chains of sums, so that one
    product need not wait for the one before.
    """
    height, width, lanes = len(grid), len(grid[0]), grid[0][0].lanes
    chains = max(1, min(_BUSY // (height * width), depth))
    unroll = max(chains, min(max(_BODY // (height * width), 1), 8) // chains * chains)
    flat = [value for row in grid for value in row]
    init = flat + [k.zeros(DType.FLOAT32, lanes) for _ in range((chains - 1) * len(flat))]

    def step(values: list[Val], chain: int, sources: Sequence[Pointer], line: Pointer, i: int) -> None:
        vectors = [line.load(i * panel_step + v * lanes, lanes, mask if v == width - 1 else None) for v in range(width)]
        for r, source in enumerate(sources):
            factor = source.load(i * row_step).splat(lanes)
            for v, vector in enumerate(vectors):
                at = (chain * height + r) * width + v
                values[at] = k.ops.fma(factor, vector, values[at])

    whole = depth // unroll * unroll
    with k.fold(0, whole, init, unroll) as fold:
        values = list(fold.values)
        sources, line = _advanced(rows, fold.index * row_step), panel.at(fold.index * panel_step)
        for i in range(unroll):
            step(values, i % chains, sources, line, i)
        fold.values = values
    values = list(fold.values)
    for i in range(whole, depth):
        step(values, i % chains, rows, panel, i)
    return _regrid(_joined(k, values, chains), width)


def each_tail(
    k: Kernel, start: Index, stop: Val, heights: Sequence[int], powers: bool, emit: Callable[[Val, int], None]
) -> None:
    """Cover the rows left below the last full tile: one tile of the height that fits, or powers of two in turn."""
    at = k.index(start)
    rest = stop - at
    for height in heights:
        needed = k.ops.bit_and(rest, height).equals(height) if powers else rest.equals(height)
        with k.when(needed):
            emit(at, height)
        if powers:
            at = at + k.ops.bit_and(rest, height)


def apply_epilogue(k: Kernel, body: Graph | None, value: Val, extras: Sequence[Val]) -> Val:
    """The value to store for one vector of accumulators."""
    return value if body is None else k.ops.splat(scalar_body(k.ops, body, [value, *extras])[0], value.lanes)


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
