"""A plan on a device: the same steps, addresses and lifetimes as on the CPU, launched or replayed as one graph.

A run alone does everything in one stream. Where others are in flight it uses three, which only wait where they must, so
that its copies go beside their work:

    copies in    staging -> inputs of a slot        then `arrived`
    work         after `arrived`: the steps         then `computed`
    copies out   after `computed`: outputs of a slot -> staging    then `done`

A slot is what one run in flight owns: pinned staging, and its inputs and outputs on the device. All share one arena,
since work of one stream happens in order. A graph holds addresses, so it belongs to a slot and a batch size; it is
captured in the background once a size came twice, and until then the steps are launched one by one: any batch size
runs at once, exactly, without padding.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import DeviceError, DeviceMemoryError, FeedError, SessionClosed
from core.ir.dim import evaluate
from core.kernels.catalog import Status
from core.plan.liveness import Affine, aligned
from core.plan.plan import ARENA, FLAG_BYTES, WEIGHTS, Plan, Port
from core.runtime.background import Background
from core.runtime.device import Device, Event
from core.runtime.explain import explain_plan
from core.runtime.memory import address_of
from core.runtime.room import SLOTS, Block, Form, Ports, Slot, port_array, port_bytes, room_of
from core.runtime.runner import Share, Times
from core.runtime.tape import Copy, Generations, Graphs, Key, Launch, Tape, grid_of, launch_one, play
from core.runtime.upload import Uploader

GRAPHS = 64  # captured at most: batch sizes in use, for each slot


class DeviceExecutable:
    """Runs a plan whose every step has a kernel. Any number of threads may call `run`; `close` frees all memory once
    the last run in flight has ended."""

    def __init__(
        self,
        plan: Plan,
        device: Device,
        objects: Mapping[str, bytes],
        weights: Iterable[bytes | memoryview],
        max_batch: int = 1,
    ) -> None:
        """DeviceMemoryError, with the plan's figures, where batches of `max_batch` take more than is free."""
        self.plan = plan
        self.device = device
        self._refuse_without_room(max_batch)
        self._module = device.load(objects)
        self._functions = [self._module.function(step.symbol) for step in plan.steps]
        self._in, self._work, self._out = device.stream(), device.stream(), device.stream()
        self._capture = device.stream()
        self._ports = Ports(plan)
        self._arena = Block(device)
        self._weights = Block(device)
        self._states = {port.base: Block(device) for port in plan.states}
        self._adopted: set[int] = set()  # bases of states whose memory others free
        self._aside = Block(device)
        self._slots = [Slot(device, index, plan, self._ports) for index in range(SLOTS)]
        self._free = list(self._slots)
        self._changed = threading.Condition()
        self._closed = self._released = False
        self._order = threading.Lock()  # held while one run is given to the streams
        self._graphs = Graphs(GRAPHS)
        self._background = Background()
        self._note = ""
        try:
            self._allocate(max_batch)
            self._upload(weights)
        except BaseException:
            self.close()
            raise

    # -- before the first run ---------------------------------------------------------------------------------------

    def _refuse_without_room(self, rows: int) -> None:
        free, room = self.device.memory().free, room_of(self.plan, rows)
        if room.total > free:
            fitting = [
                fewer for fewer in (2**k for k in range(rows.bit_length())) if room_of(self.plan, fewer).total <= free
            ]
            hint = f"; batches of {fitting[-1]} would fit" if fitting else ""
            raise DeviceMemoryError(f"the model needs {room}, {self.device.name} has {free} free{hint}")

    def _allocate(self, rows: int) -> None:
        self._weights.fit(self.plan.weights)
        self._arena.fit(self.plan.arena.at(rows))
        for port in self.plan.states:
            self._states[port.base].fit(port_bytes(port).at(1))
        for slot in self._slots:
            slot.fit(max(rows, 1))

    def _upload(self, chunks: Iterable[bytes | memoryview]) -> None:
        """The weight block."""
        uploader = Uploader(self.device, self._in)
        uploader.put(self._weights.address, chunks)
        uploader.close()

    # -- states -----------------------------------------------------------------------------------------------------

    def set_state(self, name: str, array: NDArray[Any]) -> None:
        """Give a state its value."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        stage = self.device.host_bytes(data.nbytes)
        stage[:] = data
        with self._order:
            self._work.copy_in(self._states[self._state_port(name).base].address, address_of(stage), stage.nbytes)
            self._work.synchronize()
        self.device.free_host(stage)

    def state_block(self, name: str) -> Block:
        """Where a state lives."""
        return self._states[self._state_port(name).base]

    def adopt_state(self, name: str, block: Block) -> None:
        """Before the first run: make a state live in the memory of another executable of this device, which takes
        turns with this one and is closed after it."""
        base = self._state_port(name).base
        self._states[base].close()
        self._states[base] = block
        self._adopted.add(base)

    def state(self, name: str) -> NDArray[Any]:
        """A copy of a state's present value."""
        port = self._state_port(name)
        stage = self.device.host_bytes(port_bytes(port).at(1))
        with self._order:
            self._work.copy_out(address_of(stage), self._states[port.base].address, stage.nbytes)
            self._work.synchronize()
        value = port_array(port, stage, 1).copy()
        self.device.free_host(stage)
        return value

    def _state_port(self, name: str) -> Port:
        return next(port for port in self.plan.states if port.name == name)

    # -- a run ------------------------------------------------------------------------------------------------------

    def run(self, n: int, inputs: Sequence[NDArray[Any]], times: Sequence[Times] | None = None) -> list[Any]:
        """Outputs in the model's order, freshly allocated. `inputs` are contiguous arrays of the right types.

        `times`, when given, holds one that receives what every step took. FeedError for a batch that the device has no
        room for, DeviceError where the device failed.
        """
        if self.plan.most_rows is not None and n > self.plan.most_rows:
            raise FeedError(f"a batch of {n} is more than kernels on {self.device.name} reach: {self.plan.most_rows}")
        slot = self._take()
        try:
            return self._run(slot, n, inputs, times[0] if times else None)
        except DeviceMemoryError as error:
            raise FeedError(f"a batch of {n} needs {room_of(self.plan, n)}: {error}") from error
        finally:
            self._give(slot)

    def _run(self, slot: Slot, n: int, inputs: Sequence[NDArray[Any]], times: Times | None) -> list[Any]:
        form = slot.form(n)
        for place, array in zip(form.inputs, inputs, strict=True):
            place[...] = array
        form.flags[...] = Status.OK
        with self._order:
            self._fit_arena(self.plan.arena.at(max(n, 1)))
            stamps = self._give_to_streams(slot, form, n, times is not None)
        slot.done.synchronize()
        if form.flags.size:
            self._refuse_what_kernels_refused(form.flags)
        if times is not None:
            times.steps += np.diff([stamp.since(stamps[0]) for stamp in stamps])
            for stamp in stamps:
                stamp.close()
        return [array.copy() for array in form.outputs]

    def _refuse_what_kernels_refused(self, flags: NDArray[np.int32]) -> None:
        for step in self.plan.steps if flags.any() else ():
            status = flags[step.flag * FLAG_BYTES // 4] if step.flag is not None else Status.OK
            if status:
                reason = Status(status).name.lower().replace("_", " ")
                raise FeedError(f"node '{step.label}' ({step.op}): {reason}")

    def _fit_arena(self, nbytes: int) -> None:
        if nbytes > self._arena.nbytes:
            self._work.synchronize()  # nothing may still use what is given back
            self._arena.fit(nbytes)

    def _give_to_streams(self, slot: Slot, form: Form, n: int, timed: bool) -> list[Event]:
        """Each way on a stream of its own where another run is in flight, to go beside its work; else all on one, which
        takes fewer calls."""
        alone, into, back = len(self._free) == len(self._slots) - 1, form.into, form.back
        before, after = (self._work, self._work) if alone else (self._in, self._out)
        if into.nbytes:
            before.copy_in(into.device, into.host, into.nbytes)
            if not alone:
                before.record(slot.arrived)
                self._work.wait(slot.arrived)
        stamps = self._timed(self._tape(slot, n)) if timed else self._compute(slot, n)
        if not alone:
            self._work.record(slot.computed)
            after.wait(slot.computed)
        if back.nbytes:
            after.copy_out(back.host, back.device, back.nbytes)
        after.record(slot.done)
        return stamps

    def _compute(self, slot: Slot, n: int) -> list[Event]:
        """By the graph of this size, or step by step while there is none."""
        key = (slot.index, n)
        graph = self._graphs.find(key, self._generations(slot))
        if graph is not None:
            self._work.replay(graph)
            return []
        tape = self._tape(slot, n)
        if self._graphs.is_wanted(key):
            generations = self._generations(slot)
            self._background.submit(lambda: self._make_graph(key, tape, generations))
        play(tape, self._work)
        return []

    def _generations(self, slot: Slot) -> Generations:
        return self._arena.generation, slot.memory.generation

    def _make_graph(self, key: Key, tape: Tape, generations: Generations) -> None:
        """In the background. Where it fails, steps go on being launched, and `explain` says why."""
        try:
            graph = self._capture.capture(lambda: play(tape, self._capture))
        except DeviceError as error:
            self._note = f"no graph was captured for n = {tape.n}: {error}"
            return
        with self._order:
            self._graphs.add(key, graph, generations)

    def _timed(self, tape: Tape) -> list[Event]:
        """Launch with an event before and after every step."""
        stamps = [self.device.event(timed=True) for _ in range(len(self.plan.steps) + 1)]
        self._work.record(stamps[0])
        for launch, stamp in zip(tape.launches, stamps[1:], strict=True):
            launch_one(launch, tape.n, self._work)
            self._work.record(stamp)
        play(Tape((), tape.copies, tape.n), self._work)
        return stamps

    # -- addresses --------------------------------------------------------------------------------------------------

    def _tape(self, slot: Slot, n: int) -> Tape:
        rows, bases = max(n, 1), self._bases(slot, n)
        launches = tuple(
            Launch(
                function,
                grid_of(step.grid, n),
                tuple(bases[operand.base] + operand.offset.at(rows) for operand in step.operands),
            )
            for function, step in zip(self._functions, self.plan.steps, strict=True)
        )
        return Tape(launches, self._copies(bases, n), n)

    def _bases(self, slot: Slot, n: int) -> dict[int, int]:
        rows = max(n, 1)
        fixed = {ARENA: self._arena.address, WEIGHTS: self._weights.address}
        states = {base: block.address for base, block in self._states.items()}
        return fixed | states | {base: slot.memory.address + at.at(rows) for base, at in self._ports.offsets.items()}

    def _copies(self, bases: Mapping[int, int], n: int) -> tuple[Copy, ...]:
        """Results that lie elsewhere, to outputs and then to states. What a state held before goes aside first, in case
        that it is another state's next value."""
        outputs: list[Copy] = []
        updates: list[Copy] = []
        for name, base in self.plan.copies:
            address, type_ = self.plan.located[name]
            nbytes = evaluate(type_.nbytes, {"n": n})
            copy = Copy(bases[base], bases[address.base] + address.offset.at(max(n, 1)), nbytes)
            (updates if base in self._states else outputs).append(copy)
        return (*outputs, *self._through_aside(updates))

    def _through_aside(self, updates: Sequence[Copy]) -> list[Copy]:
        if len(updates) < 2:
            return list(updates)
        self._aside.fit(sum(aligned(Affine(b=copy.nbytes)).b for copy in updates))
        first, then, at = [], [], self._aside.address
        for copy in updates:
            first.append(Copy(at, copy.source, copy.nbytes))
            then.append(Copy(copy.target, at, copy.nbytes))
            at += aligned(Affine(b=copy.nbytes)).b
        return first + then

    # -- life -------------------------------------------------------------------------------------------------------

    @property
    def shares(self) -> tuple[Share, ...]:
        return (Share(self.device.name, self.plan, 1, self.device.peaks),)

    def explain(self, n: int) -> list[str]:
        lines = explain_plan(self.plan, n, self.device.peaks(), self.device.name)
        with self._order:
            sizes = sorted({n for _, n in self._graphs.made})
        known = ", ".join(map(str, sizes)) or "no batch size yet"
        return [*lines, f"graphs: captured for {known}", *([self._note] if self._note else [])]

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until no graph is being captured; whether that was so in time."""
        return self._background.settle(timeout)

    def close(self) -> None:
        """Free everything, now or when the last run ends. Further runs raise SessionClosed."""
        self._background.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._release()

    def _take(self) -> Slot:
        with self._changed:
            if not self._free:
                self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise SessionClosed("the session is closed")
            return self._free.pop()

    def _give(self, slot: Slot) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()
        if self._closed:
            self._release()

    def _release(self) -> None:
        with self._changed:
            if self._released or len(self._free) < len(self._slots):
                return
            self._released = True
        states = (block for base, block in self._states.items() if base not in self._adopted)
        blocks = (self._arena, self._weights, self._aside, *states)
        streams = (self._in, self._work, self._out, self._capture)
        ends = [part.close for parts in (streams, self._slots, blocks) for part in parts]
        for close in (self._graphs.close, *ends, self._module.close):
            with suppress(DeviceError):  # after a fault every call fails: what is lost is lost
                close()
