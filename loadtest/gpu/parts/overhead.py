"""The host's time for a run, without waiting for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lathe
from lathe.core.runtime.device.device_executable import DeviceExecutable
from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.gpu.lathe import elementwise, only_executable

SHARE = 0.03
MOST = 15.0  # microseconds, limit of the median
_RUNS = 500


def cases(options: Options) -> list[Case]:
    return [Case("overhead", "run")]


class _Waiting:
    """Wraps an event's `synchronize` and sums the time that the host waits in it."""

    def __init__(self, event: Any) -> None:
        self.seconds = 0.0
        self._wait = event.synchronize
        event.synchronize = self.synchronize

    def synchronize(self) -> None:
        started = time.perf_counter()
        self._wait()
        self.seconds += time.perf_counter() - started


def measure(case: Case, bench: Bench) -> Finding:
    with lathe.compile(elementwise(64), device=bench.options.device, tune="off") as session:
        executable = only_executable(session)
        x = np.ones((1, 64), np.float32)
        for _ in range(3):
            executable.run(1, [x])
            executable.settle(20)
        waits = [_Waiting(slot.done) for slot in executable._slots]
        samples = [_host_seconds(executable, x, waits) * 1e6 for _ in range(_RUNS)]
    median, high = statistics.median(samples), sorted(samples)[int(_RUNS * 0.99)]
    text = f"host overhead of a run: {median:.1f} us (p99 {high:.1f}), at most {MOST:.0f}"
    holds = median <= MOST if bench.options.device.startswith("cuda") else None
    return Finding(text, holds, {"microseconds": median, "p99": high})


def _host_seconds(executable: DeviceExecutable, x: NDArray[Any], waits: Sequence[_Waiting]) -> float:
    waited, started = sum(wait.seconds for wait in waits), time.perf_counter()
    executable.run(1, [x])
    return time.perf_counter() - started - (sum(wait.seconds for wait in waits) - waited)
