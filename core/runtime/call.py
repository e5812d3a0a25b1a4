"""Runs of shapes that were seen before: what follows from the shapes is looked up once, not in every run.

A run of a tiny model is a microsecond of native code or less, so what a call costs is what surrounds it: finding sizes,
making outputs, giving addresses. `Calls` finds by one look at the feeds what is to be called; for code that is one
native segment of the caller's thread, that is a `Call`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from core.errors import FeedError, SessionClosed
from core.ir.types import TensorType, ValueType
from core.runtime.context import Context, Contexts
from core.runtime.native import ContextWord
from core.runtime.team import Team

Run: TypeAlias = Callable[[Sequence[Any]], list[Any]]  # outputs for inputs, of certain shapes
Shapes: TypeAlias = tuple[tuple[int, ...], ...]  # of the inputs, in their order

_KEPT = 256  # shapes; when there are more, they are forgotten together

_NUMBERS = count(1)  # of calls

# Plain integers: a member of an IntEnum costs a lookup each time.
_N, _FIRST, _LAST = int(ContextWord.N), int(ContextWord.FIRST), int(ContextWord.LAST)
_THREADS, _TIMES, _ARRAYS = int(ContextWord.THREADS), int(ContextWord.TIMES), int(ContextWord.ARRAY_COUNT)


class Host(Protocol):
    """The code that a `Call` is of."""

    def new_context(self) -> Context: ...

    def refusal(self, status: int) -> Exception:
        """What a run raises whose status is not 0."""
        ...

    def free(self) -> None: ...


class Call:
    """All steps of a plan, on the caller's thread, for a batch of `n` rows."""

    def __init__(
        self,
        host: Host,
        contexts: Contexts,
        team: Team,
        n: int,
        steps: int,
        arena: int,
        inputs: int,
        outputs: Sequence[tuple[tuple[int, ...], np.dtype[Any]]],
    ) -> None:
        """`arena`: the bytes it needs. `outputs`: shapes and types of all, which follow the inputs in the bases."""
        self._host, self._contexts = host, contexts
        self._enter, self._team = team.enter, team.handle
        self._n, self._steps, self._arena = n, steps, arena
        self._arrays = inputs + len(outputs)
        self._outputs = tuple(outputs)
        self._number = next(_NUMBERS)

    def __call__(self, inputs: Sequence[NDArray[Any]]) -> list[Any]:
        contexts = self._contexts
        try:
            context = contexts.take(self._host.new_context)
            try:
                if context.call != self._number:
                    self._set(context)
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
            raise no_room(self._n, error) from error
        if status:
            raise self._host.refusal(status)
        return outputs

    def _set(self, context: Context) -> None:
        """What no run of this call changes."""
        context.call = 0
        context.make_room(self._arena)
        words = context.words
        words[_N], words[_THREADS], words[_TIMES] = self._n, 1, 0
        words[_FIRST], words[_LAST], words[_ARRAYS] = 0, self._steps, self._arrays
        context.call = self._number


def no_room(n: int, error: MemoryError) -> FeedError:
    return FeedError(f"a batch of {n} needs more memory than there is: {error}")


class Source(Protocol):
    """Where the code of a shape comes from: see shapes.py."""

    used: bool  # by runs that did not ask there

    def gives(self, runner: object) -> bool:
        """Whether this is still what it would give."""
        ...


@dataclass(frozen=True, slots=True)
class _Known:
    run: Run
    runner: object  # whose run it is
    source: Source

    @property
    def fresh(self) -> bool:
        return self.source.gives(self.runner)


class Calls:
    """What to call for feeds whose shapes were seen before. May be asked by any number of threads."""

    def __init__(self, inputs: Mapping[str, ValueType], outputs: Sequence[str]) -> None:
        self._given = [(name, type_.dtype.numpy) for name, type_ in inputs.items() if isinstance(type_, TensorType)]
        self._outputs = tuple(outputs)
        self._takes = len(self._given) == len(inputs)  # sequences have no shape
        self._known: dict[Shapes, _Known] = {}
        self._keeping = threading.Lock()

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any] | None:
        """Outputs by name. None for feeds that are not of exactly the right kind, or were not seen in these shapes:
        whoever gets that has to look closer."""
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
        if known is None:
            return None
        known.source.used = True
        try:
            return dict(zip(self._outputs, known.run(arrays), strict=True))
        except SessionClosed:  # or replaced by better code in this moment
            self._known.pop(key, None)
            return None

    def keep(self, arrays: Sequence[Any], run: Run, runner: object, source: Source) -> None:
        """Have feeds of these shapes run so from now on, as long as `source` gives the same code."""
        if not self._takes:
            return
        with self._keeping:
            fresh = {key: known for key, known in list(self._known.items()) if known.fresh}
            if len(fresh) >= _KEPT:
                fresh.clear()
            fresh[tuple(array.shape for array in arrays)] = _Known(run, runner, source)
            self._known = fresh

    def close(self) -> None:
        with self._keeping:
            self._known = {}
