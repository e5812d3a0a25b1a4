"""Where the states of a training step live: parameters, moments, averages. All code for it works on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from core.compiler import executable, host_executable
from core.errors import LatheError, SessionClosed, UnsupportedError
from core.ir.graph import Array, Graph
from core.options import Options
from core.plan.plan import Fallback, Step
from core.runtime.device_executable import DeviceExecutable
from core.runtime.devices import HOST, find_device
from core.runtime.given import Binding
from core.runtime.placed import Placed
from core.runtime.room import Block
from core.runtime.runner import Runner
from core.runtime.session import BatchInfo

_NAMED = 3  # nodes that a message names


class Home(Protocol):
    """States by name."""

    def runner(
        self, graph: Graph, options: Options, batching: BatchInfo, binding: Binding, names: Mapping[str, str]
    ) -> Runner:
        """Code for the graph, each of whose states lives here under the name that `names` gives it."""
        ...

    def read(self, name: str) -> Array:
        """The value a state has now: the very array on the host, a copy from anywhere else."""
        ...

    def write(self, name: str, array: Array) -> None:
        """Give a state its value, of the type that it has."""
        ...

    def spoil(self) -> None:
        """A run has failed, which may have changed states: those want to be written again before they are read."""
        ...

    def check(self) -> None:
        """LatheError while there are such states."""
        ...

    def close(self) -> None: ...


def home_of(states: Mapping[str, Array], options: Options) -> Home:
    """A home for states with these values. UnsupportedError where there is no such device."""
    if not options.devices:
        return HostHome(states)
    (device,) = options.devices
    find_device(device)
    return DeviceHome(device, states)


class HostHome:
    """Arrays that executables adopt."""

    def __init__(self, states: Mapping[str, Array]) -> None:
        self._states = dict(states)

    def runner(
        self, graph: Graph, options: Options, batching: BatchInfo, binding: Binding, names: Mapping[str, str]
    ) -> Runner:
        made = host_executable(graph, options, batching, binding)
        for state in graph.states:
            made.adopt_state(state.value.name, self._states[names[state.value.name]])
        return made

    def read(self, name: str) -> Array:
        return self._states[name]

    def write(self, name: str, array: Array) -> None:
        self._states[name][...] = array

    def spoil(self) -> None:
        """Here a node that refuses its data ends the run, and updates come last."""

    def check(self) -> None:
        """Nothing is ever spoiled here."""

    def close(self) -> None:
        """Arrays and code go with the last who has them."""


class DeviceHome:
    """Memory of a device. A state moves there when code that works on it is first made; what is made later adopts it
    there. Feeds travel to the device and losses back, states only when somebody asks for them."""

    def __init__(self, device: str, states: Mapping[str, Array]) -> None:
        self._device = device
        self._here = {name: np.array(array, order="C") for name, array in states.items()}  # not yet on the device
        self._keepers: dict[str, tuple[DeviceExecutable, str]] = {}  # with the name that a state has there
        self._made: list[DeviceExecutable] = []
        self._spoiled: set[str] = set()
        self._closed = False

    def runner(
        self, graph: Graph, options: Options, batching: BatchInfo, binding: Binding, names: Mapping[str, str]
    ) -> Runner:
        """UnsupportedError for a graph that the device has not all kernels for, DeviceMemoryError for one that it has
        no room for."""
        self._refuse_when_closed()
        ours = {state.value.name: names[state.value.name] for state in graph.states}
        adopted = {local: self._block(name) for local, name in ours.items() if name in self._keepers}
        made = executable(graph, options, batching, binding, adopted)
        part = _whole(made, self._device)
        self._made.append(part)
        for local, name in ours.items():
            if name not in self._keepers:
                part.set_state(local, self._here.pop(name))
                self._keepers[name] = (part, local)
        return made

    def _block(self, name: str) -> Block:
        keeper, there = self._keepers[name]
        return keeper.state_block(there)

    def read(self, name: str) -> Array:
        """LatheError where a run that failed may have changed it."""
        self._refuse_when_closed()
        if name in self._spoiled:
            self.check()
        if name in self._here:
            return self._here[name].copy()
        keeper, there = self._keepers[name]
        return keeper.state(there)

    def write(self, name: str, array: Array) -> None:
        self._refuse_when_closed()
        if name in self._here:
            self._here[name][...] = array
        else:
            keeper, there = self._keepers[name]
            keeper.set_state(there, array)
        self._spoiled.discard(name)

    def spoil(self) -> None:
        """Kernels of a device refuse data without ending the run: updates come after them all the same."""
        self._spoiled.update(self._keepers)

    def check(self) -> None:
        self._refuse_when_closed()
        if self._spoiled:
            raise LatheError(
                f"a run that failed on {self._device} may have changed the training's state: load it again"
            )

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise SessionClosed("the training step is closed")

    def close(self) -> None:
        """Free the device's memory. Runs and reads raise SessionClosed."""
        self._closed = True
        for part in reversed(self._made):
            part.close()


def _whole(made: Runner, device: str) -> DeviceExecutable:
    """The one part that does everything. UnsupportedError, naming nodes, where some of it would run elsewhere."""
    part = made.whole if isinstance(made, Placed) else None
    if isinstance(part, DeviceExecutable):
        return part
    plans = [share.plan for share in made.shares if share.device == HOST]
    nodes: list[Step | Fallback] = [step for plan in plans for step in plan.steps]
    nodes += [entry for plan in plans for entry in plan.schedule if isinstance(entry, Fallback)]
    strangers = [f"'{node.label}' ({node.op})" for node in nodes]
    made.close()
    named = ", ".join(strangers[:_NAMED]) or "values that are constant"
    more = f" and {len(strangers) - _NAMED} more" if len(strangers) > _NAMED else ""
    raise UnsupportedError(f"a training step runs on one device alone, and {device} has no kernel for {named}{more}")
