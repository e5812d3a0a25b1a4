"""Symbolic memory: which bytes of which tensor lie where."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.check.boxes import Spans

_FEW = 16  # ranges that are put in one by one: each moves what lies behind it


class Ranges(NamedTuple):
    """Byte ranges in ascending order, without overlap, and a number for each."""

    low: NDArray[np.int64]
    high: NDArray[np.int64]
    kind: NDArray[np.int64]


class Memory:
    """The bytes from address 0 to `size` (None: nobody may write here) behind one base.

    A *shift* stands for a tensor at an address: byte `i` of the tensor's own numbering lies at `i + shift`. Neighbours
    of one shift are one run.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._low: list[int] = []
        self._high: list[int] = []
        self._shift: list[int] = []

    def write(self, spans: Spans, shift: int) -> None:
        """From now on these bytes hold what the shift says."""
        if len(spans.starts) <= _FEW:
            for start in spans.starts:
                self._put(start, start + spans.length, shift)
        elif spans.starts:
            self._put_all(spans, shift)

    def wipe(self, low: int, high: int) -> None:
        """From now on the bytes from `low` to `high` hold nothing."""
        if low < high:
            i, j, kept = self._opened(low, high)
            self._replace(i, j, kept)

    def keep_only(self, low: int, high: int) -> None:
        """From now on all other bytes hold nothing."""
        if self._high:
            self.wipe(min(self._low[0], low), low)
        if self._high:
            self.wipe(high, max(self._high[-1], high))

    def lacks(self, spans: Spans, shift: int) -> tuple[int, int] | None:
        """The first of these ranges that does not hold what the shift says as a whole; None where all do."""
        starts: Iterable[int] = spans.starts
        if len(spans.starts) > _FEW:
            starts = self._outside(spans)  # what lies in no one run at all; of the others, one for each run is enough
        for start in starts:
            i = bisect_right(self._low, start) - 1
            if i < 0 or self._shift[i] != shift or self._high[i] < start + spans.length:
                return start, start + spans.length
        return None

    def runs(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """What lies from `low` to `high`: first byte, end and shift of every run."""
        for i in range(bisect_right(self._high, low), bisect_left(self._low, high)):
            yield max(self._low[i], low), min(self._high[i], high), self._shift[i]

    def _opened(self, low: int, high: int) -> tuple[int, int, list[tuple[int, int, int]]]:
        """Which runs lie from `low` to `high`, as a range of indices, and what of them lies outside."""
        i, j = bisect_right(self._high, low), bisect_left(self._low, high)
        kept = []
        if i < j and self._low[i] < low:
            kept.append((self._low[i], low, self._shift[i]))
        if i < j and self._high[j - 1] > high:
            kept.append((high, self._high[j - 1], self._shift[j - 1]))
        return i, j, kept

    def _put(self, low: int, high: int, shift: int) -> None:
        i, j, kept = self._opened(low, high)
        if i and self._high[i - 1] == low and not (kept and kept[0][0] < low):
            i -= 1
            kept.insert(0, (self._low[i], self._high[i], self._shift[i]))
        if j < len(self._low) and self._low[j] == high and not (kept and kept[-1][0] >= high):
            kept.append((self._low[j], self._high[j], self._shift[j]))
            j += 1
        self._replace(i, j, _joined(sorted([*kept, (low, high, shift)])))

    def _put_all(self, spans: Spans, shift: int) -> None:
        low, high = spans.hull
        i, j = bisect_left(self._high, low), bisect_right(self._low, high)  # what touches them, too
        kinds = list(dict.fromkeys([shift, *self._shift[i:j]]))  # shifts are too large for NumPy's integers
        number = {kind: index for index, kind in enumerate(kinds)}
        old = Ranges(
            np.array(self._low[i:j], np.int64),
            np.array(self._high[i:j], np.int64),
            np.array([number[kind] for kind in self._shift[i:j]], np.int64),
        )
        starts = np.asarray(spans.starts, np.int64)
        new = Ranges(starts, starts + spans.length, np.zeros(len(starts), np.int64))
        both = _laid_over(old, new)
        found = zip(both.low.tolist(), both.high.tolist(), (kinds[k] for k in both.kind.tolist()), strict=True)
        self._replace(i, j, list(found))

    def _outside(self, spans: Spans) -> list[int]:
        """The ranges that do not lie inside one run, and the first one of each run that others lie in."""
        low, high = spans.hull
        first, end = max(bisect_right(self._low, low) - 1, 0), bisect_left(self._low, high)
        if first >= end:
            return list(spans.starts)
        starts, ends = np.asarray(spans.starts), np.asarray(self._high[first:end])
        run = np.searchsorted(np.asarray(self._low[first:end]), starts, "right") - 1
        apart = (run < 0) | (ends[run] < starts + spans.length)
        apart[0], apart[1:] = True, apart[1:] | (run[1:] != run[:-1])
        return starts[apart].tolist()

    def _replace(self, i: int, j: int, runs: list[tuple[int, int, int]]) -> None:
        self._low[i:j] = [low for low, _, _ in runs]
        self._high[i:j] = [high for _, high, _ in runs]
        self._shift[i:j] = [shift for _, _, shift in runs]


def _joined(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Runs in order, neighbours of one shift as one."""
    found: list[tuple[int, int, int]] = []
    for low, high, shift in runs:
        if found and found[-1][1] == low and found[-1][2] == shift:
            found[-1] = (found[-1][0], high, shift)
        else:
            found.append((low, high, shift))
    return found


def _laid_over(old: Ranges, new: Ranges) -> Ranges:
    """The new ranges, and of the old ones what lies outside them; neighbours of one kind as one."""
    edges = np.sort(np.concatenate([old.low, old.high, new.low, new.high]))
    edges = edges[np.append(True, edges[1:] != edges[:-1])]
    low, high = edges[:-1], edges[1:]
    kind = np.full(len(low), -1)
    for ranges in (old, new):
        at = np.searchsorted(ranges.low, low, "right") - 1
        inside = at >= 0
        inside[inside] = low[inside] < ranges.high[at[inside]]
        kind[inside] = ranges.kind[at[inside]]
    begins = np.ones(len(low), bool)
    begins[1:] = kind[1:] != kind[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(low)) - 1
    held = kind[first] >= 0
    return Ranges(low[first[held]], high[last[held]], kind[first[held]])
