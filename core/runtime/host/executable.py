"""A plan with its code and weights in memory: runs any batch size, from any number of threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lathe.core.codegen.jit import Library
from lathe.core.errors import FeedError
from lathe.core.ir.dim import affine, is_never_negative
from lathe.core.ir.graph import Node, Value, node_reads
from lathe.core.ir.types import TensorType
from lathe.core.kernels.call import Status
from lathe.core.ops.opdef import registry
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import ARENA, FIRST_PORT, WEIGHTS, Address, Fallback, Plan, Port, Segment
from lathe.core.reference import bind_result_symbols, depends_on_feeds, run_node
from lathe.core.runtime.host.chunks import ChunkSizes, chunk_sizes, even_chunks, row_steps
from lathe.core.runtime.host.layouts import Layouts
from lathe.core.runtime.host.machine import peaks
from lathe.core.runtime.host.memory import address_of, aligned_words, array_at, return_to_system
from lathe.core.runtime.host.native_driver import SPIN_NS, ContextWord
from lathe.core.runtime.host.run_context import RUN_NUMBERS, Context, ContextPool
from lathe.core.runtime.host.thread_pool import thread_pool
from lathe.core.runtime.host.weight_sharing import DeduplicatedWeights
from lathe.core.runtime.session.explain import explain_plan
from lathe.core.runtime.session.prepared_calls import (
    Call,
    CallWithTail,
    ContextSetup,
    DynamicContextSetup,
    Run,
    Tail,
    out_of_memory_error,
)
from lathe.core.runtime.session.runner import DeviceShare, StepTimes

# Work (operations, see Plan.work) below which a run stays on the caller's thread. A sleeping worker takes 60 to 170
# microseconds to wake (measured), so a run shorter than about twice that gains nothing, and takes a processor away.
# When runs follow each other closely, the workers are still awake, and the run only has to outweigh the barriers.
_ONE_THREAD_BELOW = 48_000_000
_ONE_THREAD_BELOW_WHEN_AWAKE = 2_000_000
# Less than the whole spin time: a worker that is about to sleep would have to be woken anyway.
_WORKERS_AWAKE_NS = SPIN_NS * 4 // 5

# Plain integers: a member of an IntEnum costs a lookup each time, and a run of a tiny model takes microseconds.
_N, _FIRST, _LAST = int(ContextWord.N), int(ContextWord.FIRST), int(ContextWord.LAST)
_THREADS, _TIMES, _CLEARED = int(ContextWord.THREADS), int(ContextWord.TIMES), int(ContextWord.CLEARED)
_ARRAYS = int(ContextWord.ARRAY_COUNT)


class Executable:
    """A plan with its native code and weights in memory, ready to run on the host.

    Any number of threads may call `run`; runs of a plan with states take turns, and give the states their next values.
    `close` frees code, weights, states and arenas once the last run in flight has ended.
    """

    def __init__(
        self, plan: Plan, library: Library, weights: DeduplicatedWeights, threads: int, independent: bool = False
    ) -> None:
        """At most `threads` threads take part in a run, and no more than the plan has memory for.

        The executable owns `library`, and closes it. `independent`: no row of an output depends on another row of an
        input, so that a batch may run in chunks. States are empty until `set_state` or `adopt_state` is called.
        """
        self.plan = plan
        self.threads = threads = min(threads, plan.threads)
        self._library = library
        self._weights = weights
        self._functions = np.array([library.address(step.symbol) for step in plan.steps], np.int64)
        self._barriers = np.array([step.has_barrier for step in plan.steps], np.int64)
        self._starts = np.cumsum([0, *(len(step.operands) for step in plan.steps)], dtype=np.int64)
        operands = [operand for step in plan.steps for operand in step.operands]
        self._slots = np.array([self._slot(operand) for operand in operands], np.int64).reshape(-1)
        self._layouts = Layouts(plan, [(each.base, self._offset(each)) for each in operands]) if plan.sizes else None
        self._contexts = ContextPool(2 * threads + 2)
        self._guard = threading.Lock()  # of `_in_flight`
        self._states = {port.base: np.zeros(0, np.uint8) for port in plan.states}
        self._state_lock = threading.Lock()
        self._team = thread_pool(threads)
        self._work = plan.work
        self._shapes = [_shape_of(port) for port in plan.outputs]
        self._names = [port.name for port in plan.inputs]
        self._whole = (0, len(plan.steps))
        self._simple = len(plan.schedule) == 1 and isinstance(plan.schedule[0], Segment) and not plan.copies
        divisible = independent and self._simple and not plan.states and not plan.supposed
        self._chunks = chunk_sizes(plan, threads) if divisible else ChunkSizes()
        self._loops = [index for index, step in enumerate(plan.steps) if step.may_not_end]
        self.may_not_end = plan.may_not_end
        self._in_flight: set[Context] = set()  # only filled if runs may not end by themselves
        self._reference_node = {
            each.index: _reference_node(plan, each) for each in plan.schedule if isinstance(each, Fallback)
        }
        self._places = {name: _place_of(address, type_) for name, (address, type_) in plan.value_addresses.items()}
        self._outputs = {port.base: index for index, port in enumerate(plan.outputs)}
        self._row_steps = np.array([0] * FIRST_PORT + row_steps((*plan.inputs, *plan.states, *plan.outputs)))

    def set_state(self, name: str, array: NDArray[Any]) -> None:
        """Set the value of the state `name` to a copy of `array`. No run may be in flight.

        KeyError for an unknown name; ValueError unless `array` has the dtype and shape of the state.
        """
        port = self.plan.state_port(name, array)
        self._states[port.base] = np.array(array, copy=True, order="C")

    def adopt_state(self, name: str, array: NDArray[Any]) -> None:
        """Use `array` itself as the memory of the state `name`; other executables may use it in turn.

        No run may be in flight. KeyError for an unknown name; ValueError unless `array` has the dtype and shape of the
        state, is C-contiguous and may be written.
        """
        port = self.plan.state_port(name, array)
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError(f"state '{name}': expected a C-contiguous array that may be written")
        self._states[port.base] = array

    def state(self, name: str) -> NDArray[Any]:
        """A copy of a state's current value; KeyError for an unknown name."""
        port = self.plan.state_port(name)
        with self._state_lock:
            return self._states[port.base].copy()

    @property
    def hosts(self) -> tuple[Executable, ...]:
        return (self,)

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        return (DeviceShare("cpu", self.plan, self.threads, peaks),)

    def explain(self, n: int) -> list[str]:
        return explain_plan(self.plan, n, peaks())

    def settle(self, timeout: float | None = None) -> bool:
        """True: there is no background work."""
        return True

    def run(self, n: int, inputs: Sequence[NDArray[Any]], times: Sequence[StepTimes] | None = None) -> list[Any]:
        """Outputs in the model's order, freshly allocated. `inputs` are contiguous arrays of the declared types.

        Sequences are lists. `times`: a list of one `StepTimes`, to which the time of each step and fallback is added.
        FeedError for data that a node refuses, and for a batch that does not fit the model or the memory; Interrupted
        after `interrupt`; SessionClosed after `close`.
        """
        try:
            context = self._acquire(self._chunks.first_chunk_rows(n))
            try:
                if self.plan.states:
                    with self._state_lock:
                        return self._run(context, n, inputs, times[0] if times else None)
                return self._run(context, n, inputs, times[0] if times else None)
            finally:
                self._release(context)
        except MemoryError as error:
            raise out_of_memory_error(n, error) from error

    def call(self, n: int) -> Run:
        """A function that runs batches of just `n` rows, with less overhead than `run` where it can.

        It can where one thread suffices, in one chunk, without states and without loops that may not end. Errors of the
        function are those of `run`; FeedError for an `n` that does not fit the model comes from here or from it.
        """
        alone = self.threads == 1 or self._work.at(n) <= _ONE_THREAD_BELOW_WHEN_AWAKE
        if not alone or self.plan.states or self.may_not_end or n > self._chunks.rows:
            return partial(self.run, n)
        copied = {base for _, base in self.plan.copies}
        outputs = [
            (shape.at(n), shape.dtype) if shape is not None and port.base not in copied else None
            for port, shape in zip(self.plan.outputs, self._shapes, strict=True)
        ]
        arena, inputs = self.plan.arena.at(max(n, 1)), len(self.plan.inputs)
        setting = ContextSetup(n, self._whole[1], arena, inputs + len(outputs))
        known = [each for each in outputs if each is not None]
        if self._simple and len(known) == len(outputs):
            return Call(self, self._contexts, self._team, setting, known)
        if (tail := self._tail()) is not None:
            return CallWithTail(self, self._contexts, self._team, setting, outputs, tail)
        return partial(self.run, n)

    def dynamic_call(self, sizes: Sequence[int]) -> Call | None:
        """The call of dynamic-shape code for these values of `plan.sizes`; None for values that it does not serve.

        FeedError for an arena above 64 TiB or an extent that does not fit in 64 bits; whether the memory suffices shows
        in the run. TypeError if the plan has no sizes.
        """
        if self._layouts is None:
            raise TypeError("the plan has no dynamic sizes besides the batch size")
        try:
            layout = self._layouts.of(sizes)
        except MemoryError as error:
            raise out_of_memory_error(max(sizes), error) from error
        if layout is None:
            return None
        threads = self.threads if layout.work > _ONE_THREAD_BELOW else 1
        ports = len(self.plan.inputs) + len(layout.outputs)
        setting = DynamicContextSetup(layout, self._whole[1], ports, threads)
        return Call(self, self._contexts, self._team, setting, layout.outputs)

    def _tail(self) -> Tail | None:
        """The nodes after the native code; None if they cannot run on the fast path of `CallWithTail`.

        The native code must be one segment, followed only by nodes with a quick reference (`OpDef.quickly`). These must
        make all copied outputs, each of them once, and nothing that native code reads, and must not read inputs of the
        model.
        """
        if not self.plan.schedule:
            return None
        first, *rest = self.plan.schedule
        nodes = [self._reference_node[entry.index] for entry in rest if isinstance(entry, Fallback)]
        if first != Segment(*self._whole) or len(nodes) < len(rest):
            return None
        made = [node.node.outputs[0].name for node in nodes]
        known = {*made, *self._places} - set(self._names)
        read = {name for node in nodes for name, _ in node.quick_reads if name}
        copied = [name for name, _ in self.plan.copies]
        apart = len(set(copied)) == len(copied) and set(copied) <= set(made) and self._places.keys().isdisjoint(made)
        if not apart or not read <= known or any(node.quick is None for node in nodes):
            return None
        steps = [(node.quick, node.quick_reads, name) for node, name in zip(nodes, made, strict=True) if node.quick]
        return Tail(steps, [(self._outputs[base], name) for name, base in self.plan.copies])

    def runs(self) -> dict[int, int]:
        """The number of each run in flight by thread identifier; empty if every run ends by itself."""
        with self._guard:
            return {context.thread: context.run for context in self._in_flight}

    def interrupt(self, run: int | None = None) -> None:
        """Make the loops of run number `run` (see `runs`), or of all current runs, end soon with Interrupted."""
        with self._guard:
            for context in self._in_flight:
                if run not in (None, context.run):
                    continue
                context.interrupted = True
                for index in self._loops:
                    context.counters[8 * index + 1] = Status.INTERRUPTED

    def close(self) -> None:
        """Free everything, now or when the last run ends. Further runs raise SessionClosed."""
        if self._contexts.close():
            self.free()

    def _slot(self, operand: Address) -> tuple[int, int, int]:
        """(base, a, b) of an operand, whose address is that of the base + a*n + b."""
        offset = self._offset(operand)
        return operand.base, offset.a, offset.b

    def _offset(self, operand: Address) -> Affine:
        """The offset from the base. Weights that are shared with other executables lie outside the block."""
        return Affine(b=self._weights.offset(operand.offset.b)) if operand.base == WEIGHTS else operand.offset

    # -- one run --------------------------------------------------------------------------------------------------

    def _run(self, context: Context, n: int, inputs: Sequence[Any], times: StepTimes | None) -> list[Any]:
        bases, words = context.bases, context.words
        context.call = words[_ARRAYS] = 0
        base = FIRST_PORT
        for array in inputs:
            # Sequences and optionals are lists or None: only the references read them, so they need no address.
            bases[base] = address_of(array) if isinstance(array, np.ndarray) else 0
            base += 1
        for state in self._states.values():
            bases[base] = address_of(state)
            base += 1
        outputs = [shape.allocate(n) if shape is not None else None for shape in self._shapes]
        for output in outputs:
            if output is not None:
                bases[base] = address_of(output)
            base += 1
        if n > self._chunks.rows:
            self._run_chunks(context, n, times)
            return outputs
        words[_N] = n
        words[_THREADS] = self._threads_for(n)
        if self._simple:
            self._enter(context, *self._whole, times)
            return outputs
        return self.run_schedule(context, n, inputs, outputs, times)

    def _run_chunks(self, context: Context, n: int, times: StepTimes | None) -> None:
        """Run the steps once per chunk.

        With a cut point, the steps after it run once for the rows of several chunks together.
        """
        chunks, bases = self._chunks, context.bases.copy()
        most = chunks.first_chunk_rows(n)  # the arena holds this number of rows: the last chunks must not be larger
        if (cut := chunks.cut_point) is None:
            for first, rows in even_chunks(n, most):
                self._run_rows(context, bases, first, rows, self._whole, times)
            return
        try:
            for start, count in even_chunks(n, chunks.rows_after_cut):
                second = context.second_arena(cut.arena.at(count))
                crossing = second[cut.place.at(count) :]
                for first, rows in even_chunks(count, most):
                    self._run_rows(context, bases, start + first, rows, (0, cut.step), times)
                    made = context.arena[cut.place.at(rows) :]
                    crossing[first * cut.row : (first + rows) * cut.row] = made[: rows * cut.row]
                moved = bases.copy()
                moved[ARENA] = address_of(second)
                self._run_rows(context, moved, start, count, (cut.step, self._whole[1]), times)
        finally:
            context.bases[ARENA] = bases[ARENA]

    def _run_rows(
        self, context: Context, bases: NDArray[np.int64], first: int, rows: int, steps: tuple[int, int],
        times: StepTimes | None,
    ) -> None:  # fmt: skip
        """Run the steps of `range(*steps)` for `rows` rows from row `first` of a batch whose ports are at `bases`."""
        context.bases[:] = bases + first * self._row_steps
        context.words[_N], context.words[_THREADS] = rows, self._threads_for(rows)
        self._enter(context, *steps, times)

    def _threads_for(self, n: int) -> int:
        if self.threads == 1:
            return 1
        work = self._work.at(n)
        if work <= _ONE_THREAD_BELOW_WHEN_AWAKE:
            return 1
        in_a_row = work <= _ONE_THREAD_BELOW and perf_counter_ns() - self._team.ended < _WORKERS_AWAKE_NS
        return self.threads if in_a_row or work > _ONE_THREAD_BELOW else 1

    def _enter(self, context: Context, first: int, last: int, times: StepTimes | None = None) -> None:
        words = context.words
        if self.may_not_end:
            # Cleared before the check, not by the driver, so that the mark of an interrupt after the check is kept.
            context.counters[8 * first : 8 * last] = 0
            words[_CLEARED] = 1
        context.check()
        words[_FIRST] = first
        words[_LAST] = last
        words[_TIMES] = 0 if times is None else address_of(times.stamps)
        status = self._team.enter(self._team.handle, context.handle)
        if self.threads > 1:
            self._team.ended = perf_counter_ns()
        if times is not None:
            times.add_steps(first, times.stamps[first : last + 1].copy())
        if status:
            context.check()
            raise self.refusal(status)

    def refusal(self, status: int) -> FeedError:
        """The FeedError for a status other than 0 of the driver: it names the node that refused its data, and why."""
        step = self.plan.steps[(status >> 8) - 1]
        reason = Status(status & 0xFF).name.lower().replace("_", " ")
        return FeedError(f"node '{step.label}' ({step.op}): {reason}")

    def run_schedule(
        self, context: Context, n: int, inputs: Sequence[Any], outputs: list[Any], times: StepTimes | None
    ) -> list[Any]:
        """Run native segments and reference nodes in turn, then copy outputs and states; returns `outputs`, filled.

        `inputs`, and `outputs` that native code writes, are already in the context. None in `outputs` stands for an
        output that a reference makes.
        """
        boxed: dict[str, Any] = dict(zip(self._names, inputs, strict=True))
        symbols = {"n": n}
        for entry in self.plan.schedule:
            if isinstance(entry, Segment):
                self._enter(context, entry.first, entry.last, times)
                continue
            started = perf_counter_ns()
            self._run_fallback(context, symbols, entry, boxed)
            if times is not None:
                times.node(entry.index, started, perf_counter_ns())
        by_base = self._outputs
        updates: list[tuple[int, NDArray[Any]]] = []
        for name, base in self.plan.copies:
            value = self._read(context, n, name, boxed)
            if base in by_base:
                outputs[by_base[base]] = np.array(value) if isinstance(value, np.ndarray) else value
            else:
                updates.append((base, np.array(value)))
        for base, array in updates:
            np.copyto(self._states[base], array)
        return outputs

    def _run_fallback(self, context: Context, symbols: dict[str, int], entry: Fallback, boxed: dict[str, Any]) -> None:
        """Run one node on its quick function (`OpDef.quickly`), or on its reference if there is none or it fails.

        `symbols` receives the sizes that the results show. `boxed` holds results by name, and receives those of this
        node.
        """
        prepared, n = self._reference_node[entry.index], symbols["n"]
        if prepared.quick is not None:
            with suppress(Exception):  # on an error, the reference below reports it
                reads = prepared.quick_reads
                arguments = [self._read(context, n, name, boxed) if name else known for name, known in reads]
                value, result = prepared.node.outputs[0], prepared.quick(*arguments)
                boxed[value.name] = result
                if value.name in self._places:
                    self._copy_to_memory(context, n, prepared.node, value, result)
                return
        node = prepared.node
        environment = prepared.constants | {v: self._read(context, n, v.name, boxed) for v in prepared.reads}
        arguments = [environment[v] if v is not None else None for v in node.inputs]
        results = run_node(node, arguments, environment, symbols, context.check, lambda: prepared.fed)
        if prepared.teaches:
            bind_result_symbols(node, results, symbols)
        for value, result in zip(node.outputs, results, strict=False):
            boxed[value.name] = self._copy_if_shared(context, result)
            if value.name in self._places:
                self._copy_to_memory(context, n, node, value, result)

    def _copy_to_memory(self, context: Context, n: int, node: Node, value: Value, result: Any) -> None:
        """Copy a result to where native code reads it. FeedError if its shape is not the declared one."""
        place = self.view(context, n, value.name)
        if place.shape != np.shape(result):
            expected = f"expected {value.type} with n = {n}"
            found = f"its output '{value.name}' has shape {list(np.shape(result))}"
            raise FeedError(f"node '{node.name}' ({node.op}): {found}, {expected}")
        np.copyto(place, result)

    def _copy_if_shared(self, context: Context, result: Any) -> Any:
        """The result, copied if it is a view of memory that later steps overwrite or that `close` frees."""
        if isinstance(result, list):
            return [
                self._copy_if_shared(context, item) if isinstance(item, list | np.ndarray) else item for item in result
            ]
        if not isinstance(result, np.ndarray):
            return result
        blocks = (context.arena, self._weights.block, *self._states.values())
        return result.copy() if any(np.may_share_memory(result, block) for block in blocks) else result

    def _read(self, context: Context, n: int, name: str, boxed: Mapping[str, Any]) -> Any:
        return boxed[name] if name in boxed else self.view(context, n, name)

    def view(self, context: Context, n: int, name: str) -> NDArray[Any]:
        """The array over the memory of the value `name` in this run.

        Views of the arena are cached until the arena is replaced or `n` changes.
        """
        context.show(n)
        if (view := context.views.get(name)) is not None:
            return view
        base, a, b, shape, type_ = self._places[name]
        dims = type_.evaluate({"n": n}) if shape is None else [step * n + least for step, least in shape]
        view = array_at(int(context.bases[base]) + a * max(n, 1) + b, type_.dtype.numpy, dims)
        if base == ARENA:
            context.views[name] = view
        return view

    # -- contexts -------------------------------------------------------------------------------------------------

    def _acquire(self, n: int) -> Context:
        context = self._contexts.take(self.new_context)
        try:
            context.make_room(self.plan.arena.at(max(n, 1)))
            if self.may_not_end:
                context.run, context.thread, context.interrupted = next(RUN_NUMBERS), threading.get_ident(), False
                with self._guard:
                    self._in_flight.add(context)
        except BaseException:
            self._release(context)
            raise
        return context

    def _release(self, context: Context) -> None:
        if self.may_not_end:
            with self._guard:
                self._in_flight.discard(context)
        if self._contexts.release(context):
            self.free()

    def free(self) -> None:
        self._library.close()
        self._weights = DeduplicatedWeights(np.zeros(0, np.uint8))
        self._states.clear()
        return_to_system(self.plan.weights)

    def new_context(self) -> Context:
        words = aligned_words(ContextWord.SIZE)
        ports = len(self.plan.inputs) + len(self.plan.states) + len(self.plan.outputs)
        bases = aligned_words(FIRST_PORT + ports)
        addresses = aligned_words(max(1, len(self._slots) // 3))
        counters = aligned_words(8 * max(1, len(self.plan.steps)))
        arrays = aligned_words(max(1, ports))
        bases[WEIGHTS] = address_of(self._weights.block)
        words[ContextWord.FUNCTIONS] = address_of(self._functions)
        words[ContextWord.STARTS] = address_of(self._starts)
        words[ContextWord.ADDRESSES] = address_of(addresses)
        words[ContextWord.COUNTERS] = address_of(counters)
        words[ContextWord.SLOTS] = address_of(self._slots)
        words[ContextWord.SLOT_COUNT] = len(self._slots) // 3
        words[ContextWord.BASES] = address_of(bases)
        words[ContextWord.BARRIERS] = address_of(self._barriers)
        words[ContextWord.ARRAYS] = address_of(arrays)
        return Context(words, bases, addresses, counters, arrays)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape of an output for every n: per dimension a*n + b."""

    name: str
    dims: tuple[tuple[int, int], ...]
    dtype: np.dtype[Any]
    may_shrink: bool  # a dimension is negative for some n

    def at(self, n: int) -> tuple[int, ...]:
        shape = tuple([a * n + b for a, b in self.dims])
        if self.may_shrink and min(shape) < 0:
            raise FeedError(
                f"a batch of {n} does not fit the model: output '{self.name}' would have shape {list(shape)}"
            )
        return shape

    def allocate(self, n: int) -> NDArray[Any]:
        return np.empty(self.at(n), self.dtype)


def _shape_of(port: Port) -> _Shape | None:
    """The shape of an output for every batch size.

    None if the output is no tensor, if its rank is unknown, or if a dimension is not linear in `n` alone.
    """
    type_ = port.type
    if not isinstance(type_, TensorType) or type_.shape is None:
        return None
    dims = tuple(parts for dim in type_.shape if (parts := affine(dim, "n")) is not None)
    if len(dims) < len(type_.shape):
        return None
    may_shrink = not all(map(is_never_negative, type_.shape))
    return _Shape(port.name, dims, type_.dtype.numpy, may_shrink)


class _ReferenceNode(NamedTuple):
    """A node that runs on its reference: `reads`, the values that it reads except constants, and those constants."""

    node: Node
    reads: list[Value]
    constants: dict[Value, Any]
    fed: bool
    teaches: bool  # its results may show the values of symbols
    quick: Callable[..., Any] | None  # see OpDef.quickly
    quick_reads: list[tuple[str, Any]]  # names of its arguments, or "" and a constant


def _reference_node(plan: Plan, entry: Fallback) -> _ReferenceNode:
    graph = plan.fallbacks
    node, known = graph.nodes[entry.index], graph.constants
    read = list(dict.fromkeys(node_reads(node)))
    constants = {value: known[value] for value in read if value in known}
    reads = [value for value in read if value not in known]
    symbols = {name for value in node.outputs if isinstance(value.type, TensorType) for name in value.type.symbols}
    op = registry.get(node.op)
    given = [value for value in node.inputs if value is not None]
    simple = len(node.outputs) == 1 and len(given) == len(node.inputs) and not symbols - {"n"}
    quick = op.quickly(registry.NodeView(op, node)) if simple else None
    quick_reads = [("", known[value]) if value in known else (value.name, None) for value in given]
    return _ReferenceNode(
        node, reads, constants, depends_on_feeds(node, known), bool(symbols - {"n"}), quick, quick_reads
    )


class _Place(NamedTuple):
    """The place of a value: `a * n + b` bytes after a base. `dims`: its dimensions as (a, b) for a*n + b.

    `dims` is None if a dimension does not have that form.
    """

    base: int
    a: int
    b: int
    dims: list[tuple[int, int]] | None
    type: TensorType


def _place_of(address: Address, type_: TensorType) -> _Place:
    dims = [parts for dim in type_.dims if (parts := affine(dim, "n")) is not None]
    offset = address.offset
    return _Place(address.base, offset.a, offset.b, dims if len(dims) == len(type_.dims) else None, type_)
