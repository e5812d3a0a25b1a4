"""A cache of calls by the shapes of the feeds, so that a run of known shapes needs no further checks.

Native code runs a tiny model in a microsecond or less. Most of a call's time then goes to finding sizes, allocating
outputs and passing addresses. `CallCache` finds the function to call by one lookup of the shapes. For code that is one
native segment on the caller's thread, that function is a `Call`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError, SessionClosed
from lathe.core.ir.dim import SymDim
from lathe.core.ir.types import TensorType, ValueType
from lathe.core.runtime.host.layouts import Layout
from lathe.core.runtime.host.memory import address_of
from lathe.core.runtime.host.native_driver import ContextWord
from lathe.core.runtime.host.run_context import Context, ContextPool
from lathe.core.runtime.host.thread_pool import ThreadPool

Run: TypeAlias = Callable[[Sequence[Any]], list[Any]]  # outputs for inputs, of certain shapes
ArraySpec: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype of an output
Shapes: TypeAlias = tuple[tuple[int, ...], ...]  # of the inputs, in their order

_MAX_CALLS = 256  # cached shapes; at the limit, all of them are forgotten

_NUMBERS = count(1)  # of calls

# Plain integers: a member of an IntEnum costs a lookup each time.
_N, _FIRST, _LAST = int(ContextWord.N), int(ContextWord.FIRST), int(ContextWord.LAST)
_THREADS, _TIMES, _ARRAYS = int(ContextWord.THREADS), int(ContextWord.TIMES), int(ContextWord.ARRAY_COUNT)
_SLOTS = int(ContextWord.SLOTS)


class Host(Protocol):
    """The part of `Executable` that calls use: contexts for runs, and what to do when native code does not suffice."""

    def new_context(self) -> Context: ...

    def run_schedule(
        self, context: Context, n: int, inputs: Sequence[Any], outputs: list[Any], times: None
    ) -> list[Any]: ...

    def view(self, context: Context, n: int, name: str) -> Any:
        """The array over the memory of the value `name` that native code has written in this run."""
        ...

    def refusal(self, status: int) -> Exception:
        """The exception for a status other than 0 that the driver returned."""
        ...

    def free(self) -> None: ...


class ContextSetup:
    """Sets up a context for all runs of one call: the batch size, the number of steps, the arena's bytes, the ports.

    A context is set up when the call first takes it, and again after another call has used it.
    """

    def __init__(self, n: int, steps: int, arena: int, ports: int) -> None:
        self.n, self._steps, self._arena, self._ports = n, steps, arena, ports
        self.number = next(_NUMBERS)

    def apply(self, context: Context) -> None:
        context.call = 0
        context.make_room(self._arena)
        words = context.words
        words[_N], words[_THREADS], words[_TIMES] = self.n, 1, 0
        words[_FIRST], words[_LAST], words[_ARRAYS] = 0, self._steps, self._ports
        context.show(self.n)
        context.call = self.number


class DynamicContextSetup(ContextSetup):
    """`ContextSetup` for dynamic-shape code: the word for the batch size holds the address of the size table."""

    def __init__(self, layout: Layout, steps: int, ports: int, threads: int) -> None:
        super().__init__(address_of(layout.sizes), steps, layout.arena, ports)
        self._layout, self._threads = layout, threads  # keeps the layout's tables alive

    def apply(self, context: Context) -> None:
        super().apply(context)
        context.words[_THREADS] = self._threads
        context.words[_SLOTS] = address_of(self._layout.slots)


class Call:
    """A function from inputs to outputs: all steps of a plan for fixed shapes, as one native call.

    The steps run on the caller's thread, for dynamic-shape code with much work on the thread pool, too.
    """

    def __init__(
        self, host: Host, contexts: ContextPool, team: ThreadPool, setting: ContextSetup, outputs: Sequence[ArraySpec]
    ) -> None:
        self._host, self._contexts, self._setting = host, contexts, setting
        self._enter, self._team = team.enter, team.handle
        self._number = setting.number
        self._outputs = tuple(outputs)

    def __call__(self, inputs: Sequence[NDArray[Any]], stamps: NDArray[np.int64] | None = None) -> list[Any]:
        """The outputs, freshly allocated; FeedError if a kernel refuses its data, or if memory is too small.

        `inputs` must be contiguous arrays of the call's shapes and dtypes: nothing checks it. `stamps` receives the
        driver's clock in nanoseconds: at the start and after each step. SessionClosed if the code is closed.
        """
        contexts = self._contexts
        try:
            context = contexts.take(self._host.new_context)
            try:
                if context.call != self._number:
                    self._setting.apply(context)
                if stamps is not None:
                    # Call 0: the next run sets the words again.
                    context.call, context.words[_TIMES] = 0, address_of(stamps)
                # The driver reads the addresses of elements out of the arrays, all of which live until it has ended.
                outputs = [np.empty(shape, dtype) for shape, dtype in self._outputs]
                objects, place = context.objects, 0
                for array in inputs:
                    objects[place] = id(array)
                    place += 1
                for array in outputs:
                    objects[place] = id(array)
                    place += 1
                status = self._enter(self._team, context.handle)
            finally:
                if contexts.release(context):
                    self._host.free()
        except MemoryError as error:
            raise out_of_memory_error(self._setting.n, error) from error
        if status:
            raise self._host.refusal(status)
        return outputs


_NOTHING = np.empty(0, np.uint8)


class Tail(NamedTuple):
    """Nodes without kernels that run after all native code, by the functions that `OpDef.quickly` gives for them."""

    # Functions of their arguments (see OpDef.quickly), names of these, or "" and a constant, and the result's name.
    steps: Sequence[tuple[Callable[..., Any], Sequence[tuple[str, Any]], str]]
    outputs: Sequence[tuple[int, str]]  # positions among the outputs, and names of the results


class CallWithTail:
    """As `Call`, but it measures no times (`stamps`), and then runs a tail of nodes by `OpDef.quickly` (see `Tail`).

    If a node of the tail fails, all steps run again on the usual path, so that its reference reports the error.
    """

    def __init__(
        self,
        host: Host,
        contexts: ContextPool,
        team: ThreadPool,
        setting: ContextSetup,
        outputs: Sequence[ArraySpec | None],
        tail: Tail,
    ) -> None:
        """`outputs`: the shape and dtype of each output, or None for an output that a reference makes."""
        self._host, self._contexts, self._setting = host, contexts, setting
        self._enter, self._team = team.enter, team.handle
        self._outputs, self._tail = tuple(outputs), tail

    def __call__(self, inputs: Sequence[NDArray[Any]]) -> list[Any]:
        contexts, setting = self._contexts, self._setting
        try:
            context = contexts.take(self._host.new_context)
            try:
                if context.call != setting.number:
                    setting.apply(context)
                outputs = [None if form is None else np.empty(*form) for form in self._outputs]
                objects = context.objects
                for place, array in enumerate((*inputs, *outputs)):
                    objects[place] = id(_NOTHING if array is None else array)
                if self._run_with_tail(context, outputs, self._tail):
                    return outputs
                return self._host.run_schedule(context, setting.n, inputs, outputs, None)
            finally:
                if contexts.release(context):
                    self._host.free()
        except MemoryError as error:
            raise out_of_memory_error(setting.n, error) from error

    def _run_with_tail(self, context: Context, outputs: list[Any], tail: Tail) -> bool:
        """Run the native code and the tail, which fill `outputs`; False if a node of the tail failed.

        Then the caller runs the schedule, whose references report the error. FeedError if a kernel refuses its data.
        """
        if status := self._enter(self._team, context.handle):
            raise self._host.refusal(status)
        made: dict[str, Any] = {}
        with suppress(Exception):
            for run, reads, name in tail.steps:
                made[name] = run(
                    *[(made[of] if of in made else self._value_of(context, of)) if of else it for of, it in reads]
                )
            for place, name in tail.outputs:
                outputs[place] = made[name]
            return True
        return False

    def _value_of(self, context: Context, name: str) -> Any:
        view = context.views.get(name)
        return self._host.view(context, self._setting.n, name) if view is None else view


def out_of_memory_error(n: int, error: MemoryError) -> FeedError:
    return FeedError(f"a batch of {n} needs more memory than there is: {error}")


class Runner(Protocol):
    """The code that a cached call runs: the part of the interface in runner.py that the cache uses."""

    def run(self, n: int, inputs: Sequence[Any]) -> list[Any]: ...


class CodeSource(Protocol):
    """The shape whose code a cached call runs: an entry of the session's cache of executables by shape."""

    def note_run(self, runner: object, rows: int) -> bool:
        """Count a run of `rows` rows that did not enter the shape.

        Returns whether `runner` is still the code of the shape.
        """
        ...

    def is_current(self, runner: object) -> bool:
        """Whether `runner` is still the code of the shape, and the shape has not been evicted."""
        ...


