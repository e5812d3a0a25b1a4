"""A model whose nodes are spread over devices: its parts run one after the other, and values travel between them.

What a device makes and another one reads goes from memory to memory where the second one reaches the first; it comes to
the host only for parts that run there, or where the driver knows no other way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.ir.dim import evaluate
from core.ir.graph import Array
from core.plan.placement import Crossing
from core.plan.plan import Plan
from core.runtime.device_executable import DeviceExecutable
from core.runtime.resident import Held
from core.runtime.runner import Endless, Runner, Share, Times


@dataclass(frozen=True)
class Wiring:
    """How values get from part to part, by their names. `states`: those that no part keeps to itself, each with the
    name of its next value; `constants`: outputs of the model that nothing computes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Array] = field(default_factory=dict)
    crossings: tuple[Crossing, ...] = ()


class Direct:
    """Which values go from device to device, found once for all runs."""

    def __init__(self, parts: Sequence[Runner], plans: Sequence[Plan], kept: frozenset[str]) -> None:
        """`kept`: values that the host wants in any case."""
        self.makers = {port.name: index for index, plan in enumerate(plans) for port in plan.outputs}
        self.taken = [self._taken(index, parts, plan) for index, plan in enumerate(plans)]  # names, by part
        host = {port.name for plan, taken in zip(plans, self.taken, strict=True) for port in plan.inputs
                if port.name not in taken}  # fmt: skip
        wanted = host | kept
        self.fetched = [
            frozenset(at for at, port in enumerate(plan.outputs) if port.name in wanted) for plan in plans
        ]  # places of outputs, by part
        last = {self.makers[name]: index for index, taken in enumerate(self.taken) for name in taken}
        self.lenders = frozenset(last)
        self.ending = [[maker for maker, at in last.items() if at == index] for index in range(len(parts))]

    def _taken(self, index: int, parts: Sequence[Runner], plan: Plan) -> frozenset[str]:
        """The inputs of a part that it takes from where they were made."""
        part = parts[index]
        if not isinstance(part, DeviceExecutable):
            return frozenset()
        makers = {port.name: parts[self.makers[port.name]] for port in plan.inputs if port.name in self.makers}
        return frozenset(
            name
            for name, maker in makers.items()
            if isinstance(maker, DeviceExecutable) and part.device.reaches(maker.device)
        )


class Placed:
    """Runs the parts of a model. Runs with state take turns; others go on side by side."""

    def __init__(self, parts: Sequence[Runner], wiring: Wiring, states: Mapping[str, Array]) -> None:
        """`states` are the first values of those that belong to no part."""
        self._parts = tuple(parts)
        self._wiring = wiring
        self._states = {name: np.array(array) for name, array in states.items()}
        self._turn = threading.Lock()
        self._plans = [part.shares[0].plan for part in parts]
        kept = frozenset({*wiring.outputs, *wiring.states.values()})
        self._direct = Direct(self._parts, self._plans, kept)
        last = {port.name: index for index, plan in enumerate(self._plans) for port in plan.inputs}
        self._dying = [[n for n, at in last.items() if at == index and n not in kept] for index in range(len(parts))]

    @property
    def whole(self) -> Runner | None:
        """The one part that does everything and keeps all states; None where there is more."""
        return self._parts[0] if len(self._parts) == 1 and not self._wiring.states else None

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(share for part in self._parts for share in part.shares)

    @property
    def hosts(self) -> tuple[Endless, ...]:
        return tuple(host for part in self._parts for host in part.hosts)

    def run(self, n: int, inputs: Sequence[Any], times: Sequence[Times] | None = None) -> list[Any]:
        """As `Runner.run`."""
        values: dict[str, Any] = dict(zip(self._wiring.inputs, inputs, strict=True)) | dict(self._wiring.constants)
        if not self._wiring.states:
            return self._outputs(self._run(n, values, times))
        with self._turn:
            values = self._run(n, values | self._states, times)
            results = self._outputs(values)
            self._states = {state: np.array(values[update]) for state, update in self._wiring.states.items()}
        return results

    def _run(self, n: int, values: dict[str, Any], times: Sequence[Times] | None) -> dict[str, Any]:
        with ExitStack() as ending:
            held: dict[int, Held] = {}
            for index, (part, plan) in enumerate(zip(self._parts, self._plans, strict=True)):
                given = list(self._given(index, values, held))
                mine = times[index : index + 1] if times else None
                if isinstance(part, DeviceExecutable):
                    held[index] = ending.enter_context(part.hold(n, given, self._direct.fetched[index], mine))
                    results = held[index].arrays
                    if index not in self._direct.lenders:
                        held[index].close()
                else:
                    results = part.run(n, given, mine)
                values.update(zip((port.name for port in plan.outputs), results, strict=True))
                self._end(index, values, held)
        return values

    def _given(self, index: int, values: Mapping[str, Any], held: Mapping[int, Held]) -> Iterator[Any]:
        """The inputs of a part: arrays, or where they lie on a device."""
        for port in self._plans[index].inputs:
            if port.name in self._direct.taken[index]:
                maker = self._direct.makers[port.name]
                place = [output.name for output in self._plans[maker].outputs].index(port.name)
                yield held[maker].resident[place]
            else:
                yield values[port.name]

    def _end(self, index: int, values: dict[str, Any], held: Mapping[int, Held]) -> None:
        """Let go of what no later part reads."""
        for maker in self._direct.ending[index]:
            held[maker].close()
        for name in self._dying[index]:
            del values[name]

    def _outputs(self, values: Mapping[str, Any]) -> list[Any]:
        """The results, none of them an array of the caller's or of another output."""
        passed = {*self._wiring.inputs, *self._wiring.constants, *self._wiring.states}
        results = []
        for name in self._wiring.outputs:
            value = values[name]
            results.append(value.copy() if name in passed and isinstance(value, np.ndarray) else value)
            passed.add(name)
        return results

    def set_state(self, name: str, array: NDArray[Any]) -> None:
        """Give a state its value."""
        if name in self._states:
            with self._turn:
                self._states[name] = np.array(array)
        else:
            self._keeper(name).set_state(name, array)

    def state(self, name: str) -> NDArray[Any]:
        """A copy of a state's present value."""
        if name not in self._states:
            return self._keeper(name).state(name)
        with self._turn:
            return self._states[name].copy()

    def _keeper(self, name: str) -> Runner:
        parts = zip(self._parts, self._plans, strict=True)
        return next(part for part, plan in parts if any(port.name == name for port in plan.states))

    def explain(self, n: int) -> list[str]:
        lines = [f"{len(self._parts)} parts on {', '.join(dict.fromkeys(share.device for share in self.shares))}"]
        for index, part in enumerate(self._parts):
            lines.append(f"part {index} on {part.shares[0].device}:")
            received = [crossing for crossing in self._wiring.crossings if crossing.receiver == index]
            sent = [crossing for crossing in self._wiring.crossings if crossing.sender == index]
            lines += [f"  receive %{c.name} from {self._source(c)}: {evaluate(c.nbytes, {'n': n})} B" for c in received]
            lines += [f"  {line}" for line in part.explain(n)]
            lines += [f"  send %{c.name} to {c.target}, part {c.receiver}" for c in sent]
        return lines

    def _source(self, crossing: Crossing) -> str:
        direct = crossing.name in self._direct.taken[crossing.receiver]
        return f"{crossing.source}{', directly' if direct else ''}"

    def settle(self, timeout: float | None = None) -> bool:
        return all(part.settle(timeout) for part in self._parts)

    def close(self) -> None:
        for part in self._parts:
            part.close()
