"""Executables by shape: a small cache in which each one may be replaced by a better one while it is in use.

The life of a shape: nothing -> compiled, as a run had to wait for it or in the background -> tuned, in the background.
The shape that was not used for longest is dropped when there are too many.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

from core.errors import SessionClosed
from core.runtime.background import Background
from core.runtime.call import Run
from core.runtime.given import Given, Sizes
from core.runtime.runner import Runner, serves_none

_OFTEN = 16  # runs of a shape by a lasting stand-in, after which it gets code of its own


@dataclass(frozen=True)
class Made:
    """Code for one shape. `note` says for people what it is; a better one may come later unless it is the `last`."""

    executable: Runner
    note: str = ""
    last: bool = True


Stage: TypeAlias = Callable[[Sizes, Background], Made]  # may let a child process of the background do the work


class StandIn(Protocol):
    """What answers for shapes that have no code of their own yet. Any number of threads may run it."""

    @property
    def prepared(self) -> bool:
        """Whether `prepare` has nothing to do."""

    @property
    def at_hand(self) -> bool:
        """Whether `prepare` takes no time worth mentioning."""

    @property
    def quick(self) -> bool:
        """Whether it is about as fast as code for the shape."""

    @property
    def lasting(self) -> bool:
        """Whether only a shape that comes often is to have code of its own beside it, once it is quick."""

    @property
    def name(self) -> str:
        """What answers, for people."""

    @property
    def runners(self) -> tuple[Runner, ...]:
        """The code that it runs."""

    def call(self, given: Given) -> Run | None:
        """`run` for just these sizes, prepared; None where there is nothing to prepare."""

    def prepare(self, background: Background | None = None) -> None:
        """Do what takes time; with a background, let its child processes do it."""

    def run(self, given: Given, enough: Callable[[], bool]) -> list[Any] | None:
        """Outputs in the model's order; None where it does not answer, or once it is `enough`."""

    def close(self) -> None:
        """Free what it holds once nobody runs it."""


@dataclass(frozen=True)
class Maker:
    """How code for a shape comes to be. `now` takes as long as it takes. The stages of `later` replace each other in
    the background, each one better; without any every run waits for its shape.

    What is `at_hand` takes `now` no time. `general` answers in the meantime, if there is something that can. `first`:
    also a session's first shape may wait for the background, instead of making the first run wait; so may it where
    `general` is quick.
    """

    now: Callable[[Sizes], Made]
    later: tuple[Stage, ...] = ()
    at_hand: Callable[[Sizes], bool] = lambda binding: False
    general: StandIn | None = None
    first: bool = False


@dataclass(eq=False)
class _Held:
    """What is made, the threads that use it, and whether nobody else will: then the last one closes it."""

    made: Made
    users: int = 0
    dropped: bool = False

    @property
    def idle(self) -> bool:
        return self.dropped and self.users == 0


