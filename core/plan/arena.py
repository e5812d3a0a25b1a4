"""The arena allocator: gives buffers offsets.

Greedy by size (Pisarchyk & Lee 2020, "Efficient Memory Management for Deep Neural Net Inference"). While the result
is more than 1 % above the lower bound, the allocator tries again, at most 24 times. Each time it moves the buffer that
reached the highest address, of those proportional to the batch size, to the front of the order. The best try counts.

Buffers proportional to the batch size come first. Buffers of constant size go into the gaps between them, or after
them. Gaps grow with `n`, so a buffer that fits into a gap for n = 1 fits for every n. Every offset is `a*n + b`, or in
dynamic-shape code a constant plus multiples of units.
"""

from __future__ import annotations

from collections.abc import Sequence

from lathe.core.ir.types import Dim
from lathe.core.plan.liveness import Affine, Buffer, lower_bound

_GOOD_ENOUGH = 1.01  # times the lower bound: no further trial
_MAX_TRIALS = 24
_MAX_PAIRS = 1 << 20  # pairs of buffers that all trials together may visit, not counting the first placement


def place(buffers: list[Buffer]) -> Affine:
    """Set the offset of each buffer, so that buffers with overlapping lifetimes are disjoint; return the arena's size.

    They are disjoint for every n >= 1, and for all values of the sizes in dynamic-shape code. Each size must be
    constant, proportional to n, or a multiple of one unit (`align_size`). The buffers of one unit share memory like
    buffers proportional to n; each unit has a part of the arena of its own, and so have the constant buffers.
    """
    extent = _place_together([buffer for buffer in buffers if not buffer.size.units])
    for unit in dict.fromkeys(unit for buffer in buffers for unit, _ in buffer.size.units):
        extent = _place_unit([buffer for buffer in buffers if unit in dict(buffer.size.units)], unit, extent)
    return extent


def _place_unit(buffers: list[Buffer], unit: Dim, start: Affine) -> Affine:
    """Place buffers whose size is a multiple of `unit`, from the offset `start` on; return the offset of their end."""
    rows = [Buffer(Affine(a=buffer.size.units[0][1]), buffer.first, buffer.last) for buffer in buffers]
    extent = _place_together(rows)
    for buffer, row in zip(buffers, rows, strict=True):
        buffer.offset = start + Affine(units=((unit, row.offset.a),)) if row.offset is not None else None
    return start + Affine(units=((unit, extent.a),))


def _place_together(buffers: list[Buffer]) -> Affine:
    """Place buffers whose sizes are `a*n` or `b`, and return the size of the memory that they need together.

    Until the size is within 1 % of the lower bound for n = 1, up to 24 more orders of placement are tried; the order
    with the smallest size for n = 1 is used.
    """
    rows = [buffer for buffer in buffers if buffer.size.a]
    constant = [buffer for buffer in buffers if not buffer.size.a]
    order = _by_size(rows, constant)
    size = _place(order, constant)
    enough = lower_bound(buffers, 1) * _GOOD_ENOUGH
    best, found = size, [buffer.offset for buffer in buffers]
    for _ in range(min(_MAX_TRIALS, _MAX_PAIRS // max(len(buffers) ** 2, 1))):
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
    """Place the buffers `rows` (proportional to n) in this order, then the `constant` ones; return the end of all."""
    extent = _place_rows(rows)
    return Affine(extent, _place_constant(constant, rows, extent))


def _by_size(rows: Sequence[Buffer], constant: Sequence[Buffer]) -> list[Buffer]:
    """`rows` by descending size.

    The largest constant-size buffer with an overlapping lifetime is added to a buffer's size, because the two cannot
    share memory.
    """

    def largest_neighbour(buffer: Buffer) -> int:
        return max((other.size.b for other in constant if other.overlaps(buffer)), default=0)

    return sorted(rows, key=lambda b: (-b.size.a - largest_neighbour(b), b.first))


def _place_rows(buffers: Sequence[Buffer]) -> int:
    """Place each buffer in the lowest gap between placed buffers with overlapping lifetimes; return the end of all.

    All buffers are proportional to n: the result is the factor of n.
    """
    placed: list[Buffer] = []
    for buffer in buffers:
        taken = sorted(_span(other) for other in placed if other.overlaps(buffer))
        buffer.offset = Affine(a=_lowest_gap(taken, buffer.size.a))
        placed.append(buffer)
    return max((_span(buffer)[1] for buffer in placed), default=0)


def _place_constant(buffers: Sequence[Buffer], rows: Sequence[Buffer], extent: int) -> int:
    """Place constant-size buffers, the largest first; return how far they reach beyond the extent of `rows`.

    Each buffer is anchored at the last end of a row buffer before it (0 if there is none): its offset is that end
    (proportional to n) plus a constant. Higher buffers have higher anchors, so the order for n = 1 holds for every n.
    No anchor lies beyond the extent, so a buffer reaches no further beyond the extent for a larger n than for n = 1.
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
    """The start and end of a placed buffer for n = 1."""
    start = buffer.offset.at(1) if buffer.offset is not None else 0
    return start, start + buffer.size.at(1)


def _lowest_gap(taken: list[tuple[int, int]], size: int, at: int = 0) -> int:
    """The lowest start >= `at` of `size` free bytes, given the taken intervals sorted by start."""
    for start, end in taken:
        if at + size <= start:
            break
        at = max(at, end)
    return at
