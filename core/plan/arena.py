"""Offsets in the arena: greedy by size (Pisarchyk & Lee 2020, "Efficient Memory Management for Deep Neural Net Inference").

Constant-size buffers come first, those proportional to the batch size behind them, so that every offset is `a*n + b`
and one plan serves every batch size.
"""

from __future__ import annotations

from collections.abc import Callable

from core.plan.liveness import Affine, Buffer


def place(buffers: list[Buffer]) -> Affine:
    """Give every buffer an offset such that buffers alive together do not overlap. Returns the arena's size."""
    constant = [buffer for buffer in buffers if not buffer.size.a]
    rows = [buffer for buffer in buffers if buffer.size.a]
    base = _place_by(constant, lambda size: size.b, lambda at: Affine(b=at))
    extent = _place_by(rows, lambda size: size.a, lambda at: Affine(at, base))
    return Affine(extent, base)


def _place_by(buffers: list[Buffer], extent: Callable[[Affine], int], offset: Callable[[int], Affine]) -> int:
    """Place the largest first, each at the lowest gap that fits among the placed buffers it lives together with."""
    placed: list[tuple[int, Buffer]] = []
    for buffer in sorted(buffers, key=lambda b: (-extent(b.size), b.first)):
        size = extent(buffer.size)
        neighbours = sorted(((at, b) for at, b in placed if b.overlaps(buffer)), key=lambda pair: pair[0])
        at = _lowest_gap([(start, start + extent(b.size)) for start, b in neighbours], size)
        buffer.offset = offset(at)
        placed.append((at, buffer))
    return max((at + extent(b.size) for at, b in placed), default=0)


def _lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    """The smallest start of `size` free bytes, given taken intervals sorted by start."""
    at = 0
    for start, end in taken:
        if at + size <= start:
            break
        at = max(at, end)
    return at
