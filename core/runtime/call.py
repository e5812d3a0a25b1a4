"""Runs of shapes that were seen before: what follows from the shapes is looked up once, not in every run.

A run of a tiny model is a microsecond of native code or less, so what a call costs is what surrounds it: finding sizes,
making outputs, giving addresses. `Calls` finds by one look at the feeds what is to be called; for code that is one
native segment of the caller's thread, that is a `Call`.
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

from core.errors import FeedError, SessionClosed
from core.ir.dim import SymDim
from core.ir.types import TensorType, ValueType
from core.runtime.context import Context, Contexts
from core.runtime.layouts import Layout
from core.runtime.memory import address_of
from core.runtime.native import ContextWord
from core.runtime.team import Team

Run: TypeAlias = Callable[[Sequence[Any]], list[Any]]  # outputs for inputs, of certain shapes
Form: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]  # of an output: its shape, its type
Shapes: TypeAlias = tuple[tuple[int, ...], ...]  # of the inputs, in their order

_KEPT = 256  # shapes; when there are more, they are forgotten together

_NUMBERS = count(1)  # of calls

# Plain integers: a member of an IntEnum costs a lookup each time.
_N, _FIRST, _LAST = int(ContextWord.N), int(ContextWord.FIRST), int(ContextWord.LAST)
_THREADS, _TIMES, _ARRAYS = int(ContextWord.THREADS), int(ContextWord.TIMES), int(ContextWord.ARRAY_COUNT)
_SLOTS = int(ContextWord.SLOTS)


class Host(Protocol):
    """The code that a call is of."""

    def new_context(self) -> Context: ...

    def run_schedule(
        self, context: Context, n: int, inputs: Sequence[Any], outputs: list[Any], times: None
    ) -> list[Any]: ...

    def view(self, context: Context, n: int, name: str) -> Any:
        """A value that native code has written."""
        ...

    def refusal(self, status: int) -> Exception:
        """What a run raises whose status is not 0."""
        ...

    def free(self) -> None: ...


class Setting:
    """What no run of a call changes: the batch size, so many steps, bytes of the arena, arrays that are ports. A
    context is set once, and again after it has served another call."""

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


class SizedSetting(Setting):
    """The same for code for any sizes: kernels find the table of sizes where the batch size is otherwise."""

    def __init__(self, layout: Layout, steps: int, ports: int, threads: int) -> None:
        super().__init__(address_of(layout.sizes), steps, layout.arena, ports)
        self._layout, self._on = layout, threads  # the layout's tables live as long as the setting

    def apply(self, context: Context) -> None:
        super().apply(context)
        context.words[_THREADS] = self._on
        context.words[_SLOTS] = address_of(self._layout.slots)


class Call:
    """All steps of a plan on the caller's thread, as one native call."""

    def __init__(self, host: Host, contexts: Contexts, team: Team, setting: Setting, outputs: Sequence[Form]) -> None:
        self._host, self._contexts, self._setting = host, contexts, setting
        self._enter, self._team = team.enter, team.handle
        self._number = setting.number
        self._outputs = tuple(outputs)

    def __call__(self, inputs: Sequence[NDArray[Any]], stamps: NDArray[np.int64] | None = None) -> list[Any]:
        """`stamps` receive the driver's clock: at the start and after each step."""
        contexts = self._contexts
        try:
            context = contexts.take(self._host.new_context)
            try:
                if context.call != self._number:
                    self._setting.apply(context)
                if stamps is not None:
                    context.call, context.words[_TIMES] = 0, address_of(stamps)  # the next run sets the words again
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
                if contexts.give(context):
                    self._host.free()
        except MemoryError as error:
            raise no_room(self._setting.n, error) from error
        if status:
            raise self._host.refusal(status)
        return outputs


_NOTHING = np.empty(0, np.uint8)


class Tail(NamedTuple):
    """Nodes that run behind native code."""

    # Functions of their arguments (see OpDef.quickly), names of these, or "" and a constant, and the result's name.
    steps: Sequence[tuple[Callable[..., Any], Sequence[tuple[str, Any]], str]]
    outputs: Sequence[tuple[int, str]]  # places of results among the outputs


class Finished:
    """As `Call`, with simple nodes on their references behind it."""

    def __init__(
        self,
        host: Host,
        contexts: Contexts,
        team: Team,
        setting: Setting,
        outputs: Sequence[Form | None],
        tail: Tail,
    ) -> None:
        """`outputs`: None for those that a reference makes."""
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
                if self._finished(context, outputs, self._tail):
                    return outputs
                return self._host.run_schedule(context, setting.n, inputs, outputs, None)
            finally:
                if contexts.give(context):
                    self._host.free()
        except MemoryError as error:
            raise no_room(setting.n, error) from error

    def _finished(self, context: Context, outputs: list[Any], tail: Tail) -> bool:
        """Whether native code and the tail have run. If not, the schedule runs, whose references say what is wrong."""
        if status := self._enter(self._team, context.handle):
            raise self._host.refusal(status)
        made: dict[str, Any] = {}
        with suppress(Exception):
            for run, reads, name in tail.steps:
                made[name] = run(
                    *[(made[of] if of in made else self._seen(context, of)) if of else it for of, it in reads]
                )
            for place, name in tail.outputs:
                outputs[place] = made[name]
            return True
        return False

    def _seen(self, context: Context, name: str) -> Any:
        view = context.views.get(name)
        return self._host.view(context, self._setting.n, name) if view is None else view


