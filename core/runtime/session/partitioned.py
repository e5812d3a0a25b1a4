"""Dynamic-shape code in parts, with reference nodes between them: a script, see `lathe.core.compiler.partitioning`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import ArtifactError, FeedError, Interrupted, ModelError, SessionClosed, UnsupportedError
from lathe.core.ir.dim import Dim, SymDim, symbols, violated_assumption
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ops.opdef.registry import get
from lathe.core.reference import RunCode, depends_on_feeds, run_node, run_nodes
from lathe.core.runtime.host.executable import Executable
from lathe.core.runtime.host.run_context import RUN_NUMBERS
from lathe.core.runtime.session.prepared_calls import Call
from lathe.core.runtime.session.record import REFERENCE, KernelRun, Record, report_kernels
from lathe.core.runtime.session.reference_runner import MAX_OPERATIONS, copy_borrowed, script_operation_count
from lathe.core.runtime.session.runner import DeviceShare, StepTimes
from lathe.core.runtime.session.script import PART

_MAX_CALLS = 64  # cached sizes of a part with their layouts; at the limit, all of them are forgotten


class UnservedSizes(SessionClosed):
    """Dynamic-shape code does not serve the sizes of the inputs, or sizes that the run computes.

    The session then runs other code, as if this code had been closed (SessionClosed).
    """


class PartitionedRunner:
    """Runs a script: its nodes on the references, its parts in native code.

    `close` frees the parts once the last run in flight has ended.
    """

    def __init__(
        self, script: Graph, parts: Sequence[Executable], sizes: Sequence[str], supposed: Sequence[Dim],
        notes: Sequence[str],
    ) -> None:  # fmt: skip
        """`sizes`: the names of the values of its size table, which are the symbols size0, size1, ... of the script.

        `supposed`: dimensions that must not be negative for these values. `notes`: lines for `explain`.
        """
        self.sizes = tuple(sizes)
        self._script, self._parts, self._supposed, self._notes = script, tuple(parts), tuple(supposed), tuple(notes)
        self._code = {node: _PartCode(node, self._parts[_part_index(node)]) for node in _parts_of(script)}
        self._has_parts_in_subgraphs = any(node not in script.nodes for node in self._code)
        self.may_not_end = not _always_ends(script.nodes)
        self._guard = threading.Lock()
        self._in_flight: dict[int, tuple[int, threading.Event]] = {}  # by run number: its thread
        self._closed = False

    @property
    def hosts(self) -> tuple[PartitionedRunner, ...]:
        return (self,)

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        return tuple(share for part in self._parts for share in part.shares)

    @property
    def reference_nodes(self) -> int:
        """The number of nodes that run on references, those in subgraphs included."""
        return self._script.count_nodes() - len(self._code)

    def dynamic_call(self, sizes: Sequence[int]) -> PartitionedCall | None:
        """The call for these values of the size table.

        None for values that the code does not serve, or if the references have so much to do that waiting for code of
        these sizes is better.
        """
        known = {f"size{place}": value for place, value in enumerate(sizes)}
        if violated_assumption(self._supposed, known) or script_operation_count(self._script, known) > MAX_OPERATIONS:
            return None
        return PartitionedCall(self, known)

    def run_script(self, inputs: Sequence[Any], known: Mapping[str, int], code: Mapping[Node, RunCode]) -> list[Any]:
        """Outputs in the model's order, freshly allocated. `known`: the sizes; `code` runs instead of some nodes.

        UnservedSizes if a part does not serve the sizes that the run computes, if a size is unknown, or for any
        FeedError or ModelError of a script with parts in subgraphs, whose assumptions may be violated. For other
        scripts FeedError if a node refuses its data; Interrupted after `interrupt`; SessionClosed after `close`.
        """
        environment: dict[Value, Any] = dict(zip(self._script.inputs, inputs, strict=True))
        with self._running() as check:
            try:
                run_nodes(self._script, environment, dict(known), check, code)
            except KeyError as error:
                raise UnservedSizes(f"a size is not known: {error}") from error
            except (FeedError, ModelError) as error:
                # An assumption of a subgraph may be violated: code for the sizes reports the error.
                if self._has_parts_in_subgraphs:
                    raise UnservedSizes(str(error)) from error
                raise
        return copy_borrowed([environment[value] for value in self._script.outputs], inputs)

    def run_recorded(self, inputs: Sequence[Any], known: Mapping[str, int], record: Record) -> list[Any]:
        """As `run_script`; reports the kernels, and the model's own nodes that run on references, to `record`."""
        taken: list[tuple[DeviceShare, StepTimes]] = []
        nodes: list[KernelRun] = []
        plain = [node for node in self._script.nodes if not node.subgraphs and node not in self._code]
        fed = [depends_on_feeds(node, self._script.constants) for node in plain]
        pairs = zip(plain, fed, strict=True)
        code: dict[Node, RunCode] = {node: partial(_run_timed, node, nodes, each) for node, each in pairs}
        code |= {node: partial(part.recorded, taken) for node, part in self._code.items()}
        results = self.run_script(inputs, known, code)
        report_kernels(taken, record, nodes)
        return results

    @property
    def code(self) -> Mapping[Node, RunCode]:
        """The code that runs each part, by the part's node in the script."""
        return self._code

    def runs(self) -> dict[int, int]:
        """The number of each run in flight, by thread identifier."""
        with self._guard:
            return {thread: number for number, (thread, _) in self._in_flight.items()}

    def interrupt(self, run: int | None = None) -> None:
        """Make the loops of run number `run` (see `runs`), or of all current runs, end soon with Interrupted."""
        with self._guard:
            for number, (_, ended) in self._in_flight.items():
                if run in (None, number):
                    ended.set()

    @contextmanager
    def _running(self) -> Iterator[Callable[[], object]]:
        """Context manager around a run: gives a function for loops to call at each iteration.

        The function raises Interrupted once the run is to end. SessionClosed after `close`.
        """
        ended, number = threading.Event(), next(RUN_NUMBERS)
        with self._guard:
            if self._closed:
                raise SessionClosed("the session is closed")
            self._in_flight[number] = (threading.get_ident(), ended)
        try:
            yield partial(_check, ended)
        finally:
            with self._guard:
                del self._in_flight[number]
                last = self._can_free()
            if last:
                self._free()

    def run(self, n: int, inputs: Sequence[Any], times: Sequence[StepTimes] | None = None) -> list[Any]:
        """Always raises UnsupportedError: a batch size is not enough, see `dynamic_call`."""
        raise UnsupportedError("dynamic-shape code needs all sizes, not only a batch size")

    def set_state(self, name: str, array: NDArray[Any]) -> None:
        """Always raises KeyError: such code has no state."""
        raise KeyError(name)

    def state(self, name: str) -> NDArray[Any]:
        """Always raises KeyError: such code has no state."""
        raise KeyError(name)

    def settle(self, timeout: float | None = None) -> bool:
        """True: there is no background work."""
        return True

    def explain(self, n: int) -> list[str]:
        lines = [f"{len(self._parts)} parts, and references between them", *self._notes]
        for index, part in enumerate(self._parts):
            lines += [f"part {index}:", *(f"  {line}" for line in part.explain(n))]
        return lines

    def close(self) -> None:
        """Free everything, now or when the last run ends, because that run still needs the parts."""
        with self._guard:
            last = not self._closed and not self._in_flight
            self._closed = True
        if last:
            self._free()

    def _can_free(self) -> bool:
        return self._closed and not self._in_flight

    def _free(self) -> None:
        for part in self._parts:
            part.close()


