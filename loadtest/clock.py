"""Clocks for measurements: wall time, or the processor time of the calling thread.

Other processes lengthen wall time but not processor time. Processor time leaves out whatever a call waits for: other
threads and child processes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

Clock: TypeAlias = Callable[[], float]

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.thread_time}
SHORT_MS = 0.05  # shorter calls are timed in groups of 1000, because reading the clock takes a similar time
_PROBES = 5


def add_clock(parser: argparse.ArgumentParser) -> None:
    """Add the option `--clock`."""
    text = "the clock to measure with: 'processor' (time of the calling thread) suits machines with other load"
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help=text)


def elapsed_ms(run: Callable[[], Any], clock: Clock) -> float:
    """The time of one call in milliseconds."""
    begin = clock()
    run()
    return (clock() - begin) * 1e3


def call_ms(run: Callable[[], Any], seconds: float, clock: Clock) -> float:
    """The median time of a call in milliseconds, over `seconds` of wall time and at least one call.

    Calls that take less than SHORT_MS are timed in groups of 1000.
    """
    probe = statistics.median(elapsed_ms(run, clock) for _ in range(_PROBES))
    calls = 1000 if probe < SHORT_MS else 1
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = clock()
        for _ in range(calls):
            run()
        times.append((clock() - begin) / calls)
    return statistics.median(times) * 1e3
