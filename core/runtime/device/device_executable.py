"""A plan on a device: the same steps, addresses and lifetimes as on the CPU, launched or replayed as one graph.

A run that is alone on the device does everything in one stream. Its graph includes the copies, so that it is one
launch. If other runs are in flight, a run uses three streams, which only wait where they must, so that its copies
overlap with the work of other runs; its graph then contains only the steps:

    copies in    staging -> inputs of a slot        then `arrived`
    work         after `arrived`: the steps         then `computed`
    copies out   after `computed`: outputs of a slot -> staging    then `done`

A slot is what one run in flight owns: pinned staging memory, and its inputs and outputs on the device. All slots share
one arena, because the work of one stream happens in order. A graph contains addresses, so it belongs to a slot and a
batch size. It is captured in the background when the slot has run the batch size twice. Until then the steps are
launched one by one: any batch size runs at once, exactly, without padding.

If weights and arena exceed the memory that the model may take, the plan has transfers: copies between the arena and
pinned memory of the host, beside the steps in two further streams (`Lanes`), with events where one waits for the other.
Graphs contain them. All transfers of a run have ended when its last step has, so runs share this memory, too.

Values that another device reads next need not come to the host: `hold` leaves outputs on the device, and inputs may lie
on another device (`Resident`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import DeviceError, DeviceMemoryError, FeedError, SessionClosed
from lathe.core.ir.dim import evaluate
from lathe.core.kernels.call import Status
from lathe.core.plan.plan import ARENA, FLAG_BYTES, WEIGHTS, Plan
from lathe.core.plan.transfers import Rates, boundaries, swapping_lines, transfers_at
from lathe.core.runtime.device.device import Device, Event
from lathe.core.runtime.device.device_states import DeviceStates
from lathe.core.runtime.device.device_timing import mean_nanoseconds
from lathe.core.runtime.device.upload import Uploader
from lathe.core.runtime.host.device_tape import (
    Copy,
    Generations,
    Graphs,
    Key,
    Lanes,
    Launch,
    Move,
    Tape,
    finish,
    grid_of,
    launch_one,
    play,
)
from lathe.core.runtime.host.host_copies import copy_in_pieces, copy_piece, pieces_of
from lathe.core.runtime.host.plan_memory import (
    SLOTS,
    DeviceBlock,
    PortLayout,
    Slot,
    StagingCopy,
    StagingLayout,
    memory_of_plan,
    merge_neighbours,
)
from lathe.core.runtime.host.resident_values import HeldRun, Resident
from lathe.core.runtime.host.swap_memory import SwapMemory
from lathe.core.runtime.session.background import Background
from lathe.core.runtime.session.explain import explain_plan
from lathe.core.runtime.session.runner import DeviceShare, StepTimes

if TYPE_CHECKING:
    from lathe.core.runtime.host.executable import Executable

GRAPHS = 64  # the most captured graphs: one per slot and batch size in use


@dataclass(frozen=True, slots=True)
class RunCopies:
    """The copies of a run: `into` the device from staging, `across` from other devices, `back` to staging."""

    into: Sequence[StagingCopy]
    across: Sequence[tuple[StagingCopy, Resident]]
    back: Sequence[StagingCopy]


def run_copies(layout: StagingLayout, across: Mapping[int, Resident], fetched: Container[int]) -> RunCopies:
    """The copies of a run between `layout`, the host's staging memory and the device.

    `across`: inputs, by position, that come from devices instead. `fetched`: positions of the outputs that are copied
    to the host. Kernels' flags are always copied in both directions.
    """
    return RunCopies(
        merge_neighbours([*(way for at, way in enumerate(layout.input_copies) if at not in across), layout.flags_copy]),
        [(layout.input_copies[at], given) for at, given in across.items()],
        merge_neighbours([layout.flags_copy, *(way for at, way in enumerate(layout.output_copies) if at in fetched)]),
    )


class DeviceExecutable:
    """Runs a plan whose every step has a kernel. Any number of threads may call `run`.

    `close` frees all memory once the last run in flight has ended.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        objects: Mapping[str, bytes],
        weights: Iterable[bytes | memoryview],
        max_batch: int = 1,
        adopted: Mapping[str, DeviceBlock] | None = None,
    ) -> None:
        """`weights`: the weight block in chunks. `adopted`: the memory of states that exist already, by name.

        DeviceMemoryError, with the plan's figures, if batches of `max_batch` need more memory than is free;
        ArtifactError for an object that is no code for this device.
        """
        self.plan = plan
        self.device = device
        self._check_memory(max_batch, adopted or {})
        self._ports = PortLayout(plan)
        self._arena = DeviceBlock(device)
        self._weights = DeviceBlock(device)
        self._swap = SwapMemory(plan, device)
        self._states = DeviceStates(plan, device, adopted or {})
        with ExitStack() as undoing:
            self._module = undoing.enter_context(closing(device.load(objects)))
            symbols = dict.fromkeys(symbol for step in plan.steps for symbol in step.symbols)
            self._functions = {symbol: self._module.function(symbol) for symbol in symbols}
            streams = [undoing.enter_context(closing(device.stream())) for _ in range(4)]
            self._copy_in, self._work, self._copy_out, self._capture = streams
            transfers = len(plan.transfers)
            self._lanes = undoing.enter_context(closing(Lanes(device, self._work, transfers)))
            self._capture_lanes = undoing.enter_context(closing(Lanes(device, self._capture, transfers)))
            slots = (Slot(device, index, plan, self._ports) for index in range(SLOTS))
            self._slots = [undoing.enter_context(closing(slot)) for slot in slots]
            undoing.pop_all()
        self._every_output = range(len(plan.outputs))
        self._free = list(self._slots)
        self._changed = threading.Condition()
        self._closed = self._released = False
        self._order = threading.Lock()  # held while one run is submitted to the streams
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

    def _check_memory(self, rows: int, adopted: Container[str]) -> None:
        free, room = self.device.memory().free, memory_of_plan(self.plan, rows, adopted)
        if room.total > free:
            fewer = (2**k for k in range(rows.bit_length()))
            fitting = [few for few in fewer if memory_of_plan(self.plan, few, adopted).total <= free]
            hint = f"; batches of {fitting[-1]} would fit" if fitting else ""
            hint += "; compiled with a smaller device_memory it swaps with the host"
            raise DeviceMemoryError(f"the model needs {room}, {self.device.name} has {free} free{hint}")

    def _allocate(self, rows: int) -> None:
        self._weights.fit(self.plan.resident)
        self._fit_arena(rows)
        self._states.allocate()
        for slot in self._slots:
            slot.fit(max(rows, 1))

    def _upload(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Copy the weight block to the device, and those weights that are streamed to pinned memory of the host."""
        uploader = Uploader(self.device, self._copy_in)
        uploader.put(self._weights.address, self._swap.keep_end(chunks))
        uploader.close()

    # -- states -----------------------------------------------------------------------------------------------------

    def set_state(self, name: str, array: NDArray[Any]) -> None:
        """Set the value of the state `name`.

        KeyError for an unknown name; ValueError unless `array` has the dtype and shape of the state.
        """
        self.plan.state_port(name, array)
        with self._order:
            self._states.write(name, array, self._work)

    def state_block(self, name: str) -> DeviceBlock:
        """The device memory of the state `name`, which another executable may adopt."""
        return self._states.block(name)

    def state(self, name: str) -> NDArray[Any]:
        """A copy of a state's current value; KeyError for an unknown name."""
        self.plan.state_port(name)
        with self._order:
            return self._states.read(name, self._work)

    # -- a run ------------------------------------------------------------------------------------------------------

    def run(self, n: int, inputs: Sequence[NDArray[Any]], times: Sequence[StepTimes] | None = None) -> list[Any]:
        """Outputs in the model's order, freshly allocated. `inputs` are contiguous arrays of the declared types.

        `times`: a list of one `StepTimes`, to which the time of each step is added. FeedError for a batch that needs
        more memory than the device has or more rows than kernels reach, and for data that a kernel refuses; DeviceError
        if the device failed; SessionClosed after `close`. Waits while both slots are in use.
        """
        slot = self._acquire_slot(n)
        try:
            return self._run_in(slot, n, inputs, self._every_output, times)
        finally:
            self._release_slot(slot)

    def hold(
        self, n: int, inputs: Sequence[Any], fetched: Container[int], times: Sequence[StepTimes] | None = None
    ) -> HeldRun:
        """As `run`, but inputs may be `Resident`, and only outputs at positions in `fetched` are copied to the host.

        All outputs stay on the device until the caller closes the result; `arrays` of the result has None in place of
        those not fetched.
        """
        slot = self._acquire_slot(n)
        try:
            arrays = self._run_in(slot, n, inputs, fetched, times)
        except BaseException:
            self._release_slot(slot)
            raise
        return HeldRun(arrays, slot.layout(n).residents, lambda: self._release_slot(slot))

    def _run_in(
        self, slot: Slot, n: int, inputs: Sequence[Any], fetched: Container[int], times: Sequence[StepTimes] | None
    ) -> list[Any]:
        try:
            return self._run(slot, slot.layout(n), n, inputs, fetched, times[0] if times else None)
        except DeviceMemoryError as error:
            raise FeedError(f"a batch of {n} needs {memory_of_plan(self.plan, n)}: {error}") from error

    def _run(
        self,
        slot: Slot,
        layout: StagingLayout,
        n: int,
        inputs: Sequence[Any],
        fetched: Container[int],
        times: StepTimes | None,
    ) -> list[Any]:
        """The outputs at positions in `fetched`, None in place of the others."""
        across = {at: given for at, given in enumerate(inputs) if type(given) is Resident}
        every = fetched is self._every_output or all(at in fetched for at in self._every_output)
        layout.flags[...] = Status.OK
        whole = every and not across and times is None
        if whole and layout.is_large:
            return self._run_in_pieces(slot, layout, n, inputs)
        self._stage(layout, inputs)
        if times is not None:
            self._run_timed(slot, run_copies(layout, across, fetched), layout, n, times)
        else:
            with self._order:
                self._fit_arena(n)
                if whole and self._is_alone:
                    self._submit_whole(slot, layout, n)
                else:
                    self._submit_in_streams(slot, run_copies(layout, across, fetched), n)
            slot.done.synchronize()
        self._check_flags(layout.flags)
        return [array.copy() if at in fetched else None for at, array in enumerate(layout.outputs)]

    def _stage(self, layout: StagingLayout, inputs: Sequence[Any]) -> None:
        """Copy the inputs that are arrays into staging memory."""
        for place, given in zip(layout.inputs, inputs, strict=True):
            if not isinstance(given, Resident):
                place[...] = given

    def _run_timed(self, slot: Slot, moves: RunCopies, layout: StagingLayout, n: int, times: StepTimes) -> None:
        """Run step by step, and add the steps' times to `times`, by the host's clock, so that the run ends now."""
        alone = self._step_nanoseconds(slot, n)
        with self._order:
            self._fit_arena(n)
            stamps = self._submit_in_streams(slot, moves, n, timed=True)
        slot.done.synchronize()
        gaps = np.diff([stamp.since(stamps[0]) for stamp in stamps])
        steps = [gap if each is None else each for gap, each in zip(gaps, alone, strict=True)]
        taken = np.cumsum([0, *steps], dtype=np.int64)
        times.add_steps(0, taken + (perf_counter_ns() - int(taken[-1])))
        for stamp in stamps:
            stamp.close()

    def _run_in_pieces(self, slot: Slot, layout: StagingLayout, n: int, inputs: Sequence[Any]) -> list[Any]:
        """A run with large inputs or outputs: pieces travel while several threads copy others from and to staging.

        The copies are in streams of their own, so they overlap with other runs as well.
        """
        for place, given, way in zip(layout.inputs, inputs, layout.input_copies, strict=True):
            for begin, end in copy_in_pieces(place, given):
                self._copy_in.copy_in(way.device + begin, way.host + begin, end - begin)
        for way in merge_neighbours([layout.flags_copy]):
            self._copy_in.copy_in(way.device, way.host, way.nbytes)
        self._copy_in.record(slot.arrived)
        pieces = [(at, *piece) for at, array in enumerate(layout.outputs) for piece in pieces_of(array.nbytes)]
        events = slot.piece_events(len(pieces))
        with self._order:
            self._fit_arena(n)
            self._work.wait(slot.arrived)
            self._replay_or_launch(play, Key(slot.index, n, whole=False), slot)
            self._work.record(slot.computed)
            self._copy_out.wait(slot.computed)
            for way in merge_neighbours([layout.flags_copy]):
                self._copy_out.copy_out(way.host, way.device, way.nbytes)
            for (at, begin, end), event in zip(pieces, events, strict=True):
                way = layout.output_copies[at]
                self._copy_out.copy_out(way.host + begin, way.device + begin, end - begin)
                self._copy_out.record(event)
            self._copy_out.record(slot.done)
        results = _copied_in_pieces(layout.outputs, pieces, events)
        slot.done.synchronize()
        self._check_flags(layout.flags)
        return results

    def _check_flags(self, flags: NDArray[np.int32]) -> None:
        if not flags.size:
            return
        for step in self.plan.steps if flags.any() else ():
            status = flags[step.flag * FLAG_BYTES // 4] if step.flag is not None else Status.OK
            if status:
                reason = Status(status).name.lower().replace("_", " ")
                raise FeedError(f"node '{step.label}' ({step.op}): {reason}")

    def _fit_arena(self, n: int) -> None:
        nbytes = self.plan.arena.at(self.plan.address_rows(n))
        if nbytes > self._arena.nbytes:
            self._work.synchronize()  # no unfinished work may use the memory that is freed
            self._arena.fit(nbytes)
            self._swap.fit(n)

    @property
    def _is_alone(self) -> bool:
        return len(self._free) == len(self._slots) - 1

    def _submit_whole(self, slot: Slot, layout: StagingLayout, n: int) -> None:
        """Submit a run that is alone on the device, with its copies.

        It is one graph launch, or a launch per step while there is no graph.
        """

        def work(tape: Tape, lanes: Lanes) -> None:
            for way in layout.into:
                lanes.work.copy_in(way.device, way.host, way.nbytes)
            play(tape, lanes)
            for way in layout.back:
                lanes.work.copy_out(way.host, way.device, way.nbytes)

        self._replay_or_launch(work, Key(slot.index, n, whole=True), slot)
        self._work.record(slot.done)

    def _submit_in_streams(self, slot: Slot, moves: RunCopies, n: int, timed: bool = False) -> list[Event]:
        """Submit the copies and the steps separately.

        If another run is in flight, each direction has its own stream, so that copies overlap with its work. Returns
        the events before and after every step if `timed`, otherwise an empty list.
        """
        alone = self._is_alone
        before, after = (self._work, self._work) if alone else (self._copy_in, self._copy_out)
        for way in moves.into:
            before.copy_in(way.device, way.host, way.nbytes)
        for way, given in moves.across:
            before.copy_from(way.device, given.device, given.address, min(way.nbytes, given.nbytes))
        if not alone and (moves.into or moves.across):
            before.record(slot.arrived)
            self._work.wait(slot.arrived)
        stamps: list[Event] = []
        if timed:
            stamps = self._launch_timed(self._tape(slot, n))
        else:
            self._replay_or_launch(play, Key(slot.index, n, whole=False), slot)
        if not alone:
            self._work.record(slot.computed)
            after.wait(slot.computed)
        for way in moves.back:
            after.copy_out(way.host, way.device, way.nbytes)
        after.record(slot.done)
        return stamps

    def _replay_or_launch(self, work: Callable[[Tape, Lanes], None], key: Key, slot: Slot) -> None:
        """Replay the graph captured for `key`, or submit `work` step by step while there is none.

        If the key is frequent enough, the capture of a graph is started in the background.
        """
        generations = self._generations(slot)
        graph = self._graphs.find(key, generations)
        if graph is not None:
            self._work.replay(graph)
            return
        tape = self._tape(slot, key.n)
        if self._graphs.is_wanted(key):
            self._background.submit(
                lambda: self._capture_graph(key, lambda: work(tape, self._capture_lanes), generations)
            )
        work(tape, self._lanes)

    def _generations(self, slot: Slot) -> Generations:
        return self._arena.generation, slot.memory.generation, self._swap.generation

    def _capture_graph(self, key: Key, work: Callable[[], None], generations: Generations) -> None:
        """In the background: capture what `work` submits as the graph for `key`.

        If that fails, steps are still launched one by one, and `explain` says why.
        """
        try:
            graph = self._capture.capture(work)
        except DeviceError as error:
            self._note = f"no graph was captured for n = {key.n}: {error}"
            return
        with self._order:
            self._graphs.add(key, graph, generations)

    def nanoseconds(self, n: int, replays: int = 20) -> int:
        """The nanoseconds that all steps of a batch of `n` take on the device, without copies and the host.

        It is the mean over `replays` repetitions in a row. ValueError for a plan with states, which repetitions would
        change.
        """
        if self.plan.states:
            raise ValueError("the steps of a plan with states cannot be repeated to be timed")
        slot = self._acquire_slot(n)
        try:
            with self._order:
                self._fit_arena(n)
                slot.layout(n)
                tape = self._tape(slot, n)
                return mean_nanoseconds(self.device, self._work, lambda: play(tape, self._lanes), replays)
        finally:
            self._release_slot(slot)

    def _step_nanoseconds(self, slot: Slot, n: int) -> list[int | None]:
        """The mean nanoseconds of every step, launched repeatedly by itself; the results in memory are meaningless.

        None for a step that touches a state, which a repetition would change. The caller makes the real run afterwards.
        """
        with self._order:
            self._fit_arena(n)
            tape, states = self._tape(slot, n), self._states.bases
            return [
                None
                if any(operand.base in states for operand in step.operands)
                else mean_nanoseconds(self.device, self._work, partial(launch_one, launch, n, self._work))
                for step, launch in zip(self.plan.steps, tape.launches, strict=True)
            ]

    def _launch_timed(self, tape: Tape) -> list[Event]:
        """Launch all steps, then the copies; returns a timed event for the start and one for the end of each step.

        The caller closes the events.
        """
        stamps = [self.device.event(timed=True) for _ in range(len(self.plan.steps) + 1)]
        self._work.record(stamps[0])
        for index, (launch, stamp) in enumerate(zip(tape.launches, stamps[1:], strict=True)):
            if tape.moves:
                self._lanes.cross(tape.boundaries[index], tape.moves)
            launch_one(launch, tape.n, self._work)
            self._work.record(stamp)
        finish(tape, self._lanes)
        return stamps

    # -- addresses --------------------------------------------------------------------------------------------------

    def _tape(self, slot: Slot, n: int) -> Tape:
        rows, bases = self.plan.address_rows(n), self._bases(slot, n)
        launches = tuple(
            Launch(
                self._functions[step.symbol],
                grid_of(step.grid, n),
                tuple(bases[operand.base] + operand.offset.at(rows) for operand in step.operands),
            )
            for step in (step.at(n) for step in self.plan.steps)
        )
        transfers = transfers_at(self.plan, n)
        hosts = {WEIGHTS: self._swap.weights, self.plan.swap_base: self._swap.values}
        moves = tuple(
            Move(
                each.into,
                self._arena.address + each.arena.at(rows),
                hosts[each.host.base] + each.host.offset.at(rows),
                each.nbytes.at(n),
            )
            for each in transfers
        )
        order = boundaries([(each.begin, each.end) for each in transfers], len(launches)) if moves else ()
        return Tape(launches, self._copies(bases, n), n, moves, tuple(order))

    def _bases(self, slot: Slot, n: int) -> dict[int, int]:
        rows = max(n, 1)
        fixed = {ARENA: self._arena.address, WEIGHTS: self._weights.address}
        ports = {base: slot.memory.address + at.at(rows) for base, at in self._ports.offsets.items()}
        return fixed | self._states.bases | ports

    def _copies(self, bases: Mapping[int, int], n: int) -> tuple[Copy, ...]:
        """The copies at the end of a run for results that lie elsewhere: first to outputs, then to states."""
        outputs: list[Copy] = []
        updates: list[Copy] = []
        for name, base in self.plan.copies:
            address, type_ = self.plan.value_addresses[name]
            nbytes = evaluate(type_.nbytes, {"n": n})
            copy = Copy(bases[base], bases[address.base] + address.offset.at(self.plan.address_rows(n)), nbytes)
            (updates if base in self._states.bases else outputs).append(copy)
        return (*outputs, *self._states.ordered(updates))

    # -- life -------------------------------------------------------------------------------------------------------

    @property
    def hosts(self) -> tuple[Executable, ...]:
        return ()

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        return (DeviceShare(self.device.name, self.plan, 1, self.device.peaks),)

    def explain(self, n: int) -> list[str]:
        peaks = self.device.peaks()
        lines = explain_plan(self.plan, n, peaks, self.device.name)
        with self._order:
            made = list(self._graphs.made)
        known = [
            f"{', '.join(str(n) for n in sorted({key.n for key in made if key.whole is whole}))} {what}"
            for whole, what in ((True, "with copies"), (False, "beside copies"))
            if any(key.whole is whole for key in made)
        ]
        lines += swapping_lines(self.plan, n, Rates(peaks.flops, peaks.bandwidth))
        graphs = f"graphs: captured for {'; '.join(known) or 'no batch size yet'}"
        return [*lines, graphs, *([self._note] if self._note else [])]

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until no CUDA graph is being captured: True. False after `timeout` seconds (None: no limit)."""
        return self._background.settle(timeout)

    def close(self) -> None:
        """Free everything, now or when the last run ends. Further runs raise SessionClosed."""
        self._background.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._release()

    def _acquire_slot(self, n: int) -> Slot:
        """Wait for a free slot. FeedError for more rows than kernels reach, SessionClosed after `close`."""
        if self.plan.max_rows is not None and n > self.plan.max_rows:
            raise FeedError(f"a batch of {n} is more than kernels on {self.device.name} reach: {self.plan.max_rows}")
        with self._changed:
            if not self._free:
                self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise SessionClosed("the session is closed")
            return self._free.pop()

    def _release_slot(self, slot: Slot) -> None:
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
        blocks = (self._arena, self._weights, self._swap, self._states)
        streams = (self._lanes, self._capture_lanes, self._copy_in, self._work, self._copy_out, self._capture)
        ends = [part.close for parts in (streams, self._slots, blocks) for part in parts]
        for close in (self._graphs.close, *ends, self._module.close):
            with suppress(DeviceError):  # after a fault every call fails, and the memory is lost anyway
                close()


def _copied_in_pieces(
    arrays: Sequence[NDArray[Any]], pieces: Sequence[tuple[int, int, int]], events: Sequence[Event]
) -> list[NDArray[Any]]:
    """Copies of arrays in staging memory, by several threads: each piece is copied when its event says it is there.

    A piece is the position of its array, and the first and last byte. All copies have ended when this returns.
    """
    results = [np.empty_like(array) for array in arrays]
    copies = []
    try:
        for (at, begin, end), event in zip(pieces, events, strict=True):
            event.synchronize()
            copies.append(copy_piece(results[at], arrays[at], begin, end))
    finally:
        wait(copies)
    return results