class PartitionedCall:
    """A function from inputs to outputs: runs a script for given values of its sizes."""

    def __init__(self, runner: PartitionedRunner, known: Mapping[str, int]) -> None:
        """`known`: the values of the script's symbols size0, size1, ..."""
        self._runner, self._known = runner, known

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        return self._runner.run_script(inputs, self._known, self._runner.code)

    def recorded(self, inputs: Sequence[Any], record: Record) -> list[Any]:
        return self._runner.run_recorded(inputs, self._known, record)


@dataclass(frozen=True, slots=True)
class _ReadyPart:
    """A part that is ready to run for given sizes: its call, and the shapes of its inputs."""

    call: Call
    shapes: tuple[tuple[int, ...], ...]


class _NotCached:
    """The type of a sentinel for sizes that are not in the cache, because None stands for sizes that are not served."""


_NOT_CACHED = _NotCached()


class _PartCode:
    """Runs a part of a script by its native code; caches the calls by sizes."""

    def __init__(self, node: Node, code: Executable) -> None:
        self._executable, self._supposed = code, _dims(node.attrs["supposed"])
        self._types = [value.tensor for value in node.inputs if value is not None]
        seen = frozenset().union(*map(symbols, self._supposed), *(type_.symbols for type_ in self._types))
        self._names = tuple(sorted({*seen, *code.plan.sizes}))
        self._ready: dict[tuple[int, ...], _ReadyPart | None] = {}

    def __call__(self, arrays: Sequence[Any], known: Mapping[str, int]) -> list[Any]:
        """The outputs of the part.

        UnservedSizes if the part does not serve these sizes, or if an array does not have the shape that they imply.
        KeyError if `known` lacks a size.
        """
        ready, inputs = self._ready_for(arrays, known)
        return ready.call(inputs)

    def recorded(
        self, taken: list[tuple[DeviceShare, StepTimes]], arrays: Sequence[Any], known: Mapping[str, int]
    ) -> list[Any]:
        """As `__call__`; the times of the part's steps are appended to `taken`."""
        ready, inputs = self._ready_for(arrays, known)
        times = StepTimes(self._executable.plan)
        results = ready.call(inputs, times.stamps)
        times.add_steps(0, times.stamps)
        taken += [(share, times) for share in self._executable.shares]
        return results

    def _ready_for(self, arrays: Sequence[Any], known: Mapping[str, int]) -> tuple[_ReadyPart, list[NDArray[Any]]]:
        key = tuple([known[name] for name in self._names])
        ready = self._ready.get(key, _NOT_CACHED)
        if isinstance(ready, _NotCached):
            if len(self._ready) >= _MAX_CALLS:
                self._ready.clear()
            ready = self._ready[key] = self._prepare(known)
        if ready is None:
            raise UnservedSizes("sizes that the part does not serve")
        for array, shape in zip(arrays, ready.shapes, strict=True):
            # Kernels do not check shapes: an array that is too short would be read past its end.
            if array.shape != shape:
                raise UnservedSizes(f"an array has shape {list(array.shape)}, expected {list(shape)}")
        return ready, [each if each.flags.c_contiguous else np.array(each, order="C") for each in arrays]

    def _prepare(self, known: Mapping[str, int]) -> _ReadyPart | None:
        if violated_assumption(self._supposed, known):
            return None
        call = self._executable.dynamic_call([known[name] for name in self._executable.plan.sizes])
        if call is None:
            return None
        return _ReadyPart(call, tuple(type_.evaluate(known) for type_ in self._types))


