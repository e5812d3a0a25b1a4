"""Seams: where a batch changes hands. Steps before one run some rows at a time, those behind it more of them, on an
arena of their own, into which one value is copied row by row."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from core.errors import PlanError
from core.ir.graph import Value
from core.plan.plan import ARENA, Seam

if TYPE_CHECKING:
    from core.check.run import Run

Offsets: TypeAlias = NDArray[np.int64]


def cross(run: Run, seam: Seam) -> int:
    """Leave in the arena what crosses the seam, and nothing else. Returns how many bytes the steps behind have.

    The copy takes row `i` of a piece to where row `i` of the whole lies. So what crosses must be rows of values whose
    rows have the size that the seam says; what is not is left behind, too.
    """
    n = max(run.n, 1)
    place, nbytes, extent = seam.place.at(n), seam.row * run.n, seam.arena.at(n)
    if seam.row <= 0 or place < 0 or place + nbytes > min(extent, run.plan.arena.at(n)):
        raise PlanError(f"the seam before step {seam.step} has {seam}, which is not inside the arena, for n = {run.n}")
    memory = run.memory[ARENA]
    memory.keep_only(place, place + nbytes)
    by_shift: dict[int, list[tuple[int, int]]] = {}
    for low, high, shift in memory.runs(place, place + nbytes):
        by_shift.setdefault(shift, []).append((low, high))
    for shift, runs in by_shift.items():
        home, byte = run.origin(runs[0][0], shift)
        low, high = np.array(runs).T
        stays = _keeps_rows(run, home, byte + low - low[0], low - place, high - low, seam.row)
        for first, end in zip(low[~stays].tolist(), high[~stays].tolist(), strict=True):
            memory.wipe(first, end)
    return extent


def _keeps_rows(
    run: Run, home: Value | str, byte: Offsets, at: Offsets, length: Offsets, row: int
) -> NDArray[np.bool_]:
    """Which ranges of a tensor belong to the same rows where they are copied to. They have `length` bytes, from `byte`
    of the tensor on, and lie `at` bytes into what is copied."""
    box = run.same.box(home) if isinstance(home, Value) else None
    if box is None or not box.shape or box.shape[0] != run.n:
        return np.zeros(len(at), np.bool_)
    size = prod(box.shape[1:]) * box.itemsize
    if size == row:
        return byte == at
    last = length - 1
    ours, theirs = (byte // size, (byte + last) // size), (at // row, (at + last) // row)
    return (ours[0] == theirs[0]) & (ours[1] == theirs[1]) & (theirs[0] == theirs[1])
