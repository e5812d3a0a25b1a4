"""Offsets in the arena: greedy by size (Pisarchyk & Lee 2020, "Efficient Memory Management for Deep Neural Net
Inference"), and again with what reached highest placed first, where that leaves more room unused than it should.

Buffers proportional to the batch size come first; constant-size ones go into gaps that they leave, or behind them. A
gap between two such buffers grows with `n`, so what fits in it for n = 1 fits for every n: every offset is `a*n + b`.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.ir.types import Dim
from core.plan.liveness import Affine, Buffer, lower_bound

_NEAR = 1.01  # of the lower bound: good enough
_TRIES = 24
_MOST_WORK = 1 << 20  # pairs of buffers that all tries together may look at, the first one apart


def place(buffers: list[Buffer]) -> Affine:
    """Give every buffer an offset such that buffers alive together do not overlap for any n >= 1, or any sizes.
    Returns the size of the arena.

    Buffers over sizes are multiples of a unit. Those of one unit share memory with each other: what holds for n rows
    holds for a unit. Each unit has a part of the arena of its own, behind that of the others.
    """
    extent = _place_together([buffer for buffer in buffers if not buffer.size.units])
    for unit in dict.fromkeys(unit for buffer in buffers for unit, _ in buffer.size.units):
        extent = _place_unit([buffer for buffer in buffers if unit in dict(buffer.size.units)], unit, extent)
    return extent


def _place_unit(buffers: list[Buffer], unit: Dim, start: Affine) -> Affine:
    """Place buffers that are multiples of a unit, from `start` on; returns where they end."""
    rows = [Buffer(Affine(a=buffer.size.units[0][1]), buffer.first, buffer.last) for buffer in buffers]
    extent = _place_together(rows)
    for buffer, row in zip(buffers, rows, strict=True):
        buffer.offset = start + Affine(units=((unit, row.offset.a),)) if row.offset is not None else None
    return start + Affine(units=((unit, extent.a),))


def _place_together(buffers: list[Buffer]) -> Affine:
    """Place buffers whose sizes are `a*n + b`; returns the extent."""
    rows = [buffer for buffer in buffers if buffer.size.a]
    constant = [buffer for buffer in buffers if not buffer.size.a]
    order = _by_size(rows, constant)
    size = _place(order, constant)
    enough = lower_bound(buffers, 1) * _NEAR
    best, found = size, [buffer.offset for buffer in buffers]
    for _ in range(min(_TRIES, _MOST_WORK // max(len(buffers) ** 2, 1))):
        if best.at(1) <= enough or not order:
            break
        highest = max(order, key=lambda buffer: _span(buffer)[1])
        if highest is order[0]:
            break
        order.remove(highest)
        order.insert(0, highest)
        size = _place(order, constant)
        if size.at(1) < best.at(1) and size.a <= best.a:
            best, found = size, [buffer.offset for buffer in buffers]
    for buffer, offset in zip(buffers, found, strict=True):
        buffer.offset = offset
    return best


def _place(rows: Sequence[Buffer], constant: Sequence[Buffer]) -> Affine:
    """Rows in this order, then what does not grow with the batch."""
    extent = _place_rows(rows)
    return Affine(extent, _place_constant(constant, rows, extent))


def _by_size(rows: Sequence[Buffer], constant: Sequence[Buffer]) -> list[Buffer]:
    """The largest first. A buffer counts with the largest constant one that lives beside it: those two have to find
    room above each other."""

    def beside(buffer: Buffer) -> int:
        return max((other.size.b for other in constant if other.overlaps(buffer)), default=0)

    return sorted(rows, key=lambda b: (-b.size.a - beside(b), b.first))


def _place_rows(buffers: Sequence[Buffer]) -> int:
    """Place each at the lowest gap that fits among the placed buffers it lives together with."""
    placed: list[Buffer] = []
    for buffer in buffers:
        taken = sorted(_span(other) for other in placed if other.overlaps(buffer))
        buffer.offset = Affine(a=_lowest_gap(taken, buffer.size.a))
        placed.append(buffer)
    return max((_span(buffer)[1] for buffer in placed), default=0)


def _place_constant(buffers: Sequence[Buffer], rows: Sequence[Buffer], extent: int) -> int:
    """Place constant-size buffers, the largest first; returns how far they reach beyond the rows' extent.

    Each is anchored at the last end of any row buffer before it. Later buffers have later anchors, so that what is in
    order for n = 1 stays in order; and as no anchor lies beyond the extent, what reaches beyond it for n = 1 reaches no
    further for larger n.
    """
    starts = {0, extent, *(_span(row)[1] for row in rows)}
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: (-b.size.b, b.first)):
        taken = sorted(_span(other) for other in [*rows, *placed] if other.overlaps(buffer))
        at = _lowest_gap(taken, buffer.size.b)
        base = max(start for start in starts if start <= at)
        buffer.offset = Affine(base, at - base)
        placed.append(buffer)
    return max([extent, *(_span(buffer)[1] for buffer in placed)]) - extent


def _span(buffer: Buffer) -> tuple[int, int]:
    """Where a placed buffer lies for n = 1."""
    start = buffer.offset.at(1) if buffer.offset is not None else 0
    return start, start + buffer.size.at(1)


def _lowest_gap(taken: list[tuple[int, int]], size: int, at: int = 0) -> int:
    """The smallest start, from `at` on, of `size` free bytes, given taken intervals sorted by start."""
    for start, end in taken:
        if at + size <= start:
            break
        at = max(at, end)
    return at