@dataclass(eq=False)
class Shape:
    """One shape, as those see it who want to run it."""

    binding: Sizes
    making: threading.Lock = field(default_factory=threading.Lock)  # held by the run that compiles for all who wait
    held: _Held | None = None
    users: int = 0
    dropped: bool = False  # from the cache
    pending: bool = False  # something is being made in the background
    answering: threading.Lock = field(default_factory=threading.Lock)  # held while the general version does
    resting_until: float = 0.0  # when it may again, by the monotonic clock
    runs: int = 0  # that a lasting stand-in has answered
    used: bool = False  # by runs that did not ask for it here, since somebody looked last
    standing: Runner | None = None  # the lasting stand-in that answers as long as there is nothing better
    often: Callable[[], None] = lambda: None  # what is done once the stand-in has answered often

    @property
    def ready(self) -> bool:
        return self.held is not None

    @property
    def serves(self) -> bool:
        """Whether there is code that answers, or will be."""
        return self.held is None or not serves_none(self.held.made.executable)

    @property
    def wanted(self) -> bool:
        """Whether somebody will run it."""
        return self.users > 0 or not self.dropped

    def use(self, runner: object) -> bool:
        """Note a run by this runner, and say whether that is still what this shape gives. A shape that comes often gets
        code of its own."""
        self.used = True
        held = self.held
        if held is not None:
            return runner is held.made.executable
        self.runs += 1
        if self.runs == _OFTEN:
            self.often()
        return runner is self.standing

    def gives(self, runner: object) -> bool:
        """Whether this is its code, or what stands in for that, which nothing has replaced."""
        return not self.dropped and runner is (self.held.made.executable if self.held is not None else self.standing)

    def state(self, meanwhile: str, coming: bool) -> str:
        """How far it has come, for people. `meanwhile`: what serves before there is code; "" where nothing does.
        `coming`: whether code that answers is being made."""
        if self.held is None and not coming and meanwhile:
            return f"{meanwhile} serves"
        if self.held is None:
            return "being compiled" + (f"; {meanwhile} serves meanwhile" if meanwhile else "")
        return self.held.made.note + ("; being tuned in the background" if self.pending else "")

    def hold(self, made: Made) -> _Held | None:
        """Replace what there was; the answer is that, if nobody uses it any more."""
        before, self.held = self.held, _Held(made)
        return _dropped(before)

    def drop(self) -> _Held | None:
        """From the cache. The answer can be closed."""
        self.dropped = True
        return self.unwanted()

    def unwanted(self) -> _Held | None:
        """What can be closed because nobody will run this shape again. Those who are in it may still ask for it."""
        return None if self.wanted else _dropped(self.held)


def _dropped(held: _Held | None) -> _Held | None:
    if held is not None:
        held.dropped = True
    return held if held is not None and held.idle else None


