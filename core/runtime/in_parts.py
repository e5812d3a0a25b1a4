"""Code for any sizes in parts, and the references of the nodes between them: a script, see `core.in_parts`."""

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

from core.errors import ArtifactError, FeedError, Interrupted, ModelError, SessionClosed, UnsupportedError
from core.ir.dim import Dim, SymDim, broken, symbols
from core.ir.graph import Graph, Node, Value
from core.ops.registry import get
from core.reference import RunCode, is_fed, run_node, run_nodes
from core.runtime.call import Call
from core.runtime.context import RUN_NUMBERS
from core.runtime.executable import Executable
from core.runtime.general import MOST_WORK, owned, work_between
from core.runtime.record import REFERENCE, KernelRun, Record, tell
from core.runtime.runner import Share, Times
from core.runtime.script import PART

_KEPT = 64  # sizes whose layouts a part keeps; when there are more, they are forgotten together


class Unfit(SessionClosed):
    """The sizes, or what a run shows of them, are none that the code serves: something else answers."""


class PartsRunner:
    """Runs a script. `close` frees its parts once the last run in flight has ended."""

    def __init__(
        self, script: Graph, parts: Sequence[Executable], sizes: Sequence[str], supposed: Sequence[Dim],
        notes: Sequence[str],
    ) -> None:  # fmt: skip
        """`sizes`: the names of the values of its table, which are the symbols size0, size1, ... of the script.
        `supposed`: what must not be negative for these."""
        self.sizes = tuple(sizes)
        self._script, self._parts, self._supposed, self._notes = script, tuple(parts), tuple(supposed), tuple(notes)
        self._code = {node: _PartCode(node, self._parts[_index(node)]) for node in _parts_of(script)}
        self._doubtful = any(node not in script.nodes for node in self._code)
        self.may_not_end = not _ends(script.nodes)
        self._guard = threading.Lock()
        self._in_flight: dict[int, tuple[int, threading.Event]] = {}  # by the number of the run: its thread
        self._closed = False

    @property
    def hosts(self) -> tuple[PartsRunner, ...]:
        return (self,)

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(share for part in self._parts for share in part.shares)

    def sized(self, sizes: Sequence[int]) -> PartsCall | None:
        """`run` for these values of the table; None for values that the code does not serve, or where the references
        have so much to do that code for the sizes is worth waiting for."""
        known = {f"size{place}": value for place, value in enumerate(sizes)}
        if broken(self._supposed, known) or work_between(self._script, known) > MOST_WORK:
            return None
        return PartsCall(self, known)

    def run_script(self, inputs: Sequence[Any], known: Mapping[str, int], code: Mapping[Node, RunCode]) -> list[Any]:
        """Outputs in the model's order, fresh. Unfit where a part does not serve what the run shows."""
        environment: dict[Value, Any] = dict(zip(self._script.inputs, inputs, strict=True))
        with self._running() as check:
            try:
                run_nodes(self._script, environment, dict(known), check, code)
            except KeyError as error:
                raise Unfit(f"a size is not known: {error}") from error
            except (FeedError, ModelError) as error:
                if self._doubtful:  # what a body supposes may not hold: code for the sizes says what is wrong
                    raise Unfit(str(error)) from error
                raise
        return owned([environment[value] for value in self._script.outputs], inputs)

    def run_recorded(self, inputs: Sequence[Any], known: Mapping[str, int], record: Record) -> list[Any]:
        """The same; `record` is told of the kernels, and of the nodes of the model itself that run on references."""
        taken: list[tuple[Share, Times]] = []
        nodes: list[KernelRun] = []
        plain = [node for node in self._script.nodes if not node.subgraphs and node not in self._code]
        fed = [is_fed(node, self._script.constants) for node in plain]
        pairs = zip(plain, fed, strict=True)
        code: dict[Node, RunCode] = {node: partial(_timed, node, nodes, each) for node, each in pairs}
        code |= {node: partial(part.recorded, taken) for node, part in self._code.items()}
        results = self.run_script(inputs, known, code)
        tell(taken, record, nodes)
        return results

    @property
    def code(self) -> Mapping[Node, RunCode]:
        """What runs each part."""
        return self._code

    def runs(self) -> dict[int, int]:
        """The number of the run that each thread is in."""
        with self._guard:
            return {thread: number for number, (thread, _) in self._in_flight.items()}

    def interrupt(self, run: int | None = None) -> None:
        """Make the loops of a run, or of all under way, end soon; they raise Interrupted."""
        with self._guard:
            for number, (_, ended) in self._in_flight.items():
                if run in (None, number):
                    ended.set()

    @contextmanager
    def _running(self) -> Iterator[Callable[[], object]]:
        """What loops call at each round: it raises Interrupted once the run is to end. SessionClosed after `close`."""
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
                last = self._is_over()
            if last:
                self._free()

    def run(self, n: int, inputs: Sequence[Any], times: Sequence[Times] | None = None) -> list[Any]:
        """UnsupportedError: the sizes say more than a batch size, see `sized`."""
        raise UnsupportedError("code for any sizes does not run for a batch size alone")

    def set_state(self, name: str, array: NDArray[Any]) -> None:
        raise KeyError(name)

    def state(self, name: str) -> NDArray[Any]:
        """There is none."""
        raise KeyError(name)

    def settle(self, timeout: float | None = None) -> bool:
        """Nothing goes on in the background."""
        return True

    def explain(self, n: int) -> list[str]:
        lines = [f"{len(self._parts)} parts, and references between them", *self._notes]
        for index, part in enumerate(self._parts):
            lines += [f"part {index}:", *(f"  {line}" for line in part.explain(n))]
        return lines

    def close(self) -> None:
        """Free everything, now or when the last run ends: parts that are still to run belong to it."""
        with self._guard:
            last = not self._closed and not self._in_flight
            self._closed = True
        if last:
            self._free()

    def _is_over(self) -> bool:
        return self._closed and not self._in_flight

    def _free(self) -> None:
        for part in self._parts:
            part.close()


