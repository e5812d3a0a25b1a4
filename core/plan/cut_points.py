"""Cut points of a tape: places between steps where the later steps need only one value that the earlier steps wrote.

There the size of the chunks of a batch can change: the steps before run few rows at a time, those after it more rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from lathe.core.ir.dim import affine
from lathe.core.ir.types import TensorType, ValueType
from lathe.core.plan.liveness import Affine, Buffer
from lathe.core.plan.plan import CutPoint


def find_cut_points(buffers: Sequence[Buffer], times: Sequence[int]) -> tuple[CutPoint, ...]:
    """The cut points of a tape: places between stages that exactly one buffer crosses.

    All values of this buffer are tensors [n, ...] with equal bytes per row; it is not scratch memory. `buffers` have
    their offsets already; `times` has the time (stage) of each step.
    """
    found = []
    for step, (before, after) in enumerate(pairwise(times), 1):
        crossing = [buffer for buffer in buffers if buffer.first <= before < buffer.last]
        if before == after or len(crossing) != 1:
            continue
        [buffer] = crossing
        rows = {row_bytes(value.type) for value in buffer.values}
        row = rows.pop() if len(rows) == 1 else None
        if row and buffer.offset is not None:
            found.append(CutPoint(step, buffer.offset, row, _extent([b for b in buffers if b.last > before])))
    return tuple(found)


def _extent(buffers: Sequence[Buffer]) -> Affine:
    """The size of an arena that holds these buffers for every batch size."""
    ends = [buffer.offset + buffer.size for buffer in buffers if buffer.offset is not None]
    return Affine(max(end.a for end in ends), max(end.b for end in ends))


def row_bytes(type_: ValueType) -> int | None:
    """Bytes of one row of a tensor [n, ...]; 0 for a tensor whose shape is known numbers, None for any other type."""
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
