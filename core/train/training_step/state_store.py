"""The state store of a training step: parameters, moments and averages, which all its executables share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from lathe.core.compiler.options import Options
from lathe.core.compiler.pipeline import compile_executable, compile_host_executable
from lathe.core.errors import LatheError, SessionClosed, UnsupportedError
from lathe.core.ir.graph import Array, Graph
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.plan.plan import Fallback, Step
from lathe.core.runtime.device.device_executable import DeviceExecutable
from lathe.core.runtime.device.devices import HOST, find_device
from lathe.core.runtime.host.plan_memory import DeviceBlock
from lathe.core.runtime.session.placed import PlacedRunner
from lathe.core.runtime.session.run_inputs import Binding
from lathe.core.runtime.session.runner import Runner

_MAX_NAMED = 3  # most nodes that a message names


class StateStore(Protocol):
    """Holds states by name, on the host or on a device."""

    def runner(
        self, graph: Graph, options: Options, batching: BatchInfo, binding: Binding, names: Mapping[str, str]
    ) -> Runner:
        """Compile the graph to work on the states of this store in place.

        `names` maps the names of the graph's states to those in the store. On a device, UnsupportedError if it lacks a
        kernel, DeviceMemoryError if its memory does not suffice, SessionClosed after `close`.
        """
        ...

    def read(self, name: str) -> Array:
        """The present value of a state: on the host the array itself, from a device a copy.

        LatheError while this state is invalid; on a device SessionClosed after `close`.
        """
        ...

    def write(self, name: str, array: Array) -> None:
        """Overwrite a state by the elements of `array`, of its shape and dtype; the state is valid then."""
        ...

    def invalidate(self) -> None:
        """Note that a run failed and may have changed states on a device: they must be written before they are read."""
        ...

    def check(self) -> None:
        """LatheError while some state is invalid; on a device SessionClosed after `close`."""
        ...

    def close(self) -> None:
        """Free the memory of a device; on the host there is nothing to do."""
        ...


def make_state_store(states: Mapping[str, Array], options: Options) -> StateStore:
    """A store with these states, on the device that the options name; on the host it uses the arrays in place.

    UnsupportedError if the device does not exist.
    """
    if not options.devices:
        return HostStateStore(states)
    (device,) = options.devices
    find_device(device)
    return DeviceStateStore(device, states)


class HostStateStore:
    """States on the host, in the given NumPy arrays, which executables update in place."""

    def __init__(self, states: Mapping[str, Array]) -> None:
        self._states = dict(states)

    def runner(
        self, graph: Graph, options: Options, batching: BatchInfo, binding: Binding, names: Mapping[str, str]
    ) -> Runner:
        made = compile_host_executable(graph, options, batching, binding)
        for state in graph.states:
            made.adopt_state(state.value.name, self._states[names[state.value.name]])
        return made

    def read(self, name: str) -> Array:
        return self._states[name]

    def write(self, name: str, array: Array) -> None:
        self._states[name][...] = array

    def invalidate(self) -> None:
        """Does nothing: a node that fails on the host ends the run, and updates come last in a run."""

    def check(self) -> None:
        """Does nothing: states on the host never become invalid."""

    def close(self) -> None:
        """Does nothing: the garbage collector frees arrays and executables."""


class DeviceStateStore:
    """States in the memory of a device.

    A state is copied to the device when the first executable that uses it is compiled; later executables share that
    copy. Runs copy only feeds to the device, and losses and outputs back. `read` copies states back.
    """

    def __init__(self, device: str, states: Mapping[str, Array]) -> None:
        self._device = device
        self._on_host = {name: np.array(array, order="C") for name, array in states.items()}  # not yet on the device
        self._owners: dict[str, tuple[DeviceExecutable, str]] = {}  # the executable, and the state's name in it
        self._executables: list[DeviceExecutable] = []
        self._invalid: set[str] = set()
        self._closed = False

    def runner(
        self, graph: Graph, options: Options, batching: BatchInfo, binding: Binding, names: Mapping[str, str]
    ) -> Runner:
        """Compile the graph for the device, to work on the states of this store in place; `names` as for `StateStore`.

        UnsupportedError if the device lacks a kernel, DeviceMemoryError if its memory does not suffice, SessionClosed
        after `close`.
        """
        self._refuse_when_closed()
        ours = {state.value.name: names[state.value.name] for state in graph.states}
        shared = {local: self._block(name) for local, name in ours.items() if name in self._owners}
        made = compile_executable(graph, options, batching, binding, shared)
        part = _single_part(made, self._device)
        self._executables.append(part)
        for local, name in ours.items():
            if name not in self._owners:
                part.set_state(local, self._on_host.pop(name))
                self._owners[name] = (part, local)
        return made

    def _block(self, name: str) -> DeviceBlock:
        owner, name_there = self._owners[name]
        return owner.state_block(name_there)

    def read(self, name: str) -> Array:
        """A copy of a state. LatheError if a failed run may have changed it, SessionClosed after `close`."""
        self._refuse_when_closed()
        if name in self._invalid:
            self.check()
        if name in self._on_host:
            return self._on_host[name].copy()
        owner, name_there = self._owners[name]
        return owner.state(name_there)

    def write(self, name: str, array: Array) -> None:
        self._refuse_when_closed()
        if name in self._on_host:
            self._on_host[name][...] = array
        else:
            owner, name_there = self._owners[name]
            owner.set_state(name_there, array)
        self._invalid.discard(name)

    def invalidate(self) -> None:
        """Mark all states on the device as invalid.

        A kernel on a device that refuses its data does not end the run, so updates run even after a failure.
        """
        self._invalid.update(self._owners)

    def check(self) -> None:
        self._refuse_when_closed()
        if self._invalid:
            raise LatheError(
                f"a failed run on {self._device} may have changed the state of the training: load the state again"
            )

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise SessionClosed("the training step is closed")

    def close(self) -> None:
        """Free the memory of the device. Later runs and reads raise SessionClosed."""
        self._closed = True
        for part in reversed(self._executables):
            part.close()


def _single_part(runner: Runner, device: str) -> DeviceExecutable:
    """The executable in `runner` that runs the whole graph on the device.

    UnsupportedError if some nodes would run on the host; it names the first ones, and the runner is closed.
    """
    part = runner.whole if isinstance(runner, PlacedRunner) else None
    if isinstance(part, DeviceExecutable):
        return part
    plans = [share.plan for share in runner.shares if share.device == HOST]
    nodes: list[Step | Fallback] = [step for plan in plans for step in plan.steps]
    nodes += [entry for plan in plans for entry in plan.schedule if isinstance(entry, Fallback)]
    host_nodes = [f"'{node.label}' ({node.op})" for node in nodes]
    runner.close()
    named = ", ".join(host_nodes[:_MAX_NAMED]) or "constant values"
    more = f" and {len(host_nodes) - _MAX_NAMED} more" if len(host_nodes) > _MAX_NAMED else ""
    raise UnsupportedError(f"a training step runs on one device only, and {device} has no kernel for {named}{more}")
