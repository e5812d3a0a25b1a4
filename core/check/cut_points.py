"""Checks cut points, where the chunks of a batch change their size.

The steps before a cut point run few rows at a time. The steps after it run more rows, on another arena, into which one
value is copied row by row.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import PlanError
from lathe.core.ir.graph import Value
from lathe.core.plan.plan import ARENA, CutPoint

if TYPE_CHECKING:
    from lathe.core.check.symbolic_run import SymbolicRun

Offsets: TypeAlias = NDArray[np.int64]


def cross_cut_point(run: SymbolicRun, cut: CutPoint) -> int:
    """Remove from the arena of `run` everything that does not cross the cut point; return the size of the next arena.

    The copy moves row `i` of a chunk to row `i` of the value in the next arena. So only values whose rows have the size
    that the cut point states cross it; all others are removed. PlanError if the copied bytes are outside an arena.
    """
    n = max(run.n, 1)
    place, nbytes, extent = cut.place.at(n), cut.row * run.n, cut.arena.at(n)
    if cut.row <= 0 or place < 0 or place + nbytes > min(extent, run.plan.arena.at(n)):
        raise PlanError(f"the cut point before step {cut.step}, {cut}, is outside the arena for n = {run.n}")
    memory = run.memory[ARENA]
    memory.keep_only(place, place + nbytes)
    by_shift: dict[int, list[tuple[int, int]]] = {}
    for low, high, shift in memory.runs(place, place + nbytes):
        by_shift.setdefault(shift, []).append((low, high))
    for shift, runs in by_shift.items():
        home, byte = run.origin(runs[0][0], shift)
        low, high = np.array(runs).T
        crosses = _keeps_rows(run, home, byte + low - low[0], low - place, high - low, cut.row)
        for first, end in zip(low[~crosses].tolist(), high[~crosses].tolist(), strict=True):
            memory.wipe(first, end)
    return extent


def _keeps_rows(
    run: SymbolicRun, home: Value | str, byte: Offsets, at: Offsets, length: Offsets, row: int
) -> NDArray[np.bool_]:
    """For each byte range of the tensor `home`, whether the copy at the cut point puts it into the row of equal index.

    Range i has `length[i]` bytes; it starts at byte `byte[i]` of the tensor and `at[i]` bytes after the start of the
    copied bytes. `row` is the size of a copied row. All False for scratch memory and for a tensor without n rows.
    """
    box = run.aliases.box(home) if isinstance(home, Value) else None
    if box is None or not box.shape or box.shape[0] != run.n:
        return np.zeros(len(at), np.bool_)
    size = prod(box.shape[1:]) * box.itemsize
    if size == row:
        return byte == at
    last = length - 1
    ours, theirs = (byte // size, (byte + last) // size), (at // row, (at + last) // row)
    return (ours[0] == theirs[0]) & (ours[1] == theirs[1]) & (theirs[0] == theirs[1])
