"""Chooses what leaves the arena, and when: the plan with the least forecast time that keeps to a limit of memory.

Between two uses of a value is a *gap*. In a gap that is *open* the value is on the host, and its memory is free. The
gap to open next relieves the times of the highest load most for the seconds that its copies cost. So a value whose next
use is far away goes first, as in Belady's rule for caches (1966), unless its copies would delay the steps (as in
Capuchin: Peng et al. 2020). Copies are hidden behind steps where memory permits: a value comes back early, and leaves
late (vDNN: Rhu et al. 2016).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lathe.core.byte_sizes import format_bytes
from lathe.core.errors import UnsupportedError
from lathe.core.plan.movables import Loads, Movable, SwapProblem
from lathe.core.plan.transfers import elapsed

_SIZES = 8  # the sizes of weights that are tried as the largest one to stream


class MemoryTooSmall(UnsupportedError):
    """Even with all that swapping can move, a plan needs more memory than its limit. `least`: bytes that it needs."""

    def __init__(self, message: str, least: int, where: str = "") -> None:
        super().__init__(message, where=where)
        self.least = least


@dataclass(slots=True)
class Stay:
    """A time from `first` to `last` in which a movable is in the arena; kernels use it from `begin` to `end`."""

    first: int
    begin: int
    end: int
    last: int


@dataclass(frozen=True, slots=True)
class SwapChoice:
    """The stays of each movable that leaves the arena, and the forecast seconds of a run.

    `is_least`: no other choice needs less memory.
    """

    stays: dict[Movable, list[Stay]]
    seconds: float
    is_least: bool = False

    @property
    def streamed(self) -> list[Movable]:
        return [each for each in self.stays if each.is_weight]


def choose_swaps(problem: SwapProblem, room: int) -> SwapChoice:
    """What leaves the arena so that weights and arena take at most `room` bytes, as far as loads tell.

    The share of weights that is streamed, and the largest weight among them, are varied; the choice with the least
    forecast time wins. MemoryTooSmall if the operands of a step do not fit.
    """
    found = [each for streamed in _shares(problem, room) if (each := _choose(problem, room, streamed)) is not None]
    if not found:
        raise _too_small(problem, room)
    return min(found, key=lambda each: each.seconds)


def move_all(problem: SwapProblem) -> SwapChoice:
    """The choice that needs the least memory: nothing is in the arena between two uses, or while it is copied."""
    stays = {each: list(_stays(each, set(_gaps(each)))) for each in (*problem.buffers, *problem.weights)}
    moved = {each: times for each, times in stays.items() if each.is_weight or len(times) > 1}
    return SwapChoice(moved, _seconds(problem, moved), is_least=True)


def _too_small(problem: SwapProblem, room: int) -> MemoryTooSmall:
    needs = problem.needs([*problem.buffers, *problem.weights])
    node = problem.nodes[min(int(needs.at.argmax()), problem.end - 1)]
    least = problem.pinned + needs.peak
    reason = (
        f"{node.op} needs {format_bytes(least)} for its operands in batches of {problem.limit.rows}, even if all else "
        f"is swapped to the host; there is room for {format_bytes(room)}"
    )
    return MemoryTooSmall(reason, least, f"node '{node.name}'")


# -- shares of the weights -------------------------------------------------------------------------------------------


def _shares(problem: SwapProblem, room: int) -> Iterator[tuple[Movable, ...]]:
    """Yield sets of weights to stream: none, enough that no value or only some values must leave the arena, and all."""
    sizes = sorted({each.resident for each in problem.weights})
    unmoved = Loads.of(problem)
    for each in problem.buffers:
        unmoved.add(each.size, each.uses[0], each.uses[-1])
    whole = problem.pinned + sum(each.resident for each in problem.weights) - room
    most, least = whole + unmoved.peak, whole + problem.needs(problem.buffers).peak
    seen: set[frozenset[int]] = set()
    for largest in sizes[:: max(len(sizes) // _SIZES, 1)] + sizes[-1:]:
        for wanted in (most, (most + least) // 2, least):
            chosen = tuple(_enough(problem, largest, wanted))
            key = frozenset(map(id, chosen))
            if key not in seen:
                seen.add(key)
                yield chosen
    for rest in ((), problem.weights):
        if frozenset(map(id, rest)) not in seen:
            yield rest


def _enough(problem: SwapProblem, largest: int, wanted: int) -> Iterable[Movable]:
    """Weights of at most `largest` bytes that free `wanted` bytes, less the memory for those that one step reads.

    Large ones come first, as they need fewer copies. Of equal ones some are taken at even distances, so that the copies
    have the steps between them to hide behind.
    """
    chosen: list[Movable] = []
    freed, at_once = 0, np.zeros(problem.end + 1, np.int64)
    for size in sorted({each.resident for each in problem.weights if each.resident <= largest}, reverse=True):
        equal = [each for each in problem.weights if each.resident == size]
        for index in _spread(len(equal)):
            if freed - int(at_once.max()) >= wanted:
                return chosen
            chosen.append(equal[index])
            freed += size
            at_once[list(equal[index].uses)] += size
    return chosen


def _spread(count: int) -> list[int]:
    """The numbers below `count` in an order of which each beginning is spread evenly: by their bits in reverse."""
    bits = max(count - 1, 0).bit_length()
    order = (int(format(number, f"0{bits}b")[::-1], 2) if bits else 0 for number in range(1 << bits))
    return [number for number in order if number < count]


# -- one share -------------------------------------------------------------------------------------------------------


def _choose(problem: SwapProblem, room: int, streamed: Sequence[Movable]) -> SwapChoice | None:
    """The choice for a set of weights to stream; None if there is none."""
    resident = sum(each.resident for each in problem.weights) - sum(each.resident for each in streamed)
    limit = room - problem.pinned - resident
    gaps = _Gaps(problem, [*problem.buffers, *streamed])
    if not gaps.open_until(limit):
        return None
    stays = gaps.stays()
    spread = _Spread(problem, gaps.loads, limit)
    spread.early(stays)
    spread.late(stays)
    return SwapChoice(stays, _seconds(problem, stays))


def _seconds(problem: SwapProblem, stays: dict[Movable, list[Stay]]) -> float:
    """The forecast seconds of a run with these stays."""
    steps = [0.0] * problem.steps_before[-1]
    for step, after, seconds in zip(problem.steps_before, problem.steps_before[1:], problem.seconds, strict=False):
        if after > step:
            steps[step] = seconds
    copies = copies_of(problem, stays)
    return elapsed(steps, [copy.span for copy in copies], [(copy.into, copy.seconds) for copy in copies])


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """A copy of a movable into the arena for a stay, or out of it after the stay; `span`: begin and end as steps."""

    movable: Movable
    stay: int
    into: bool
    span: tuple[int, int]
    seconds: float


def copies_of(problem: SwapProblem, stays: dict[Movable, list[Stay]]) -> list[PlannedCopy]:
    """All copies in the order in which they begin; at the same step those out of the arena come first.

    A value leaves the arena by a copy only if a kernel has written it since the last copy.
    """
    at, found = problem.steps_before, []
    for each, times in stays.items():
        seconds = problem.limit.rates.copy_seconds(each.copied.at(problem.limit.rows))
        for index, stay in enumerate(times):
            if index or each.is_weight:
                found.append(PlannedCopy(each, index, True, (at[stay.first], at[stay.begin]), seconds))
            if index + 1 < len(times) and each.is_written(stay.begin, stay.end):
                found.append(PlannedCopy(each, index, False, (at[stay.end + 1], at[stay.last + 1]), seconds))
    return sorted(found, key=lambda copy: (copy.span[0], copy.into, copy.span[1]))


class _Gaps:
    """The gaps of some movables, which are open or closed, and the loads that result."""

    def __init__(self, problem: SwapProblem, movables: Sequence[Movable]) -> None:
        self._problem, self._movables = problem, movables
        self.loads = Loads.of(problem)
        for each in movables:
            self.loads.add(each.size, each.uses[0], each.uses[-1])
        found = [(owner, place) for owner, each in enumerate(movables) for place in _gaps(each)]
        self._owner = np.array([owner for owner, _ in found], np.int64)
        self._place = np.array([place for _, place in found], np.int64)
        self._first = np.array([movables[owner].uses[place] + 1 for owner, place in found], np.int64)
        self._last = np.array([movables[owner].uses[place + 1] - 1 for owner, place in found], np.int64)
        self._bytes = np.array([problem.bytes_of(movables[owner].size) for owner, _ in found], np.int64)
        self._is_open = np.zeros(len(found), bool)
        self._cost = np.array([self._seconds(index) for index in range(len(found))])

    def _seconds(self, gap: int) -> float:
        """The seconds that opening the gap costs: of its copies, and once more of what the steps cannot hide."""
        owner = self._movables[self._owner[gap]]
        once = self._problem.limit.rates.copy_seconds(owner.copied.at(self._problem.limit.rows))
        copies = once * (1 + owner.is_written(self._since(gap), int(self._first[gap])))
        clock = self._problem.clock
        hidden = clock[self._last[gap] + 1] - clock[self._first[gap]]
        return float(copies + max(copies - hidden, 0.0))

    def _since(self, gap: int) -> int:
        """The end of the last open gap of the same movable before this one; 0 if there is none."""
        before = self._is_open & (self._owner == self._owner[gap]) & (self._last < self._first[gap])
        return int(self._last[before].max(initial=0))

    def open_until(self, limit: int) -> bool:
        """Open gaps until the loads are at most `limit`; False if that is impossible."""
        while self.loads.peak > limit:
            best = self._best(limit)
            if best is None:
                return False
            self._open(best)
        return True

    def _best(self, limit: int) -> int | None:
        """The closed gap that covers the time of the highest load and is worth most; None if no gap covers it."""
        load = self.loads.at
        top = int(load.argmax())
        found = np.flatnonzero(~self._is_open & (self._first <= top) & (top <= self._last))
        if not found.size:
            return None
        crowded = np.concatenate([[0], np.cumsum(load > limit)])
        relief = self._bytes[found] * (crowded[self._last[found] + 1] - crowded[self._first[found]])
        return int(found[int((relief / self._cost[found]).argmax())])

    def _open(self, gap: int) -> None:
        self._is_open[gap] = True
        owner = self._owner[gap]
        self.loads.add(self._movables[owner].size, int(self._first[gap]), int(self._last[gap]), -1)
        for other in np.flatnonzero((self._owner == owner) & ~self._is_open):
            self._cost[other] = self._seconds(int(other))

    def stays(self) -> dict[Movable, list[Stay]]:
        """The stays of the movables with open gaps, and of weights."""
        opened: dict[int, set[int]] = {}
        for owner, place in zip(self._owner[self._is_open], self._place[self._is_open], strict=True):
            opened.setdefault(int(owner), set()).add(int(place))
        return {
            each: list(_stays(each, opened.get(owner, set())))
            for owner, each in enumerate(self._movables)
            if each.is_weight or owner in opened
        }


def _gaps(movable: Movable) -> Iterator[int]:
    """Yield the number of each use after which there is a time without a use, and then another use."""
    return (place for place, (use, after) in enumerate(pairwise(movable.uses)) if after > use + 1)


def _stays(movable: Movable, opened: set[int]) -> Iterator[Stay]:
    begin = movable.uses[0]
    for place, use in enumerate(movable.uses):
        if place in opened or place == len(movable.uses) - 1:
            yield Stay(begin, begin, use, use)
            begin = movable.uses[place + 1] if place + 1 < len(movable.uses) else use


@dataclass
class _Spread:
    """Extends stays, so that copies happen beside steps: into the arena early, out of it late, as memory permits."""

    problem: SwapProblem
    loads: Loads
    limit: int

    def early(self, stays: dict[Movable, list[Stay]]) -> None:
        """Begin copies into the arena as late as they are in time for their step, but not all at once."""
        clock, rates = self.problem.clock, self.problem.limit.rates
        ins = [(each, index) for each, times in stays.items() for index in range(len(times)) if index or each.is_weight]
        deadline = float("inf")
        for each, index in sorted(ins, key=lambda item: -stays[item[0]][item[1]].begin):
            stay, earliest = stays[each][index], stays[each][index - 1].last + 1 if index else 0
            start = min(deadline, clock[stay.begin]) - rates.copy_seconds(each.copied.at(self.problem.limit.rows))
            wanted = max(int(np.searchsorted(clock, start, "right")) - 1, earliest)
            while stay.first > wanted and self.loads.fits(each.size, stay.first - 1, self.limit):
                stay.first -= 1
                self.loads.add(each.size, stay.first, stay.first)
            deadline = max(start, clock[stay.first]) if stay.first > wanted else start

    def late(self, stays: dict[Movable, list[Stay]]) -> None:
        """Keep the memory of values that leave the arena until their copies have ended."""
        clock, rates, free = self.problem.clock, self.problem.limit.rates, 0.0
        outs = [
            (each, stay, after.first)
            for each, times in stays.items()
            for stay, after in pairwise(times)
            if each.is_written(stay.begin, stay.end)
        ]
        for each, stay, back in sorted(outs, key=lambda item: item[1].end):
            free = max(free, clock[stay.end + 1]) + rates.copy_seconds(each.copied.at(self.problem.limit.rows))
            while stay.last + 1 < back and clock[stay.last + 1] < free:
                if not self.loads.fits(each.size, stay.last + 1, self.limit):
                    break
                stay.last += 1
                self.loads.add(each.size, stay.last, stay.last)
