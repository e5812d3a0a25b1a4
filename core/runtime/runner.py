"""What a session runs, whatever it runs on: code for one set of shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from core.ir.dim import Dim
from core.plan.plan import Memory, Plan
from core.runtime.machine import Peaks


@dataclass(frozen=True, slots=True)
class Lap:
    """Steps that ran one after the other: the first of them, and when it began and each ended (`perf_counter_ns`)."""

    first: int
    stamps: NDArray[np.int64]


class Times:
    """Nanoseconds that a run took per step and per fallback of a plan, all pieces together, and when."""

    def __init__(self, plan: Plan) -> None:
        self.steps = np.zeros(len(plan.steps), np.int64)
        self.fallbacks = np.zeros(len(plan.fallbacks.nodes), np.int64)
        self.stamps = np.zeros(len(plan.steps) + 1, np.int64)  # the driver's clock: at the start and after each step
        self.laps: list[Lap] = []  # a batch that runs in pieces has each step once per piece
        self.nodes: list[tuple[int, int, int]] = []  # of fallbacks: which, its begin, its end

    def lap(self, first: int, stamps: NDArray[np.int64]) -> None:
        """Note that steps ran from these stamps on."""
        self.laps.append(Lap(first, stamps))
        self.steps[first : first + len(stamps) - 1] += np.diff(stamps)

    def node(self, index: int, began: int, ended: int) -> None:
        """Note that a fallback ran."""
        self.nodes.append((index, began, ended))
        self.fallbacks[index] += ended - began


@dataclass(frozen=True, slots=True)
class Share:
    """What one device does of a run. `peaks` are those of one of its `threads`."""

    device: str
    plan: Plan
    threads: int
    peaks: Callable[[], Peaks]


class Endless(Protocol):
    """What the host runs, and may run for ever."""

    @property
    def may_not_end(self) -> bool: ...

    def runs(self) -> dict[int, int]:
        """The number of the run that each thread is in, where a run may not end by itself."""
        ...

    def interrupt(self, run: int | None = None) -> None:
        """Make a run, or all under way, end soon; they raise Interrupted."""
        ...


class Runner(Protocol):
    """Runs a model. Any number of threads may call `run`; after `close` runs raise SessionClosed."""

    @property
    def shares(self) -> tuple[Share, ...]:
        """In the order they run."""
        ...

    @property
    def hosts(self) -> tuple[Endless, ...]:
        """What of it the host runs. Only there a run may not end, and can be broken off: kernels of devices have no
        loops that data decide on."""
        ...

    def run(self, n: int, inputs: Sequence[Any], times: Sequence[Times] | None = None) -> list[Any]:
        """Outputs in the model's order, freshly allocated, for a batch of `n`. `inputs` are contiguous arrays of the
        right types. `times`, one for each share, receive what every step took."""
        ...

    def set_state(self, name: str, array: NDArray[Any]) -> None: ...

    def state(self, name: str) -> NDArray[Any]:
        """A copy of a state's present value."""
        ...

    def explain(self, n: int) -> list[str]:
        """What a run of `n` rows does, for people."""
        ...

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until nothing goes on in the background; whether that was so in time."""
        ...

    def close(self) -> None: ...


def supposed_by(runner: Runner) -> tuple[Dim, ...]:
    """What its plans suppose of the batch size: see `core.plan.plan.Plan.supposed`."""
    return tuple(dim for share in runner.shares for dim in share.plan.supposed)


def serves_none(runner: Runner) -> bool:
    """Whether it is in the place of code for all batch sizes where each has its own."""
    return any(share.plan.serves_none for share in runner.shares)


def memory_of(runner: Runner) -> Memory:
    """Of all devices together."""
    each = [share.plan.memory for share in runner.shares]
    return Memory(
        peak=sum(memory.peak for memory in each),
        lower_bound=sum(memory.lower_bound for memory in each),
        unshared=sum(memory.unshared for memory in each),
        weights=sum(memory.weights for memory in each),
    )