def _run_timed(
    node: Node, taken: list[KernelRun], fed: bool, arguments: Sequence[Any], known: Mapping[str, int]
) -> list[Any]:
    """Run a node without subgraphs on its reference and return its outputs; appends its begin and end to `taken`.

    `fed`: whether its inputs depend on the feeds; an error of the node is a FeedError then, otherwise a ModelError.
    """
    began = perf_counter_ns()
    results = run_node(node, arguments, {}, known, is_fed=lambda: fed)
    taken.append(KernelRun(node.name, node.op, REFERENCE, "cpu", began, perf_counter_ns()))
    return results


def _check(ended: threading.Event) -> None:
    if ended.is_set():
        raise Interrupted("the run was interrupted")


def _parts_of(script: Graph) -> Iterator[Node]:
    """The nodes of a script, and of its subgraphs, that stand for parts."""
    for node in script.nodes:
        if node.op == PART:
            yield node
        for body in node.subgraphs:
            yield from _parts_of(body)


def _always_ends(nodes: Sequence[Node]) -> bool:
    """Whether every run of these nodes and their bodies ends by itself. The native code of parts always does."""
    bodies = [body.nodes for node in nodes for body in node.subgraphs]
    return all(node.op == PART or not get(node.op).open_ended for node in nodes) and all(map(_always_ends, bodies))


def _part_index(node: Node) -> int:
    index = node.attrs["part"]
    if not isinstance(index, int):
        raise ArtifactError(f"node '{node.name}' names part {index!r}, expected a number")
    return index


def _dims(attr: object) -> tuple[Dim, ...]:
    dims = attr if isinstance(attr, tuple) else ()
    return tuple(dim for dim in dims if isinstance(dim, int | SymDim))
