"""`Runner`: the code for one set of shapes, on any device, as a session runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lathe.core.ir.dim import Dim
from lathe.core.plan.plan import Memory, Plan
from lathe.core.runtime.host.machine import Peaks


@dataclass(frozen=True, slots=True)
class Lap:
    """Consecutive steps: the index of the first, and the clock (`perf_counter_ns`) before it and after each step."""

    first: int
    stamps: NDArray[np.int64]


class StepTimes:
    """Times of a run in nanoseconds, per step and per fallback of a plan, summed over all chunks of the batch.

    `n`: the batch size, which decides the kernel of a step on a GPU.
    """

    def __init__(self, plan: Plan, n: int = 1) -> None:
        self.n = n
        self.steps = np.zeros(len(plan.steps), np.int64)
        self.fallbacks = np.zeros(len(plan.fallbacks.nodes), np.int64)
        self.stamps = np.zeros(len(plan.steps) + 1, np.int64)  # the driver's clock: at the start and after each step
        self.laps: list[Lap] = []  # a batch that runs in chunks has each step once per chunk
        self.nodes: list[tuple[int, int, int]] = []  # of fallbacks: index, begin, end

    def add_steps(self, first: int, stamps: NDArray[np.int64]) -> None:
        """Add the times of consecutive steps, the first of which has index `first`.

        `stamps`: the clock in nanoseconds, before the first step and after each step.
        """
        self.laps.append(Lap(first, stamps))
        self.steps[first : first + len(stamps) - 1] += np.diff(stamps)

    def node(self, index: int, began: int, ended: int) -> None:
        """Add the time of fallback `index`, from its begin and end in nanoseconds."""
        self.nodes.append((index, began, ended))
        self.fallbacks[index] += ended - began


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The part of a run that one device does: the device's name, the plan, and the number of threads.

    `peaks` gives the rates of one CPU thread, or of the whole device.
    """

    device: str
    plan: Plan
    threads: int
    peaks: Callable[[], Peaks]


class Interruptible(Protocol):
    """Code on the host whose runs may go on for ever, and can be interrupted."""

    @property
    def may_not_end(self) -> bool: ...

    def runs(self) -> dict[int, int]:
        """The number of each run in flight by thread identifier; may be empty if every run ends by itself."""
        ...

    def interrupt(self, run: int | None = None) -> None:
        """Make run number `run` (see `runs`), or all current runs, end soon with Interrupted."""
        ...


class Runner(Protocol):
    """The interface of loaded code for one set of shapes. Any number of threads may call `run`.

    After `close`, `run` raises SessionClosed.
    """

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        """The parts of a run by device, in the order in which they run."""
        ...

    @property
    def hosts(self) -> tuple[Interruptible, ...]:
        """The parts that run on the host.

        Only these can run without end or be interrupted: kernels of devices have no loops whose conditions are data.
        """
        ...

    def run(self, n: int, inputs: Sequence[Any], times: Sequence[StepTimes] | None = None) -> list[Any]:
        """Outputs in the model's order, freshly allocated, for a batch of `n`.

        `inputs` are contiguous arrays of the declared types. `times`: a list of one `StepTimes` for each of `shares`,
        to which the time of every step is added.
        """
        ...

    def set_state(self, name: str, array: NDArray[Any]) -> None:
        """Set a state to a copy of `array`; no run may be in flight.

        KeyError for an unknown name; ValueError unless `array` has the dtype and shape of the state.
        """
        ...

    def state(self, name: str) -> NDArray[Any]:
        """A copy of a state's current value; KeyError for an unknown name."""
        ...

    def explain(self, n: int) -> list[str]:
        """A report for people on what a run of `n` rows does, line by line."""
        ...

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until the background work is done. False if that takes longer than `timeout` seconds."""
        ...

    def close(self) -> None: ...


class Settling(Protocol):
    """An object with background work."""

    def settle(self, timeout: float | None = None) -> bool: ...


def settle_all(settling: Iterable[Settling], timeout: float | None) -> bool:
    """Wait for the background work of all, one after the other.

    False if that takes longer than `timeout` seconds altogether; the objects after that are not waited for.
    """
    end = None if timeout is None else time.monotonic() + timeout
    return all(each.settle(None if end is None else max(end - time.monotonic(), 0.0)) for each in settling)


def batch_assumptions(runner: Runner) -> tuple[Dim, ...]:
    """Dimensions over the batch size; the runner's code is right only as long as none of them is negative."""
    return tuple(dim for share in runner.shares for dim in share.plan.supposed)


def serves_none(runner: Runner) -> bool:
    """Whether the runner is only a placeholder: its plan serves no batch size, so each batch size has its own code."""
    return any(share.plan.serves_no_batch for share in runner.shares)


def memory_of(runner: Runner) -> Memory:
    """The memory of the runner's plans on all devices, each figure added up."""
    each = [share.plan.memory for share in runner.shares]
    return Memory(
        peak=sum(memory.peak for memory in each),
        lower_bound=sum(memory.lower_bound for memory in each),
        unshared=sum(memory.unshared for memory in each),
        weights=sum(memory.weights for memory in each),
    )