def no_room(n: int, error: MemoryError) -> FeedError:
    return FeedError(f"a batch of {n} needs more memory than there is: {error}")


class Runner(Protocol):
    """What runs: see runner.py."""

    def run(self, n: int, inputs: Sequence[Any]) -> list[Any]: ...


class Source(Protocol):
    """Where the code of a shape comes from: see shapes.py."""

    def use(self, runner: object) -> bool:
        """A run that did not ask there uses this runner. Whether it still may: nothing better has come."""
        ...

    def gives(self, runner: object) -> bool:
        """Whether this is still what it would give."""
        ...


Prepare: TypeAlias = Callable[[int], Run]  # for a batch size


@dataclass(slots=True)
class _Known:
    """How a shape runs. It is prepared when it comes for the second time: many a shape comes only once."""

    n: int
    runner: Runner
    source: Source
    prepare: Prepare
    run: Run | None = None

    @property
    def fresh(self) -> bool:
        return self.source.gives(self.runner)

    def prepared(self) -> Run:
        self.run = self.prepare(self.n)
        return self.run


@dataclass(frozen=True, slots=True)
class _Rows:
    """An input whose shape is known but for the number of rows."""

    lead: bool
    rest: tuple[int, ...]

    @staticmethod
    def of(type_: ValueType, batch: str | None) -> _Rows | None:
        if not isinstance(type_, TensorType) or type_.shape is None:
            return None
        lead = bool(type_.shape) and isinstance(type_.shape[0], SymDim) and str(type_.shape[0]) == batch
        rest = tuple(dim for dim in type_.shape[lead:] if isinstance(dim, int))
        return _Rows(lead, rest) if len(rest) == len(type_.shape) - lead else None


class Calls:
    """What to call for feeds whose shapes were seen before, or differ from such in the number of rows alone. May be
    asked by any number of threads."""

    def __init__(self, inputs: Mapping[str, ValueType], outputs: Sequence[str], batch: str | None) -> None:
        """`batch`: the symbol of rows."""
        self._given = [(name, type_.dtype.numpy) for name, type_ in inputs.items() if isinstance(type_, TensorType)]
        self._outputs = tuple(outputs)
        self._takes = len(self._given) == len(inputs)  # sequences have no shape
        self._rows = [_Rows.of(type_, batch) for type_ in inputs.values()]
        self._known: dict[Shapes, _Known] = {}
        self._whole: _Known | None = None  # with code for every number of rows
        self._last: object = None  # the runner that was kept last
        self._keeping = threading.Lock()

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any] | None:
        """Outputs by name. None for feeds that are not of exactly the right kind, or of new shapes: whoever gets that
        has to look closer."""
        if len(feeds) != len(self._given):
            return None
        arrays, shapes = [], []
        for name, dtype in self._given:
            array = feeds.get(name)
            if type(array) is not np.ndarray or array.dtype != dtype or not array.flags.c_contiguous:
                return None
            arrays.append(array)
            shapes.append(array.shape)
        key = tuple(shapes)
        known = self._known.get(key)
        try:
            if known is not None:
                if known.source.use(known.runner):
                    return dict(zip(self._outputs, (known.run or known.prepared())(arrays), strict=True))
                self._known.pop(key, None)
            elif (known := self._of_other_rows(key)) is not None:
                return dict(zip(self._outputs, known.runner.run(known.n, arrays), strict=True))
        except SessionClosed:  # or replaced by better code in this moment
            self._known.pop(key, None)
        return None

    def keep(
        self, arrays: Sequence[Any], n: int, runner: Runner, source: Source, prepare: Prepare, every: bool
    ) -> None:
        """Have feeds of these shapes run so from now on, as long as `source` gives the same code. `every`: it is for
        every number of rows."""
        if not self._takes:
            return
        known = _Known(n, runner, source, prepare)
        self._keep(tuple(array.shape for array in arrays), known)
        if every:
            self._whole = known

    def close(self) -> None:
        with self._keeping:
            self._known.clear()
            self._whole = self._last = None

    def _keep(self, key: Shapes, known: _Known) -> None:
        with self._keeping:
            if known.runner is not self._last:  # code has come, so other code may have gone
                for old in [old for old, each in list(self._known.items()) if not each.fresh]:
                    self._known.pop(old, None)
                self._last = known.runner
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = known

    def _of_other_rows(self, key: Shapes) -> _Known | None:
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
        known = _Known(n, whole.runner, whole.source, whole.prepare)
        self._keep(key, known)
        return known
