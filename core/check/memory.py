"""Symbolic memory: which bytes of which tensor lie where."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from core.check.boxes import Spans

_FEW = 16  # ranges that are put in one by one: each moves what lies behind it


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
        for start in spans.starts:
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
        new = [(start, start + spans.length, shift) for start in spans.starts]
        old = zip(self._low[i:j], self._high[i:j], self._shift[i:j], strict=True)
        self._replace(i, j, _joined(sorted([*new, *_without(list(old), spans)])))

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


def _without(runs: list[tuple[int, int, int]], spans: Spans) -> Iterator[tuple[int, int, int]]:
    """What of the runs lies outside the spans."""
    for low, high, shift in runs:
        at = low
        first = max(bisect_right(spans.starts, low) - 1, 0)
        for start in spans.starts[first : bisect_left(spans.starts, high)]:
            if start > at:
                yield at, start, shift
            at = max(at, start + spans.length)
        if at < high:
            yield at, high, shift
