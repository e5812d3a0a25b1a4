"""Plans within the memory of devices: nodes go to the next device, and what is left over swaps with the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lathe.core.ir.dim import evaluate
from lathe.core.plan.movables import MemoryLimit
from lathe.core.plan.placement import COPY_SECONDS, HOST, Placement
from lathe.core.plan.plan import PlannedGraph
from lathe.core.plan.swap_choice import MemoryTooSmall
from lathe.core.plan.transfers import COPY_BANDWIDTH, Rates, forecast
from lathe.core.runtime.device.devices import open_device
from lathe.core.runtime.host.machine import peaks as host_peaks
from lathe.core.runtime.host.plan_memory import PlanMemory, memory_of_plan

PlanPart = Callable[[int, MemoryLimit | None], PlannedGraph]  # by the number of a part
_MARGIN = 0.95  # safety factor for the next goal after a plan has exceeded its limit


@dataclass
class DeviceMemory:
    """The memory that plans may take on each device, by name.

    `limits`: in bytes, as the caller gave them. Without one, all memory of the device is the limit. `goals` are what
    the placement of nodes may assume; a device without a goal gets all nodes that it has kernels for. A device that
    `swaps` keeps the nodes that do not fit at the same time, instead of passing them on; devices that nodes are pinned
    to always do.
    """

    devices: Sequence[str]
    limits: Mapping[str, int]
    pinned: frozenset[str]  # devices that some nodes must run on
    rows: int
    goals: dict[str, int] = field(default_factory=dict)
    swaps: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.goals |= self.limits
        self.swaps |= {name for name in self.devices if name in self.pinned}

    def plan(self, placement: Placement, plan_part: PlanPart) -> list[PlannedGraph] | None:
        """Plans of all parts within the limits; None if nodes must be placed again, with other goals.

        `plan_part` plans a part, within a limit or without. MemoryTooSmall if a device has pinned nodes, and even the
        operands of one step exceed its memory.
        """
        planned = [plan_part(index, None) for index in range(len(placement.parts))]
        for name in self.devices:
            parts = [index for index, part in enumerate(placement.parts) if part.device == name]
            taken = sum(memory_of_plan(planned[index].plan, self.rows).total for index in parts)
            if taken <= self._limit(name):
                continue
            if name in self.swaps:
                if not self._swap(name, parts, planned, plan_part):
                    return None
            elif name in self.goals:
                self.goals[name] = int(self.goals[name] * self._limit(name) / taken * _MARGIN)
                return None
            else:
                self.goals[name] = self._limit(name)
                return None
        return planned

    def _limit(self, name: str) -> int:
        return self.limits[name] if name in self.limits else open_device(name).memory().total

    def _swap(self, name: str, parts: Sequence[int], planned: list[PlannedGraph], plan_part: PlanPart) -> bool:
        """Replace the plans of a device's parts by plans with transfers; False if nodes must be placed again."""
        memory = [memory_of_plan(planned[index].plan, self.rows) for index in parts]
        peaks = open_device(name).peaks()
        try:
            budgets = _Budgets(self._limit(name), memory)
            while (found := self._within(budgets, parts, plan_part, Rates(peaks.flops, peaks.bandwidth))) is None:
                pass
        except MemoryTooSmall as error:
            if name in self.pinned:
                raise MemoryTooSmall(f"does not fit on {name}: {error.reason}", error.least, error.where) from None
            self.swaps.discard(name)
            self.notes.append(f"no swapping on {name}: {error}")
            return name not in self.limits  # then the device itself refuses the model, with figures
        for index, each in zip(parts, found, strict=True):
            planned[index] = each
        return True

    def _within(
        self, budgets: _Budgets, parts: Sequence[int], plan_part: PlanPart, rates: Rates
    ) -> list[PlannedGraph] | None:
        """Plans within the budgets of the parts; None after one of the budgets has turned out to be too small."""
        found = []
        for place, (index, nbytes) in enumerate(zip(parts, budgets.shares(), strict=True)):
            try:
                found.append(plan_part(index, MemoryLimit(nbytes, self.rows, rates)))
            except MemoryTooSmall as error:
                budgets.raise_least(place, error)
                return None
        return found


def forecast_seconds(placement: Placement, planned: Sequence[PlannedGraph], rows: int, threads: int) -> float:
    """The forecast seconds of a run of `rows`: of the parts, one after the other, and of the copies between them.

    Nodes on their references count nothing: they are the same in all placements of a graph.
    """
    total = 0.0
    for part, each in zip(placement.parts, planned, strict=True):
        if part.device == HOST:
            rates = [(step.flops.at(rows), step.bytes.at(rows)) for step in each.plan.steps]
            total += sum(host_peaks().seconds(flops, nbytes, threads) for flops, nbytes in rates)
        else:
            peaks = open_device(part.device).peaks()
            total += forecast(each.plan, rows, Rates(peaks.flops, peaks.bandwidth)).whole
    sizes = (evaluate(crossing.nbytes, {"n": rows}) for crossing in placement.crossings)
    return total + sum(COPY_SECONDS + nbytes / COPY_BANDWIDTH for nbytes in sizes)


class _Budgets:
    """Divides the memory of a device among the weights and arenas of its parts.

    Inputs, outputs and states need their memory anyway. Each part gets the least that it is known to need, and a share
    of the rest, in proportion to what it would take beyond that.
    """

    def __init__(self, limit: int, memory: Sequence[PlanMemory]) -> None:
        self._spare = limit - sum(each.states + each.ports for each in memory)
        self._wants = [each.weights + each.arena for each in memory]
        self._least = [0] * len(memory)
        if self._spare <= 0:
            taken = limit - self._spare
            raise MemoryTooSmall(f"inputs, outputs and states take {taken} bytes, there is room for {limit}", taken)

    def shares(self) -> list[int]:
        rest = self._spare - sum(self._least)
        beyond = [want - least for want, least in zip(self._wants, self._least, strict=True)]
        return [least + rest * more // max(sum(beyond), 1) for least, more in zip(self._least, beyond, strict=True)]

    def raise_least(self, place: int, error: MemoryTooSmall) -> None:
        """Note what a part needs at least. Raises `error` again if the parts cannot all have that."""
        before, self._least[place] = self._least[place], max(error.least, self._least[place])
        if self._least[place] == before or sum(self._least) > self._spare or len(self._least) == 1:
            raise error
