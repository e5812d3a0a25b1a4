"""Seams of a tape: places where all that the steps behind need of those before is one value of the arena.

There a batch can change hands: steps before the seam run some rows at a time, those behind it all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from core.ir.dim import affine
from core.ir.types import TensorType, ValueType
from core.plan.liveness import Affine, Buffer
from core.plan.plan import Seam


def find_seams(buffers: Sequence[Buffer], times: Sequence[int]) -> tuple[Seam, ...]:
    """The seams of an arena whose buffers have their offsets; `times` says when each step runs. The value that crosses
    one leads with the batch."""
    found = []
    for step, (before, after) in enumerate(pairwise(times), 1):
        crossing = [buffer for buffer in buffers if buffer.first <= before < buffer.last]
        if before == after or len(crossing) != 1:
            continue
        [buffer] = crossing
        rows = {row_bytes(value.type) for value in buffer.values}
        row = rows.pop() if len(rows) == 1 else None
        if row and buffer.offset is not None:
            found.append(Seam(step, buffer.offset, row, _extent([b for b in buffers if b.last > before])))
    return tuple(found)


def _extent(buffers: Sequence[Buffer]) -> Affine:
    """Bytes of the arena that hold these buffers for every batch size."""
    ends = [buffer.offset + buffer.size for buffer in buffers if buffer.offset is not None]
    return Affine(max(end.a for end in ends), max(end.b for end in ends))


def row_bytes(type_: ValueType) -> int | None:
    """Bytes of one row of the batch; 0 for a tensor that does not depend on it, None when there are no such rows."""
    if not isinstance(type_, TensorType) or type_.shape is None:
        return None
    known = [parts for dim in type_.shape if (parts := affine(dim, "n")) is not None]
    if len(known) < len(type_.shape):
        return None
    if all(slope == 0 for slope, _ in known):
        return 0
    if known[0] != (1, 0) or any(slope for slope, _ in known[1:]):
        return None
    return prod(size for _, size in known[1:]) * type_.dtype.itemsize