class PartsCall:
    """Runs of a script for certain sizes."""

    def __init__(self, runner: PartsRunner, known: Mapping[str, int]) -> None:
        """`known`: what the symbols of the inputs stand for."""
        self._runner, self._known = runner, known

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        return self._runner.run_script(inputs, self._known, self._runner.code)

    def recorded(self, inputs: Sequence[Any], record: Record) -> list[Any]:
        return self._runner.run_recorded(inputs, self._known, record)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A part ready to run for certain sizes: its call, and the shapes that its inputs have."""

    call: Call
    shapes: tuple[tuple[int, ...], ...]


class _Unseen:
    """In the place of sizes that have not come yet."""


_UNSEEN = _Unseen()


class _PartCode:
    """Runs a part of a script."""

    def __init__(self, node: Node, code: Executable) -> None:
        self._executable, self._supposed = code, _dims(node.attrs["supposed"])
        self._types = [value.tensor for value in node.inputs if value is not None]
        seen = frozenset().union(*map(symbols, self._supposed), *(type_.symbols for type_ in self._types))
        self._names = tuple(sorted({*seen, *code.plan.sizes}))
        self._ready: dict[tuple[int, ...], _Ready | None] = {}

    def __call__(self, arrays: Sequence[Any], known: Mapping[str, int]) -> list[Any]:
        """Unfit where the part does not serve these sizes, or these arrays are not as long as they say."""
        ready, inputs = self._entered(arrays, known)
        return ready.call(inputs)

    def recorded(self, taken: list[tuple[Share, Times]], arrays: Sequence[Any], known: Mapping[str, int]) -> list[Any]:
        """The same; `taken` receives what each step took."""
        ready, inputs = self._entered(arrays, known)
        times = Times(self._executable.plan)
        results = ready.call(inputs, times.stamps)
        times.lap(0, times.stamps)
        taken += [(share, times) for share in self._executable.shares]
        return results

    def _entered(self, arrays: Sequence[Any], known: Mapping[str, int]) -> tuple[_Ready, list[NDArray[Any]]]:
        key = tuple([known[name] for name in self._names])
        ready = self._ready.get(key, _UNSEEN)
        if isinstance(ready, _Unseen):
            if len(self._ready) >= _KEPT:
                self._ready.clear()
            ready = self._ready[key] = self._of(known)
        if ready is None:
            raise Unfit("sizes that the part does not serve")
        for array, shape in zip(arrays, ready.shapes, strict=True):
            if array.shape != shape:  # kernels take for granted that arrays are as long as their types say
                raise Unfit(f"an array has shape {list(array.shape)}, expected {list(shape)}")
        return ready, [each if each.flags.c_contiguous else np.array(each, order="C") for each in arrays]

    def _of(self, known: Mapping[str, int]) -> _Ready | None:
        if broken(self._supposed, known):
            return None
        call = self._executable.sized([known[name] for name in self._executable.plan.sizes])
        if call is None:
            return None
        return _Ready(call, tuple(type_.evaluate(known) for type_ in self._types))


def _timed(
    node: Node, taken: list[KernelRun], fed: bool, arguments: Sequence[Any], known: Mapping[str, int]
) -> list[Any]:
    """A node without bodies on its reference; `taken` receives when."""
    began = perf_counter_ns()
    results = run_node(node, arguments, {}, known, fed=fed)
    taken.append(KernelRun(node.name, node.op, REFERENCE, "cpu", began, perf_counter_ns()))
    return results


def _check(ended: threading.Event) -> None:
    if ended.is_set():
        raise Interrupted("the run was broken off")


def _parts_of(script: Graph) -> Iterator[Node]:
    """The nodes of a script and its bodies that stand for parts."""
    for node in script.nodes:
        if node.op == PART:
            yield node
        for body in node.subgraphs:
            yield from _parts_of(body)


def _ends(nodes: Sequence[Node]) -> bool:
    """Whether every run of these nodes of a script ends by itself: native code of parts does."""
    bodies = [body.nodes for node in nodes for body in node.subgraphs]
    return all(node.op == PART or not get(node.op).open_ended for node in nodes) and all(map(_ends, bodies))


def _index(node: Node) -> int:
    index = node.attrs["part"]
    if not isinstance(index, int):
        raise ArtifactError(f"node '{node.name}' names part {index!r}, expected a number")
    return index


def _dims(attr: object) -> tuple[Dim, ...]:
    dims = attr if isinstance(attr, tuple) else ()
    return tuple(dim for dim in dims if isinstance(dim, int | SymDim))
