"""Dynamic-shape code for a model that is not packed: serves every shape until the shape has code of its own.

Its kernels read the sizes of the inputs from a table: the batch size, sequence lengths, the length of a past.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from lathe.core.errors import LatheError, SessionClosed
from lathe.core.runtime.host.executable import Executable
from lathe.core.runtime.session.background import Background
from lathe.core.runtime.session.executables import StandIn
from lathe.core.runtime.session.partitioned import PartitionedCall, PartitionedRunner
from lathe.core.runtime.session.prepared_calls import Call, Run
from lathe.core.runtime.session.record import Record, report_kernels
from lathe.core.runtime.session.run_inputs import RunInputs
from lathe.core.runtime.session.runner import StepTimes

DynamicRunner: TypeAlias = Executable | PartitionedRunner
MakeDynamic: TypeAlias = Callable[[], DynamicRunner]

_MAX_CALLS = 64  # cached sizes with their layouts; at the limit, all of them are forgotten


class DynamicShapeCode:
    """A stand-in: dynamic-shape code once it is prepared. Before that, the reference runner answers.

    The reference runner also answers runs of sizes that the code does not serve; with `waits`, nothing answers these.
    """

    def __init__(
        self,
        make: MakeDynamic,
        batch: str | None,
        general: StandIn,
        at_hand: Callable[[], bool] = lambda: False,
        compile_beside: Callable[[Background], None] = lambda background: None,
        waits: bool = False,
    ) -> None:
        """`make` loads or compiles the code. `batch`: the symbol of the batch size, if there is one.

        `at_hand`: whether `make` only has to load the code. `compile_beside` compiles most of it in a child process of
        the background. `waits`: runs of sizes that the code does not serve wait for code of their own; otherwise the
        reference runner (`general`) answers.
        """
        self._make, self._batch, self._general = make, batch, general
        self._at_hand, self._compile_beside, self._wait_when_unserved = at_hand, compile_beside, waits
        self._making = threading.Lock()
        self._code: DynamicRunner | None = None
        self._runs: dict[tuple[int, ...], Call | PartitionedCall | None] = {}
        self._failure: str | None = None
        self._closed = False

    @property
    def prepared(self) -> bool:
        return self._failure is not None or self.quick

    @property
    def is_cached(self) -> bool:
        return self.prepared or self._at_hand()

    @property
    def quick(self) -> bool:
        return self._code is not None

    @property
    def is_lasting(self) -> bool:
        return self._failure is None

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def name(self) -> str:
        return "dynamic-shape code" if self.quick else self._general.name

    @property
    def runners(self) -> tuple[DynamicRunner, ...]:
        return (self._code,) if self._code is not None else ()

    def prepare(self, background: Background | None = None) -> None:
        """Load the code, or compile it, in a child process of the background if there is one.

        An error is kept as `failure`; `warn_of_failure` decides whether it becomes a warning.
        """
        try:
            if background is not None and not self.is_cached:
                self._compile_beside(background)
            with self._making:
                if not self._closed and self._code is None:
                    self._code = self._make()
        except Exception as error:  # any error: a stand-in that fails must not make the model fail
            self._failure = f"{type(error).__name__}: {error}"
            warn_of_failure(error)

    def run(self, given: RunInputs, enough: Callable[[], bool]) -> list[Any] | None:
        code = self._code
        if code is None:
            return self._general.run(given, enough)
        run = self._call_for(code, self._sizes(code, given))
        with suppress(SessionClosed):
            if run is not None:
                return (
                    run(given.arrays) if given.record is None else _run_recorded(code, run, given.arrays, given.record)
                )
        return None if self._wait_when_unserved else self._general.run(given, enough)

    def call(self, given: RunInputs) -> Run | None:
        return self._call_for(self._code, self._sizes(self._code, given)) if self._code is not None else None

    def _sizes(self, code: DynamicRunner, given: RunInputs) -> tuple[int, ...]:
        """The values of the code's size table for this run, in the order of its names."""
        known = dict(given.binding)
        if self._batch is not None:
            known[self._batch] = given.rows
        return tuple([known[name] for name in (code.sizes if isinstance(code, PartitionedRunner) else code.plan.sizes)])

    def _call_for(self, code: DynamicRunner, sizes: tuple[int, ...]) -> Call | PartitionedCall | None:
        """The call for these values of the size table, cached; None if the code does not serve them."""
        try:
            return self._runs[sizes]  # one lookup, because another thread may clear the cache at any time
        except KeyError:
            if len(self._runs) >= _MAX_CALLS:
                self._runs.clear()
            run = self._runs[sizes] = code.dynamic_call(sizes)
            return run

    def close(self) -> None:
        """Free the code once no thread runs it."""
        with self._making:
            self._closed = True
            code, self._code = self._code, None
        if code is not None:
            code.close()


def warn_of_failure(error: Exception) -> None:
    """Warn that dynamic-shape code failed to compile: then each shape is compiled separately, which takes longer.

    Lathe's own errors, such as too little memory, are no reason for a warning: code for a shape has them as well.
    """
    if not isinstance(error, LatheError):
        message = f"no dynamic-shape code, so each shape is compiled separately: {type(error).__name__}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _run_recorded(code: DynamicRunner, run: Call | PartitionedCall, arrays: Sequence[Any], record: Record) -> list[Any]:
    """The outputs of `run` for these inputs; reports its kernels to `record`."""
    if isinstance(run, PartitionedCall):
        return run.recorded(arrays, record)
    times = StepTimes(code.shares[0].plan)
    results = run(arrays, times.stamps)
    times.add_steps(0, times.stamps)
    report_kernels([(share, times) for share in code.shares], record)
    return results
