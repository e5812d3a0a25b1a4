"""Plans within the memory of a device: values and weights wait on the host until their next use.

A buffer of the arena becomes several, one for each stay of its value in the arena. A weight that is streamed gets
buffers, too, in place of its memory in the weight block. `Transfer`s of the plan copy the bytes. Addresses are those of
the largest batch within the limit, also for smaller ones (`Plan.least_rows`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lathe.core.byte_sizes import format_bytes
from lathe.core.plan.arena import place
from lathe.core.plan.liveness import ALIGNMENT, Affine, Buffer
from lathe.core.plan.movables import MemoryLimit, SwapProblem, swap_problem
from lathe.core.plan.plan import ARENA, WEIGHTS, Address, Plan, Step, Transfer, WeightItem
from lathe.core.plan.storage import Place, Storage
from lathe.core.plan.swap_choice import (
    MemoryTooSmall,
    PlannedCopy,
    Stay,
    SwapChoice,
    choose_swaps,
    copies_of,
    move_all,
)

_MAX_TRIALS = 8
_MARGIN = 0.99  # the next goal is the last one times limit / need, times this factor


@dataclass
class Swapping:
    """Where operands are, now that values and weights move. `address` is what `Storage` asks for.

    `items`: the weight block, with streamed items at its end, from byte `resident` on.
    """

    arena: Affine
    swap: Affine
    items: tuple[WeightItem, ...]
    resident: int
    buffers: list[Buffer]
    _stays: Mapping[Buffer | int, Sequence[tuple[Stay, Buffer]]]  # by buffer, or by the old offset of a weight
    _starts: Sequence[int]  # the old offsets of the weight block
    _moved: Sequence[int]  # the new ones
    _copies: Sequence[tuple[PlannedCopy, Affine]] = field(default_factory=list)  # with offsets in the swap memory

    def address(self, given: Place, time: int) -> Address:
        """The address of a place at a time of the plan."""
        if given.buffer is not None:
            buffer = self._at(given.buffer, time) or given.buffer
            return Address(ARENA, (buffer.offset or Affine()) + given.offset)
        if given.base != WEIGHTS:
            return Address(given.base, given.offset)
        index = bisect_right(self._starts, given.offset.b) - 1
        inside = given.offset.b - self._starts[index]
        streamed = self._at(self._starts[index], time)
        if streamed is not None:
            return Address(ARENA, (streamed.offset or Affine()) + Affine(b=inside))
        return Address(WEIGHTS, Affine(b=self._moved[index] + inside))

    def _at(self, key: Buffer | int, time: int) -> Buffer | None:
        """The buffer that holds a movable at a time; None if it never moves."""
        return next((buffer for stay, buffer in self._stays.get(key, ()) if stay.first <= time <= stay.last), None)

    def transfers(self, problem: SwapProblem, swap_base: int) -> tuple[Transfer, ...]:
        """The copies of the plan, in the order in which they begin."""
        return tuple(self._transfer(problem, copy, at, swap_base) for copy, at in self._copies)

    def _transfer(self, problem: SwapProblem, copy: PlannedCopy, at: Affine, swap_base: int) -> Transfer:
        each = copy.movable
        stay, buffer = self._stays[each.key][copy.stay]
        host = Address(swap_base, at)
        if each.item is not None:
            host = Address(WEIGHTS, Affine(b=self._moved[bisect_right(self._starts, each.item.offset) - 1]))
        last = problem.steps_before[min(stay.end, problem.end)]
        begin, end = copy.span
        return Transfer(each.name, copy.into, begin, end, last, buffer.offset or Affine(), host, each.copied)


def swap_within(
    storage: Storage, steps: Sequence[Step], plan: Plan, limit: MemoryLimit
) -> tuple[Swapping, SwapProblem] | None:
    """How to keep the weights and the arena of a plan within a limit; None if they are within it.

    `steps` and `plan` are those without a limit. The choice follows loads, which differ a little from arenas, so each
    trial derives its goal from the arena of the trial before. The last one moves all that can move, between the steps.
    MemoryTooSmall if the operands of one step do not fit, or none of at most 8 trials fits.
    """
    if plan.weights + plan.arena.at(limit.rows) <= limit.nbytes:
        return None
    problem, goal, needs = swap_problem(storage, steps, plan, limit), limit.nbytes, list[int]()
    choice = choose_swaps(problem, goal)
    while len(needs) < _MAX_TRIALS:
        made = _arranged(storage, problem, choice)
        needs.append(made.resident + made.arena.at(limit.rows))
        if needs[-1] <= limit.nbytes:
            return made, problem
        if choice.is_least:
            break
        goal = int(goal * min(limit.nbytes / needs[-1], 1) * _MARGIN)
        try:
            choice = choose_swaps(problem, goal if len(needs) < _MAX_TRIALS - 1 else 0)
        except MemoryTooSmall:
            choice = move_all(problem)
    raise MemoryTooSmall(
        f"{format_bytes(min(needs))} are needed even with swapping to the host, there is room for "
        f"{format_bytes(limit.nbytes)}",
        min(needs),
    )


def _arranged(storage: Storage, problem: SwapProblem, choice: SwapChoice) -> Swapping:
    """Give every stay a buffer, place all buffers in the arena and in swap memory, and order the weight block."""
    stays = {
        each.key: [(stay, Buffer(each.size, stay.first, stay.last, list(each.values))) for stay in times]
        for each, times in choice.stays.items()
    }
    kept = [each.buffer for each in problem.buffers if each.buffer is not None and each.key not in stays]
    buffers = [*kept, *problem.scratch, *(buffer for times in stays.values() for _, buffer in times)]
    arena = place(buffers)
    hosts = {
        each: Buffer(each.size, times[0].end, times[-1].begin)
        for each, times in choice.stays.items()
        if not each.is_weight
    }
    swap = place(list(hosts.values()))
    copies = [
        (copy, (hosts[copy.movable].offset or Affine()) if copy.movable in hosts else Affine())
        for copy in copies_of(problem, choice.stays)
    ]
    items, resident, starts, moved = _ordered(storage.weights.items, {each.item for each in choice.streamed})
    return Swapping(arena, swap, items, resident, buffers, stays, starts, moved, copies)


def _ordered(
    items: Sequence[WeightItem], streamed: set[WeightItem | None]
) -> tuple[tuple[WeightItem, ...], int, list[int], list[int]]:
    """The weight block with streamed items at its end, where these begin, and the old and new offsets of all items."""
    at, moved, resident = 0, dict[int, int](), 0
    for late in (False, True):
        for item in items:
            if (item in streamed) is late:
                moved[item.offset] = at if item.nbytes else moved.get(item.offset, at)
                at += -(-item.nbytes // ALIGNMENT) * ALIGNMENT
        resident = at if not late else resident
    placed = sorted((replace(item, offset=moved[item.offset]) for item in items), key=lambda item: item.offset)
    starts = sorted(moved)
    return tuple(placed), resident, starts, [moved[start] for start in starts]
