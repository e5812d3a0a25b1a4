"""Symbolic memory: records which bytes of which tensor are at which address."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lathe.core.check.boxes import Spans

_FEW = 16  # up to this number, ranges are inserted one by one; each insertion moves all later entries of the lists


class Ranges(NamedTuple):
    """Disjoint byte ranges [low, high) in ascending order, each with a number, `kind`, for its content."""

    low: NDArray[np.int64]
    high: NDArray[np.int64]
    kind: NDArray[np.int64]


class Memory:
    """The bytes at addresses 0 to `size` of one base; `size` is None if no step may write to the memory.

    A *shift* represents a tensor at an address: its byte number `i` is at address `i + shift`. Adjacent bytes with the
    same shift form one run.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._low: list[int] = []
        self._high: list[int] = []
        self._shift: list[int] = []

    def write(self, spans: Spans, shift: int) -> None:
        """Record that the bytes in `spans` now hold bytes of the tensor with this shift; earlier contents are lost."""
        if len(spans.starts) <= _FEW:
            for start in spans.starts:
                self._put(start, start + spans.length, shift)
        elif spans.starts:
            self._put_all(spans, shift)

    def wipe(self, low: int, high: int) -> None:
        """Record that the bytes from `low` to `high` hold nothing."""
        if low < high:
            i, j, outside = self._overlapping(low, high)
            self._replace(i, j, outside)

    def keep_only(self, low: int, high: int) -> None:
        """Record that all bytes outside `low` to `high` hold nothing."""
        if self._high:
            self.wipe(min(self._low[0], low), low)
        if self._high:
            self.wipe(high, max(self._high[-1], high))

    def lacks(self, spans: Spans, shift: int) -> tuple[int, int] | None:
        """The first range (start, end) in `spans` that holds anything else than the tensor with this shift, or None."""
        starts: Iterable[int] = spans.starts
        if len(spans.starts) > _FEW:
            starts = self._ranges_to_check(spans)
        for start in starts:
            i = bisect_right(self._low, start) - 1
            if i < 0 or self._shift[i] != shift or self._high[i] < start + spans.length:
                return start, start + spans.length
        return None

    def runs(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Yield start, end and shift of every run between `low` and `high`, clipped to these."""
        for i in range(bisect_right(self._high, low), bisect_left(self._low, high)):
            yield max(self._low[i], low), min(self._high[i], high), self._shift[i]

    def _overlapping(self, low: int, high: int) -> tuple[int, int, list[tuple[int, int, int]]]:
        """The indices [i, j) of the runs that overlap `low` to `high`, and the parts of these runs that lie outside."""
        i, j = bisect_right(self._high, low), bisect_left(self._low, high)
        outside = []
        if i < j and self._low[i] < low:
            outside.append((self._low[i], low, self._shift[i]))
        if i < j and self._high[j - 1] > high:
            outside.append((high, self._high[j - 1], self._shift[j - 1]))
        return i, j, outside

    def _put(self, low: int, high: int, shift: int) -> None:
        """Insert one run in place of what was there, merged with adjacent runs of the same shift."""
        i, j, around = self._overlapping(low, high)
        if i and self._high[i - 1] == low and not (around and around[0][0] < low):
            i -= 1
            around.insert(0, (self._low[i], self._high[i], self._shift[i]))
        if j < len(self._low) and self._low[j] == high and not (around and around[-1][0] >= high):
            around.append((self._low[j], self._high[j], self._shift[j]))
            j += 1
        self._replace(i, j, _merge_adjacent(sorted([*around, (low, high, shift)])))

    def _put_all(self, spans: Spans, shift: int) -> None:
        """`_put` for many ranges at once, with NumPy."""
        low, high = spans.hull
        i, j = bisect_left(self._high, low), bisect_right(self._low, high)  # including adjacent runs, to merge them
        kinds = list(dict.fromkeys([shift, *self._shift[i:j]]))  # shifts are too large for NumPy's integers
        number = {kind: index for index, kind in enumerate(kinds)}
        old = Ranges(
            np.array(self._low[i:j], np.int64),
            np.array(self._high[i:j], np.int64),
            np.array([number[kind] for kind in self._shift[i:j]], np.int64),
        )
        starts = np.asarray(spans.starts, np.int64)
        new = Ranges(starts, starts + spans.length, np.zeros(len(starts), np.int64))
        both = _overlay(old, new)
        found = zip(both.low.tolist(), both.high.tolist(), (kinds[k] for k in both.kind.tolist()), strict=True)
        self._replace(i, j, list(found))

    def _ranges_to_check(self, spans: Spans) -> list[int]:
        """The starts of the ranges in `spans` that `lacks` must check.

        These are the ranges that are not inside a single run, and the first range inside each run.
        The other ranges inside a run have the same shift as the first one, so `lacks` need not check them.
        """
        low, high = spans.hull
        first, end = max(bisect_right(self._low, low) - 1, 0), bisect_left(self._low, high)
        if first >= end:
            return list(spans.starts)
        starts, ends = np.asarray(spans.starts), np.asarray(self._high[first:end])
        run = np.searchsorted(np.asarray(self._low[first:end]), starts, "right") - 1
        to_check = (run < 0) | (ends[run] < starts + spans.length)
        to_check[0], to_check[1:] = True, to_check[1:] | (run[1:] != run[:-1])
        return starts[to_check].tolist()

    def _replace(self, i: int, j: int, runs: list[tuple[int, int, int]]) -> None:
        self._low[i:j] = [low for low, _, _ in runs]
        self._high[i:j] = [high for _, high, _ in runs]
        self._shift[i:j] = [shift for _, _, shift in runs]


def _merge_adjacent(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The sorted runs, with adjacent runs of the same shift merged."""
    found: list[tuple[int, int, int]] = []
    for low, high, shift in runs:
        if found and found[-1][1] == low and found[-1][2] == shift:
            found[-1] = (found[-1][0], high, shift)
        else:
            found.append((low, high, shift))
    return found


def _overlay(old: Ranges, new: Ranges) -> Ranges:
    """The union of both sets of ranges, where `new` replaces `old`; adjacent ranges of the same kind are merged."""
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
    is_covered = kind[first] >= 0
    return Ranges(low[first[is_covered]], high[last[is_covered]], kind[first[is_covered]])