Prepare: TypeAlias = Callable[[int], Run]  # for a batch size


@dataclass(slots=True)
class _CachedCall:
    """How feeds of some shapes run: with `n` rows, by `runner`, as long as that is the code of `source`.

    `prepare` makes the call `run` when these shapes occur again, because many shapes occur only once.
    """

    n: int
    runner: Runner
    source: CodeSource
    prepare: Prepare
    run: Run | None = None

    @property
    def fresh(self) -> bool:
        return self.source.is_current(self.runner)

    def prepared(self) -> Run:
        self.run = self.prepare(self.n)
        return self.run


@dataclass(frozen=True, slots=True)
class _Rows:
    """The expected shape of an input: rows first if `lead`, then the fixed extents `rest`."""

    lead: bool
    rest: tuple[int, ...]

    @staticmethod
    def of(type_: ValueType, batch: str | None) -> _Rows | None:
        if not isinstance(type_, TensorType) or type_.shape is None:
            return None
        lead = bool(type_.shape) and isinstance(type_.shape[0], SymDim) and str(type_.shape[0]) == batch
        rest = tuple(dim for dim in type_.shape[lead:] if isinstance(dim, int))
        return _Rows(lead, rest) if len(rest) == len(type_.shape) - lead else None


class CallCache:
    """A cache of calls, for feeds whose shapes were seen before or differ only in the number of rows.

    Any number of threads may use it.
    """

    def __init__(self, inputs: Mapping[str, ValueType], outputs: Sequence[str], batch: str | None) -> None:
        """`inputs`: the declared types. `outputs`: names. `batch`: the symbol of the number of rows, or None."""
        self._expected = [(name, type_.dtype.numpy) for name, type_ in inputs.items() if isinstance(type_, TensorType)]
        self._outputs = tuple(outputs)
        # Inputs of sequence type have no shape, so they cannot be looked up.
        self._has_only_tensors = len(self._expected) == len(inputs)
        self._rows = [_Rows.of(type_, batch) for type_ in inputs.values()]
        self._calls: dict[Shapes, _CachedCall] = {}
        self._whole: _CachedCall | None = None  # the call whose code is valid for every number of rows
        self._last: object = None  # the runner of the newest entry
        self._lock = threading.Lock()

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any] | None:
        """Outputs by name, from the call cached for feeds of these shapes, or for any number of rows.

        None for feeds that are not contiguous arrays of exactly the right dtypes (text may be of dtype str) and names,
        if no call is cached that serves their shapes, or if its code was replaced or closed: then the caller has to
        check the feeds in full. Errors are those of the run.
        """
        if len(feeds) != len(self._expected):
            return None
        arrays, shapes = [], []
        for name, dtype in self._expected:
            array = feeds.get(name)
            if type(array) is not np.ndarray or not array.flags.c_contiguous:
                return None
            if array.dtype != dtype:
                if array.dtype.kind != "U" or dtype.kind != "O":
                    return None
                array = array.astype(object)  # text: runs get strings of Python
            arrays.append(array)
            shapes.append(array.shape)
        key = tuple(shapes)
        known = self._calls.get(key)
        try:
            if known is not None:
                if known.source.note_run(known.runner, known.n):
                    return dict(zip(self._outputs, (known.run or known.prepared())(arrays), strict=True))
                self._calls.pop(key, None)
            elif (known := self._call_for_other_rows(key)) is not None:
                return dict(zip(self._outputs, known.runner.run(known.n, arrays), strict=True))
        except SessionClosed:  # closed, or replaced by better code just now
            self._calls.pop(key, None)
        return None

    def keep(
        self, arrays: Sequence[Any], n: int, runner: Runner, source: CodeSource, prepare: Prepare, every: bool
    ) -> None:
        """Cache how feeds with the shapes of `arrays` run, as long as `runner` is the code of `source`.

        `prepare` makes the call for batches of `n` rows. `every`: the code is valid for every number of rows. No effect
        for models with inputs that are no tensors.
        """
        if not self._has_only_tensors:
            return
        known = _CachedCall(n, runner, source, prepare)
        self._keep(tuple(array.shape for array in arrays), known)
        if every:
            self._whole = known

    def close(self) -> None:
        with self._lock:
            self._calls.clear()
            self._whole = self._last = None

    def _keep(self, key: Shapes, known: _CachedCall) -> None:
        with self._lock:
            if known.runner is not self._last:  # there is new code, so old code may be gone
                for old in [old for old, each in list(self._calls.items()) if not each.fresh]:
                    self._calls.pop(old, None)
                self._last = known.runner
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            self._calls[key] = known

    def _call_for_other_rows(self, key: Shapes) -> _CachedCall | None:
        whole = self._whole
        if whole is None or not whole.fresh:
            return None
        n = -1
        for shape, rows in zip(key, self._rows, strict=True):
            if rows is None:
                return None
            if not rows.lead:
                if shape != rows.rest:
                    return None
            elif not shape or shape[1:] != rows.rest or n not in (-1, shape[0]):
                return None
            else:
                n = shape[0]
        if n < 0:
            return None
        known = _CachedCall(n, whole.runner, whole.source, whole.prepare)
        self._keep(key, known)
        return known