class Shapes:
    """A small cache of executables. Making one holds up only those who want the same shape."""

    def __init__(self, maker: Maker, limit: int, fixed: Made | None = None) -> None:
        """`fixed` is what a model has that depends on nothing but the batch size: the shape without values."""
        self._maker = maker
        self._limit = limit
        self._shapes: OrderedDict[Sizes, Shape] = OrderedDict()
        self._changed = threading.Condition()
        self._runners: WeakSet[Runner] = WeakSet()
        self._backgrounds = [Background() for _ in maker.later]
        self._preparing = False  # what stands in, in the background
        self._closed = False
        if fixed is not None:
            shape = self._shapes[()] = Shape(())
            self._put(shape, fixed)
            self._follow(shape, fixed, 1)

    @property
    def closed(self) -> bool:
        return self._closed

    @contextmanager
    def enter(self, binding: Sizes) -> Iterator[Shape]:
        """The shape of these values, which the block may ask for its executable. SessionClosed after `close`."""
        if binding not in self._shapes:
            self._prepare(binding)
        shape = self._enter(binding)
        try:
            yield shape
        finally:
            self._leave(shape)

    @contextmanager
    def executable(self, shape: Shape) -> Iterator[Runner]:
        """Code that stays usable inside the block, whatever replaces or drops it meanwhile; waits until there is some.

        Raises whatever making it raises."""
        with shape.making:
            held = self._take(shape)
            while held is None:
                self._make(shape)
                held = self._take(shape)
        try:
            yield held.made.executable
        finally:
            self._give(held)

    def meanwhile(self, shape: Shape, given: Given) -> list[Any] | None:
        """What the general version answers while there is no code, if it does.

        One that is not quick answers one run at a time, and rests for as long as it took: the processors are for those
        who compile. The other runs wait for one that is being prepared.
        """
        general = self._maker.general
        if general is None or shape.ready:
            return None
        if general.lasting and general.quick:
            results = general.run(given, lambda: False)
            if results is not None:
                shape.standing = general.runners[0] if general.runners else None
                shape.use(shape.standing)
            return results
        if not self._coming(shape):
            return None
        if not general.quick and shape.answering.acquire(blocking=False):
            try:
                results = self._slowly(general, shape, given)
            finally:
                shape.answering.release()
            if results is not None:
                return results
        with self._changed:
            self._changed.wait_for(lambda: general.prepared or shape.ready or not self._coming(shape) or self._closed)
        return general.run(given, lambda: False) if general.quick and not shape.ready else None

    def _slowly(self, general: StandIn, shape: Shape, given: Given) -> list[Any] | None:
        """By what is not quick, after a rest; None once there is something better."""

        def enough() -> bool:
            return shape.ready or general.quick

        with self._changed:
            rest = max(shape.resting_until - time.monotonic(), 0.0)
            self._changed.wait_for(lambda: enough() or not self._coming(shape), rest)
        started = time.monotonic()
        results = general.run(given, enough)
        shape.resting_until = 2 * time.monotonic() - started
        return results

    def made(self) -> dict[Sizes, Runner]:
        """What exists now, the most recently used last."""
        with self._changed:
            return {binding: s.held.made.executable for binding, s in self._shapes.items() if s.held is not None}

    def runners(self) -> list[Runner]:
        """All code, and what was replaced, dropped or closed as long as somebody runs it."""
        general = self._maker.general
        with self._changed:
            return [*self._runners, *(general.runners if general is not None else ())]

    def standing_call(self, shape: Shape, given: Given) -> Run | None:
        """How the lasting stand-in runs these sizes, where it answers for the shape."""
        general = self._maker.general
        return general.call(given) if general is not None and shape.standing is not None else None

    def standing(self) -> tuple[Runner, ...]:
        """The code of a stand-in that most shapes need nothing beside."""
        general = self._maker.general
        return general.runners if general is not None and general.lasting else ()

    def states(self) -> dict[Sizes, str]:
        """How far every shape has come."""
        name = self._maker.general.name if self._maker.general is not None else ""
        with self._changed:
            return {binding: shape.state(name, self._coming(shape)) for binding, shape in self._shapes.items()}

    def prepare(self) -> None:
        """Load what stands in, where that takes no time worth mentioning."""
        general = self._maker.general
        if general is not None and general.at_hand and not self._closed:
            general.prepare()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being made in the background; whether that was so in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._preparing and not any(s.pending for s in self._shapes.values()), timeout
            )

    def close(self) -> None:
        """End the work in the background, and free everything as soon as nobody uses it."""
        with self._changed:
            self._closed = True
            shapes = list(self._shapes.values())
            self._shapes.clear()
            idle = [shape.drop() for shape in shapes]
            self._changed.notify_all()
        _close(*idle)
        for background in self._backgrounds:
            background.close()
        if self._maker.general is not None:
            self._maker.general.close()

    # -- one shape ------------------------------------------------------------------------------------------------

    def _prepare(self, binding: Sizes) -> None:
        """Before a new shape is there, have what answers for it: in this run, unless runs are to wait for nothing."""
        general = self._maker.general
        if general is None or general.prepared or self._closed or self._maker.at_hand(binding):
            return
        if general.at_hand or not self._maker.first:
            general.prepare()
            return
        with self._changed:
            submit, self._preparing = not self._preparing, True
        if submit:
            self._backgrounds[0].submit(lambda: self._prepare_beside(general))

    def _prepare_beside(self, general: StandIn) -> None:
        general.prepare(self._backgrounds[0])
        with self._changed:
            self._preparing = False
            if general.lasting and not general.quick:  # it failed: every shape needs code of its own
                for shape in self._shapes.values():
                    if not shape.ready and not shape.pending:
                        self._submit(shape, 0)
            self._changed.notify_all()

    def _enter(self, binding: Sizes) -> Shape:
        with self._changed:
            if self._closed:
                raise SessionClosed("the session is closed")
            if binding not in self._shapes:
                self._begin(binding)
            shape = self._shapes[binding]
            self._shapes.move_to_end(binding)
            shape.users += 1
            surplus = self._surplus() if len(self._shapes) > self._limit else None
            idle = surplus.drop() if surplus is not None else None
        _close(idle)
        return shape

    def _surplus(self) -> Shape:
        """What was not asked for longest goes out of the cache. What runs have used meanwhile has a second chance."""
        while True:
            binding, shape = self._shapes.popitem(last=False)
            if not shape.used:
                return shape
            shape.used, self._shapes[binding] = False, shape

    def _begin(self, binding: Sizes) -> None:
        """A new shape: it is made in the background unless the first run had better wait for it."""
        general = self._maker.general
        served = any(shape.serves for shape in self._shapes.values())
        waits = not served and not self._maker.first and (general is None or not general.quick)
        shape = self._shapes[binding] = Shape(binding)
        shape.often = partial(self._often, shape)
        stands_in = general is not None and general.lasting and (general.quick or self._preparing)
        if not waits and not stands_in and not self._maker.at_hand(binding):
            self._submit(shape, 0)

    def _often(self, shape: Shape) -> None:
        """Have code of its own made for a shape that comes often."""
        with self._changed:
            if not shape.ready and not shape.pending and not shape.dropped:
                self._submit(shape, 0)

    def _coming(self, shape: Shape) -> bool:
        """Whether something that answers for the shape is being made in the background."""
        general = self._maker.general
        return shape.pending or (self._preparing and general is not None and general.lasting)

    def _leave(self, shape: Shape) -> None:
        """A shape that nobody could make is forgotten: the next run tries again."""
        with self._changed:
            shape.users -= 1
            idle = shape.unwanted()
            failed = shape.held is None and shape.users == 0 and not shape.pending and shape.runs == 0
            if failed and self._shapes.get(shape.binding) is shape:
                del self._shapes[shape.binding]
        _close(idle)

    def _submit(self, shape: Shape, stage: int) -> None:
        """Let the background do this stage, if there is one."""
        shape.pending = stage < len(self._backgrounds)
        if shape.pending:
            self._backgrounds[stage].submit(lambda: self._improve(shape, stage))

    def _improve(self, shape: Shape, stage: int) -> None:
        """In the background: make the executable of a stage, and let the next stage follow.

        What goes wrong is left to the next run, which compiles by itself, and so meets the error where it belongs.
        """
        made = None
        with suppress(Exception):
            if shape.wanted:
                made = self._maker.later[stage](shape.binding, self._backgrounds[stage])
                self._put(shape, made)
        self._follow(shape, made, stage + 1)

    def _follow(self, shape: Shape, made: Made | None, stage: int) -> None:
        with self._changed:
            shape.pending = False
            if made is not None and not made.last and shape.wanted:
                self._submit(shape, stage)
            self._changed.notify_all()

    def _make(self, shape: Shape) -> None:
        """In the run that needs it."""
        made = self._maker.now(shape.binding)
        self._put(shape, made)
        self._follow(shape, made, 1)

    def _put(self, shape: Shape, made: Made) -> None:
        """Replace what there was."""
        with self._changed:
            before = shape.hold(made)
            self._runners.add(made.executable)
            idle = shape.unwanted()
            self._changed.notify_all()
        _close(before, idle)

    def _take(self, shape: Shape) -> _Held | None:
        """What there is, or what comes from the background; None when this thread has to make it."""
        with self._changed:
            self._changed.wait_for(lambda: shape.held is not None or not shape.pending or self._closed)
            if shape.held is not None:
                shape.held.users += 1
            elif self._closed:
                raise SessionClosed("the session is closed")
            return shape.held

    def _give(self, held: _Held) -> None:
        with self._changed:
            held.users -= 1
            idle = held if held.idle else None
        _close(idle)


def _close(*idle: _Held | None) -> None:
    for held in idle:
        if held is not None:
            held.made.executable.close()
