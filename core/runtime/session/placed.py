"""A model whose nodes are placed on several devices: its parts run one after the other, and values travel between them.

A value goes directly from device to device if the second device can reach the memory of the first. It is copied through
the host only for parts on the host, or where the driver has no direct path.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import UnsupportedError
from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Array
from lathe.core.plan.placement import Crossing
from lathe.core.plan.plan import Plan, Port
from lathe.core.runtime.device.device import Device
from lathe.core.runtime.device.device_executable import DeviceExecutable
from lathe.core.runtime.host.resident_values import HeldRun, Resident
from lathe.core.runtime.session.runner import DeviceShare, Interruptible, Runner, StepTimes, settle_all


@dataclass(frozen=True)
class Wiring:
    """How values get from part to part, by name.

    `inputs` and `outputs`: those of the model. `states`: the states that several parts use, each with the name of its
    next value. `constants`: outputs of the model that nothing computes. `crossings`: the values that go between parts,
    for reports.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Array] = field(default_factory=dict)
    crossings: tuple[Crossing, ...] = ()


class DirectTransfers:
    """Which values go directly from device to device, found once for all runs.

    `makers` has the index of the part that makes each value, by name. By the index of a part, `taken` has the names of
    its inputs that come directly from another device, `fetched` the positions of its outputs that are copied to the
    host, and `ending` the parts whose device memory is free after it. `lenders`: the parts whose outputs another device
    reads.
    """

    def __init__(self, parts: Sequence[Runner], plans: Sequence[Plan], kept: frozenset[str]) -> None:
        """`kept`: values that the host needs in any case, so that they are copied to it, too."""
        self.makers = {port.name: index for index, plan in enumerate(plans) for port in plan.outputs}
        self.taken = [self._direct_inputs(index, parts, plan) for index, plan in enumerate(plans)]  # names, by part
        host = {port.name for plan, taken in zip(plans, self.taken, strict=True) for port in plan.inputs
                if port.name not in taken}  # fmt: skip
        wanted = host | kept
        self.fetched = [
            frozenset(at for at, port in enumerate(plan.outputs) if port.name in wanted) for plan in plans
        ]  # places of outputs, by part
        last = {self.makers[name]: index for index, taken in enumerate(self.taken) for name in taken}
        self.lenders = frozenset(last)
        self.ending = [[maker for maker, at in last.items() if at == index] for index in range(len(parts))]

    def _direct_inputs(self, index: int, parts: Sequence[Runner], plan: Plan) -> frozenset[str]:
        """The inputs that part `index` reads directly from the device that made them; empty for a part on the host."""
        part = parts[index]
        if not isinstance(part, DeviceExecutable):
            return frozenset()
        makers = {port.name: parts[self.makers[port.name]] for port in plan.inputs if port.name in self.makers}
        return frozenset(
            name
            for name, maker in makers.items()
            if isinstance(maker, DeviceExecutable) and part.device.reaches(maker.device)
        )


