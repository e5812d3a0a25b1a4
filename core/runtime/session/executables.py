"""Executables by shape: a small cache whose entries may be replaced by better code while they are in use.

The life of a shape: nothing -> compiled, either by a run that waits for it or in the background -> tuned, in the
background. If there are too many shapes, the least recently used one is dropped.
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

from lathe.core.errors import SessionClosed
from lathe.core.runtime.session.background import Background
from lathe.core.runtime.session.prepared_calls import Run
from lathe.core.runtime.session.run_inputs import CodeBinding, RunInputs
from lathe.core.runtime.session.runner import Runner, serves_none

_FREQUENT_RUNS = 16  # runs of a shape by a lasting stand-in before the shape gets code of its own
_COUNTED_ROWS = 64  # batch sizes of a shape whose runs are counted separately


@dataclass(frozen=True)
class ShapeCode:
    """Code for one shape. `note` describes it in reports for people. If it is not `last`, better code will follow."""

    executable: Runner
    note: str = ""
    last: bool = True


# May do the work in a child process of the background. None: the stand-in is better than code for the shape.
Stage: TypeAlias = Callable[[CodeBinding, Background], ShapeCode | None]


class StandIn(Protocol):
    """Code that answers for shapes that have none of their own yet. Any number of threads may run it."""

    @property
    def prepared(self) -> bool:
        """Whether `prepare` has nothing left to do, or has failed."""

    @property
    def is_cached(self) -> bool:
        """Whether `prepare` takes negligible time, because it only loads from a cache."""

    @property
    def quick(self) -> bool:
        """Whether it is about as fast as code for the shape; false until it is prepared."""

    @property
    def is_lasting(self) -> bool:
        """Whether shapes keep using it once it is quick, so that only a frequent shape gets code of its own."""

    @property
    def failure(self) -> str | None:
        """Why `prepare` failed; None if it did not."""

    @property
    def name(self) -> str:
        """Its name in reports for people."""

    @property
    def runners(self) -> tuple[Runner, ...]:
        """The compiled code that it runs; empty if there is none, or none yet."""

    def call(self, given: RunInputs) -> Run | None:
        """A prepared function from inputs of the sizes in `given` to outputs.

        None if the stand-in has no code (yet), or its code does not serve these sizes.
        """

    def prepare(self, background: Background | None = None) -> None:
        """Do the slow work (compiling) in advance; with a background, in its child processes."""

    def run(self, given: RunInputs, enough: Callable[[], bool]) -> list[Any] | None:
        """Outputs in the model's order.

        None if it does not answer for these sizes, or stopped because `enough`, which it asks now and then, returned
        true.
        """

    def close(self) -> None:
        """Free its resources once no thread runs it."""


@dataclass(frozen=True)
class ShapeCompiler:
    """How code for a shape is compiled.

    `now` compiles in the calling thread. `later` are stages in the background. If a stage returns None, the stand-in
    serves the shape permanently. Stage 0 compiles instead of `now`, for a shape that no run has to wait for. Each
    further stage replaces the code of the one before, or of `now`, unless that code is `last`. Without stages, a run
    waits for code of its shape, unless the stand-in serves it. `is_cached` says whether `now` only has to load cached
    code. `general` is the stand-in, if there is one.

    While no shape is cached, as in the first run of a session, or only shapes whose code is a placeholder
    (`serves_none`), a run waits for code of its shape, unless `first` is true or the stand-in is quick. With `first`,
    which needs a stage, a stand-in that is not in the cache is prepared in the background.
    """

    now: Callable[[CodeBinding], ShapeCode]
    later: tuple[Stage, ...] = ()
    is_cached: Callable[[CodeBinding], bool] = lambda binding: False
    general: StandIn | None = None
    first: bool = False


@dataclass(eq=False)
class _Held:
    """Code and the number of runs that use it. Once it is dropped, the last of them closes it."""

    made: ShapeCode
    users: int = 0
    dropped: bool = False

    @property
    def idle(self) -> bool:
        return self.dropped and self.users == 0


@dataclass(eq=False)
class Shape:
    """An entry of `ShapeCache`: the code of one shape (`held`), its stand-in, and the number of its users."""

    binding: CodeBinding
    compile_lock: threading.Lock = field(
        default_factory=threading.Lock
    )  # held by the run that compiles; others wait for it
    held: _Held | None = None
    users: int = 0
    dropped: bool = False  # from the cache
    pending: bool = False  # code is being compiled in the background
    answering: threading.Lock = field(default_factory=threading.Lock)  # held while a slow stand-in answers
    resting_until: float = 0.0  # when the slow stand-in may answer again (monotonic clock)
    runs: int = 0  # answered by a lasting stand-in, or by the reference runner until that is prepared
    runs_by_rows: dict[int, int] = field(default_factory=dict)  # the same by batch size, for at most `_COUNTED_ROWS`
    requested: bool = False  # `on_frequent` was called
    used: bool = False  # by runs through the call cache, since the last eviction pass
    standing: Runner | None = None  # the lasting stand-in that answers until there is better code
    on_frequent: Callable[[], None] = lambda: None  # called once the stand-in has answered `_FREQUENT_RUNS` runs

    @property
    def ready(self) -> bool:
        return self.held is not None

    @property
    def can_answer(self) -> bool:
        """Whether this shape has no code yet, or code that is more than a placeholder (`serves_none`)."""
        return self.held is None or not serves_none(self.held.made.executable)

    @property
    def wanted(self) -> bool:
        """Whether a run uses this shape now, or may still ask for it, because it is in the cache."""
        return self.users > 0 or not self.dropped

    def note_run(self, runner: object, rows: int) -> bool:
        """Count a run of `rows` rows by `runner`; returns whether that is still the code of this shape.

        While there is no code, the stand-in counts as the code.
        """
        self.used = True
        held = self.held
        if held is not None:
            return runner is held.made.executable
        self.count_run(rows)
        return runner is self.standing

    def count_run(self, rows: int) -> None:
        """Count a run that no code of this shape answered; run number `_FREQUENT_RUNS` requests such code."""
        self.runs += 1
        by_rows = self.runs_by_rows
        if rows in by_rows or len(by_rows) < _COUNTED_ROWS:
            by_rows[rows] = by_rows.get(rows, 0) + 1
        if self.runs >= _FREQUENT_RUNS and not self.requested:
            self.requested = True
            self.on_frequent()

    def is_current(self, runner: object) -> bool:
        """Whether the shape is still cached, and `runner` is its code, or its stand-in while there is no code."""
        return not self.dropped and runner is (self.held.made.executable if self.held is not None else self.standing)

    def state(self, meanwhile: str, coming: bool) -> str:
        """The state of the shape in words, such as "being compiled".

        `meanwhile`: the name of the stand-in, "" if there is none. `coming`: whether code that answers is being
        compiled.
        """
        if self.held is None and not coming and meanwhile:
            return f"{meanwhile} serves"
        if self.held is None:
            return "being compiled" + (f"; {meanwhile} serves meanwhile" if meanwhile else "")
        return self.held.made.note + ("; being tuned in the background" if self.pending else "")

    def hold(self, made: ShapeCode) -> _Held | None:
        """Replace the code by `made`. Returns the previous code if no run uses it, for the caller to close."""
        before, self.held = self.held, _Held(made)
        return _mark_dropped(before)

    def drop(self) -> _Held | None:
        """Mark the shape as evicted. Returns its code if no run uses the shape, for the caller to close."""
        self.dropped = True
        return self.code_to_close()

    def code_to_close(self) -> _Held | None:
        """The code, if the shape is evicted and neither it nor its code is in use; otherwise None."""
        return None if self.wanted else _mark_dropped(self.held)


def _mark_dropped(held: _Held | None) -> _Held | None:
    if held is not None:
        held.dropped = True
    return held if held is not None and held.idle else None


class ShapeCache:
    """An LRU cache of executables by shape. Compiling one blocks only the runs that want the same shape."""

    def __init__(self, maker: ShapeCompiler, limit: int, fixed: ShapeCode | None = None) -> None:
        """`limit`: the most shapes. `fixed`: the code of a model whose only symbol is the batch size.

        The binding of `fixed` is empty.
        """
        self._maker = maker
        self._limit = limit
        self._shapes: OrderedDict[CodeBinding, Shape] = OrderedDict()
        self._changed = threading.Condition()
        self._runners: WeakSet[Runner] = WeakSet()
        self._backgrounds = [Background() for _ in maker.later]
        self._preparing = False  # the stand-in is being prepared in the background
        self._closed = False
        if fixed is not None:
            shape = self._shapes[()] = Shape(())
            self._replace(shape, fixed)
            self._submit_next(shape, fixed, 1)

    @property
    def closed(self) -> bool:
        return self._closed

    @contextmanager
    def enter(self, binding: CodeBinding, earlier_runs: int = 0) -> Iterator[Shape]:
        """The cache entry for these values of symbols, made if missing; it stays valid inside the block.

        `earlier_runs`: how many runs of these values a stand-in answered under another binding, one without the batch
        size. A new entry counts them as its own. SessionClosed after `close`.
        """
        if binding not in self._shapes:
            self._prepare(binding)
        shape = self._enter(binding, earlier_runs)
        try:
            yield shape
        finally:
            self._leave(shape)

    @contextmanager
    def executable(self, shape: Shape) -> Iterator[Runner]:
        """Context manager: the code of a shape, which stays usable inside the block even if it is replaced or dropped.

        Waits until it is compiled, or compiles it in this thread; raises whatever compiling raises. SessionClosed if
        there is no code and the cache is closed.
        """
        with shape.compile_lock:
            held = self._acquire_code(shape)
            while held is None:
                self._compile_now(shape)
                held = self._acquire_code(shape)
        try:
            yield held.made.executable
        finally:
            self._release_code(held)

    def stand_in_answer(self, shape: Shape, given: RunInputs) -> list[Any] | None:
        """The outputs of the stand-in, if there is no code for the shape and the stand-in answers; otherwise None.

        A stand-in that is not quick answers one run of a shape at a time, and then rests for as long as that run took,
        so that the processors are free for compiling. The other runs wait until the shape has code, or the stand-in has
        become quick and answers.
        """
        general = self._maker.general
        if general is None or shape.ready:
            return None
        if general.is_lasting and general.quick:
            results = general.run(given, lambda: False)
            if results is not None:
                shape.standing = general.runners[0] if general.runners else None
                shape.note_run(shape.standing, given.rows)
            return results
        if not self._is_coming(shape):
            return None
        if not general.quick and shape.answering.acquire(blocking=False):
            try:
                results = self._run_slow(general, shape, given)
            finally:
                shape.answering.release()
            if results is not None:
                if general.is_lasting:
                    shape.count_run(given.rows)
                return results
        with self._changed:
            self._changed.wait_for(
                lambda: general.prepared or shape.ready or not self._is_coming(shape) or self._closed
            )
        return general.run(given, lambda: False) if general.quick and not shape.ready else None

    def _run_slow(self, general: StandIn, shape: Shape, given: RunInputs) -> list[Any] | None:
        """The outputs of a stand-in that is not quick, after its rest; None if it does not answer.

        It stops, and returns None, once the shape has code or the stand-in has become quick.
        """

        def enough() -> bool:
            return shape.ready or general.quick

        with self._changed:
            rest = max(shape.resting_until - time.monotonic(), 0.0)
            self._changed.wait_for(lambda: enough() or not self._is_coming(shape), rest)
        started = time.monotonic()
        results = general.run(given, enough)
        shape.resting_until = 2 * time.monotonic() - started
        return results

    def cached_runners(self) -> dict[CodeBinding, Runner]:
        """The code that cached shapes have now, by binding, the most recently used last."""
        with self._changed:
            return {binding: s.held.made.executable for binding, s in self._shapes.items() if s.held is not None}

    def runners(self) -> list[Runner]:
        """All code that exists now, the stand-in's, too; includes replaced, dropped or closed code that runs use."""
        general = self._maker.general
        with self._changed:
            return [*self._runners, *(general.runners if general is not None else ())]

    def stand_in_call(self, shape: Shape, given: RunInputs) -> Run | None:
        """The stand-in's prepared call for these sizes, if a lasting stand-in answers for the shape; otherwise None."""
        general = self._maker.general
        return general.call(given) if general is not None and shape.standing is not None else None

    def stand_in_failure(self) -> str | None:
        """Why the stand-in could not be prepared; None if it was, if that was not tried yet, or without one."""
        return self._maker.general.failure if self._maker.general is not None else None

    def standing(self) -> tuple[Runner, ...]:
        """The runners of a lasting stand-in, which serve most shapes; empty without such a stand-in."""
        general = self._maker.general
        return general.runners if general is not None and general.is_lasting else ()

    def states(self) -> dict[CodeBinding, str]:
        """The state of every cached shape in words, such as "being compiled", by binding."""
        name = self._maker.general.name if self._maker.general is not None else ""
        with self._changed:
            return {binding: shape.state(name, self._is_coming(shape)) for binding, shape in self._shapes.items()}

    def prepare(self) -> None:
        """Prepare the stand-in if that only loads it from a cache."""
        general = self._maker.general
        if general is not None and general.is_cached and not self._closed:
            general.prepare()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is compiled in the background. False if that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._preparing and not any(s.pending for s in self._shapes.values()), timeout
            )

    def close(self) -> None:
        """Stop the background work, and free all code once no thread uses it."""
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

    def _prepare(self, binding: CodeBinding) -> None:
        """Prepare the stand-in, if necessary, before a new shape begins.

        This happens in the background if the maker allows that (`first`) and the stand-in is not cached, otherwise in
        this thread.
        """
        general = self._maker.general
        if general is None or general.prepared or self._closed or self._maker.is_cached(binding):
            return
        if general.is_cached or not self._maker.first:
            general.prepare()
            return
        with self._changed:
            submit, self._preparing = not self._preparing, True
        if submit:
            self._backgrounds[0].submit(lambda: self._prepare_in_background(general))

    def _prepare_in_background(self, general: StandIn) -> None:
        general.prepare(self._backgrounds[0])
        with self._changed:
            self._preparing = False
            if general.is_lasting and not general.quick:  # preparing failed: every shape needs code of its own
                for shape in self._shapes.values():
                    if not shape.ready and not shape.pending:
                        self._submit(shape, 0)
            self._changed.notify_all()

    def _enter(self, binding: CodeBinding, earlier_runs: int) -> Shape:
        with self._changed:
            if self._closed:
                raise SessionClosed("the session is closed")
            if binding not in self._shapes:
                self._add_shape(binding, earlier_runs)
            shape = self._shapes[binding]
            self._shapes.move_to_end(binding)
            shape.users += 1
            surplus = self._evict() if len(self._shapes) > self._limit else None
            idle = surplus.drop() if surplus is not None else None
        _close(idle)
        return shape

    def _evict(self) -> Shape:
        """Take the least recently entered shape out of the cache and return it.

        A shape that runs have used through the call cache since the last pass is spared once.
        """
        while True:
            binding, shape = self._shapes.popitem(last=False)
            if not shape.used:
                return shape
            shape.used, self._shapes[binding] = False, shape

    def _add_shape(self, binding: CodeBinding, earlier_runs: int) -> None:
        """Add a shape, and have its code compiled in the background.

        Nothing is compiled there if the first run should wait for the code, if the code is cached, or if a lasting
        stand-in answers or is being prepared.
        """
        general = self._maker.general
        served = any(shape.can_answer for shape in self._shapes.values())
        waits = not served and not self._maker.first and (general is None or not general.quick)
        shape = self._shapes[binding] = Shape(binding, runs=earlier_runs)
        shape.on_frequent = partial(self._on_frequent, shape)
        stands_in = general is not None and general.is_lasting and (general.quick or self._preparing)
        if not waits and not stands_in and not self._maker.is_cached(binding):
            self._submit(shape, 0)

    def _on_frequent(self, shape: Shape) -> None:
        """Have code compiled in the background for a frequent shape that has no code, unless that has begun already."""
        with self._changed:
            if not shape.ready and not shape.pending and not shape.dropped:
                self._submit(shape, 0)

    def _is_coming(self, shape: Shape) -> bool:
        """Whether code that answers for the shape is being compiled in the background: its own or a stand-in's."""
        general = self._maker.general
        return shape.pending or (self._preparing and general is not None and general.is_lasting)

    def _leave(self, shape: Shape) -> None:
        """End a use of a shape. A shape that could not be compiled is forgotten, so that the next run tries again."""
        with self._changed:
            shape.users -= 1
            idle = shape.code_to_close()
            failed = shape.held is None and shape.users == 0 and not shape.pending and shape.runs == 0
            if failed and self._shapes.get(shape.binding) is shape:
                del self._shapes[shape.binding]
        _close(idle)

    def _submit(self, shape: Shape, stage: int) -> None:
        """Submit stage number `stage` of the shape to its background; `pending` says whether there is one."""
        shape.pending = stage < len(self._backgrounds)
        if shape.pending:
            self._backgrounds[stage].submit(lambda: self._improve(shape, stage))

    def _improve(self, shape: Shape, stage: int) -> None:
        """In the background: compile one stage of the shape, replace its code, and submit the next stage.

        Errors are dropped here: the next run compiles by itself, and raises the error to its caller.
        """
        made = None
        with suppress(Exception):
            if shape.wanted:
                made = self._maker.later[stage](shape.binding, self._backgrounds[stage])
                if made is not None:
                    self._replace(shape, made)
        self._submit_next(shape, made, stage + 1)

    def _submit_next(self, shape: Shape, made: ShapeCode | None, stage: int) -> None:
        with self._changed:
            shape.pending = False
            if made is not None and not made.last and shape.wanted:
                self._submit(shape, stage)
            self._changed.notify_all()

    def _compile_now(self, shape: Shape) -> None:
        """Compile the shape's code in the calling thread, whose run needs it, and submit the next stage."""
        made = self._maker.now(shape.binding)
        self._replace(shape, made)
        self._submit_next(shape, made, 1)

    def _replace(self, shape: Shape, made: ShapeCode) -> None:
        """Give a shape new code, and close the previous code once no run uses it."""
        with self._changed:
            before = shape.hold(made)
            self._runners.add(made.executable)
            idle = shape.code_to_close()
            self._changed.notify_all()
        _close(before, idle)

    def _acquire_code(self, shape: Shape) -> _Held | None:
        """The shape's code, counted as used, after waiting for the background; None if this thread has to compile it.

        SessionClosed if there is no code and the cache was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: shape.held is not None or not shape.pending or self._closed)
            if shape.held is not None:
                shape.held.users += 1
            elif self._closed:
                raise SessionClosed("the session is closed")
            return shape.held

    def _release_code(self, held: _Held) -> None:
        with self._changed:
            held.users -= 1
            idle = held if held.idle else None
        _close(idle)


def _close(*idle: _Held | None) -> None:
    for held in idle:
        if held is not None:
            held.made.executable.close()
