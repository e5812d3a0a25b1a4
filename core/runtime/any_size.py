"""One code for all sizes of a model that is not packed: it answers for each shape until that has code of its own.

Its kernels read every size that the inputs show from a table: the batch size, lengths, those of a past.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from core.errors import SessionClosed
from core.runtime.background import Background
from core.runtime.call import Call, Run
from core.runtime.executable import Executable
from core.runtime.given import Given
from core.runtime.in_parts import PartsCall, PartsRunner
from core.runtime.record import Record, tell
from core.runtime.runner import Times
from core.runtime.shapes import StandIn

AnyCode: TypeAlias = Executable | PartsRunner
MakeSized: TypeAlias = Callable[[], AnyCode]

_KEPT = 64  # sizes whose layouts are kept; when there are more, they are forgotten together


class AnySize:
    """Code for any sizes once it is prepared; before that, and for what it does not take, the general version."""

    def __init__(
        self,
        make: MakeSized,
        batch: str | None,
        general: StandIn,
        at_hand: Callable[[], bool] = lambda: False,
        compile_beside: Callable[[Background], None] = lambda background: None,
        waits: bool = False,
    ) -> None:
        """`batch`: the symbol of the batch size. `at_hand`: whether `make` only has to load. `compile_beside` lets a
        child process of the background do most of what `make` has to do. `waits`: whether sizes that the code does not
        serve wait for code of their own; else the general version answers."""
        self._make, self._batch, self._general = make, batch, general
        self._at_hand, self._compile_beside, self._waits = at_hand, compile_beside, waits
        self._making = threading.Lock()
        self._code: AnyCode | None = None
        self._runs: dict[tuple[int, ...], Call | PartsCall | None] = {}
        self._failed = self._closed = False

    @property
    def prepared(self) -> bool:
        return self._failed or self.quick

    @property
    def at_hand(self) -> bool:
        return self.prepared or self._at_hand()

    @property
    def quick(self) -> bool:
        return self._code is not None

    @property
    def lasting(self) -> bool:
        return not self._failed

    @property
    def name(self) -> str:
        return "code for any sizes" if self.quick else self._general.name

    @property
    def runners(self) -> tuple[AnyCode, ...]:
        return (self._code,) if self._code is not None else ()

    def prepare(self, background: Background | None = None) -> None:
        """Compile what is not in the store, in a child process of the background where there is one."""
        try:
            if background is not None and not self.at_hand:
                self._compile_beside(background)
            with self._making:
                if not self._closed and self._code is None:
                    self._code = self._make()
        except Exception:  # whatever it is: a model is not refused by what only stands in
            self._failed = True

    def run(self, given: Given, enough: Callable[[], bool]) -> list[Any] | None:
        code = self._code
        if code is None:
            return self._general.run(given, enough)
        run = self._run_of(code, self._sizes(code, given))
        with suppress(SessionClosed):
            if run is not None:
                return run(given.arrays) if given.record is None else _recorded(code, run, given.arrays, given.record)
        return None if self._waits else self._general.run(given, enough)

    def call(self, given: Given) -> Run | None:
        return self._run_of(self._code, self._sizes(self._code, given)) if self._code is not None else None

    def _sizes(self, code: AnyCode, given: Given) -> tuple[int, ...]:
        """The values of the code's table."""
        known = dict(given.binding)
        if self._batch is not None:
            known[self._batch] = given.rows
        return tuple([known[name] for name in (code.sizes if isinstance(code, PartsRunner) else code.plan.sizes)])

    def _run_of(self, code: AnyCode, sizes: tuple[int, ...]) -> Call | PartsCall | None:
        """The run for these values; None where the code does not serve them."""
        try:
            return self._runs[sizes]  # one look: another thread may forget them all at any moment
        except KeyError:
            if len(self._runs) >= _KEPT:
                self._runs.clear()
            run = self._runs[sizes] = code.sized(sizes)
            return run

    def close(self) -> None:
        """Free the code once nobody runs it."""
        with self._making:
            self._closed = True
            code, self._code = self._code, None
        if code is not None:
            code.close()


def _recorded(code: AnyCode, run: Call | PartsCall, arrays: Sequence[Any], record: Record) -> list[Any]:
    """A run of which `record` is told the kernels."""
    if isinstance(run, PartsCall):
        return run.recorded(arrays, record)
    times = Times(code.shares[0].plan)
    results = run(arrays, times.stamps)
    times.lap(0, times.stamps)
    tell([(share, times) for share in code.shares], record)
    return results