class PlacedRunner:
    """Runs the parts of a model, one after the other.

    Runs of a model with states that several parts use are serialized; others run concurrently.
    """

    def __init__(self, parts: Sequence[Runner], wiring: Wiring, states: Mapping[str, Array]) -> None:
        """`states`: the initial values of the states that several parts use."""
        self._parts = tuple(parts)
        self._wiring = wiring
        self._states = {name: np.array(array) for name, array in states.items()}
        self._state_lock = threading.Lock()
        self._plans = [part.shares[0].plan for part in parts]
        kept = frozenset({*wiring.outputs, *wiring.states.values()})
        self._direct = DirectTransfers(self._parts, self._plans, kept)
        last = {port.name: index for index, plan in enumerate(self._plans) for port in plan.inputs}
        self._last_reads = [
            [n for n, at in last.items() if at == index and n not in kept] for index in range(len(parts))
        ]

    @property
    def whole(self) -> Runner | None:
        """The only part, if the model has just one and all states are in it; otherwise None."""
        return self._parts[0] if len(self._parts) == 1 and not self._wiring.states else None

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        return tuple(share for part in self._parts for share in part.shares)

    @property
    def hosts(self) -> tuple[Interruptible, ...]:
        return tuple(host for part in self._parts for host in part.hosts)

    def run(self, n: int, inputs: Sequence[Any], times: Sequence[StepTimes] | None = None) -> list[Any]:
        """Outputs in the model's order, in arrays of their own, for a batch of `n`.

        `inputs` are arrays of the declared types. `times`: a list of one `StepTimes` for each of `shares`, to which the
        time of every step is added. The states that several parts use have their next values afterwards. Errors are
        those of the parts' runs.
        """
        values: dict[str, Any] = dict(zip(self._wiring.inputs, inputs, strict=True)) | dict(self._wiring.constants)
        if not self._wiring.states:
            return self._outputs(self._run(n, values, times))
        with self._state_lock:
            values = self._run(n, values | self._states, times)
            results = self._outputs(values)
            self._states = {state: np.array(values[update]) for state, update in self._wiring.states.items()}
        return results

    def only_device(self) -> Device:
        """The device that runs all nodes. UnsupportedError if there is none, or a part runs on the host."""
        part = self.whole
        if not isinstance(part, DeviceExecutable):
            devices = ", ".join(dict.fromkeys(share.device for share in self.shares))
            raise UnsupportedError(f"run_on_device needs a model that runs on one GPU, this one runs on {devices}")
        return part.device

    def hold(self, n: int, inputs: Sequence[Any]) -> tuple[HeldRun, list[tuple[Port, Resident]]]:
        """As `run`, but inputs may be `Resident`, and the outputs stay on the device until the first result is closed.

        Returns each output's port and place as well. UnsupportedError as of `only_device`, and for outputs that no node
        computes.
        """
        part, device = self.whole, self.only_device()
        values = {**self._wiring.constants, **dict(zip(self._wiring.inputs, inputs, strict=True))}
        plan = self._plans[0]
        ports = {port.name: at for at, port in enumerate(plan.outputs)}
        for name in self._wiring.outputs:
            if name not in ports:
                raise UnsupportedError(f"output '{name}' is not computed on {device.name}: use run")
        assert isinstance(part, DeviceExecutable)
        held = part.hold(n, [values[port.name] for port in plan.inputs], ())
        return held, [(plan.outputs[ports[name]], held.resident[ports[name]]) for name in self._wiring.outputs]

    def _run(self, n: int, values: dict[str, Any], times: Sequence[StepTimes] | None) -> dict[str, Any]:
        with ExitStack() as ending:
            held: dict[int, HeldRun] = {}
            for index, (part, plan) in enumerate(zip(self._parts, self._plans, strict=True)):
                given = list(self._inputs_of(index, values, held))
                mine = times[index : index + 1] if times else None
                if isinstance(part, DeviceExecutable):
                    held[index] = ending.enter_context(part.hold(n, given, self._direct.fetched[index], mine))
                    results = held[index].arrays
                    if index not in self._direct.lenders:
                        held[index].close()
                else:
                    results = part.run(n, given, mine)
                values.update(zip((port.name for port in plan.outputs), results, strict=True))
                self._release(index, values, held)
        return values

    def _inputs_of(self, index: int, values: Mapping[str, Any], held: Mapping[int, HeldRun]) -> Iterator[Any]:
        """The inputs of part `index`: arrays, or `Resident` for values that it reads from another device."""
        for port in self._plans[index].inputs:
            if port.name in self._direct.taken[index]:
                maker = self._direct.makers[port.name]
                place = [output.name for output in self._plans[maker].outputs].index(port.name)
                yield held[maker].resident[place]
            else:
                yield values[port.name]

    def _release(self, index: int, values: dict[str, Any], held: Mapping[int, HeldRun]) -> None:
        """After part `index`: delete the arrays, and free the device values, that no later part reads."""
        for maker in self._direct.ending[index]:
            held[maker].close()
        for name in self._last_reads[index]:
            del values[name]

    def _outputs(self, values: Mapping[str, Any]) -> list[Any]:
        """The model's outputs; arrays among them share no memory with an array of the caller or another output."""
        passed = {*self._wiring.inputs, *self._wiring.constants, *self._wiring.states}
        results = []
        for name in self._wiring.outputs:
            value = values[name]
            results.append(value.copy() if name in passed and isinstance(value, np.ndarray) else value)
            passed.add(name)
        return results

    def set_state(self, name: str, array: NDArray[Any]) -> None:
        """Set a state to a copy of `array`.

        KeyError for an unknown name; ValueError unless `array` has the dtype and shape of the state.
        """
        if name in self._states:
            current = self._states[name]
            if (array.dtype, array.shape) != (current.dtype, current.shape):
                expected, got = (f"{each.dtype}{list(each.shape)}" for each in (current, array))
                raise ValueError(f"state '{name}': expected {expected}, got {got}")
            with self._state_lock:
                self._states[name] = np.array(array)
        else:
            self._owner(name).set_state(name, array)

    def state(self, name: str) -> NDArray[Any]:
        """A copy of a state's current value; KeyError for an unknown name."""
        if name not in self._states:
            return self._owner(name).state(name)
        with self._state_lock:
            return self._states[name].copy()

    def _owner(self, name: str) -> Runner:
        for part, plan in zip(self._parts, self._plans, strict=True):
            if any(port.name == name for port in plan.states):
                return part
        names = [*self._states, *(port.name for plan in self._plans for port in plan.states)]
        raise KeyError(f"state '{name}' is unknown, the states are: {', '.join(names) or 'none'}")

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
        return settle_all(self._parts, timeout)

    def close(self) -> None:
        for part in self._parts:
            part.close()
