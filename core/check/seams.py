"""Seams: where a batch changes hands. Steps before one run some rows at a time, those behind it more of them, on an
arena of their own, into which one value is copied row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.errors import PlanError
from core.ir.graph import Value
from core.plan.plan import ARENA, Seam

if TYPE_CHECKING:
    from core.check.run import Run


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
    for low, high, shift in list(memory.runs(place, place + nbytes)):
        home, byte = run.origin(low, shift)
        if not isinstance(home, Value) or not _keeps_rows(run, home, byte, low - place, high - low, seam.row):
            memory.wipe(low, high)
    return extent


def _keeps_rows(run: Run, home: Value, byte: int, at: int, length: int, row: int) -> bool:
    """Whether `length` bytes of a tensor from `byte` on, which lie `at` bytes into what is copied, belong to the same
    rows there."""
    box = run.same.box(home)
    if box is None or not box.shape or box.shape[0] != run.n:
        return False
    size = box.strides[0] if run.n > 1 else box.itemsize * _count(box.shape)
    if size == row:
        return byte == at
    last = length - 1
    return byte // size == at // row and (byte + last) // size == (at + last) // row and at // row == (at + last) // row


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
