"""Which time a measurement takes: what the clock on the wall says, or what a processor spent on the calling thread.

Other processes lengthen the first and not the second. The second leaves out what a call waits for, be it another thread
or a child process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

Clock: TypeAlias = Callable[[], float]

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.thread_time}
SHORT_MS = 0.05  # shorter calls are timed by the thousand: one takes not much longer than reading the clock
_PROBES = 5


def add_clock(parser: argparse.ArgumentParser) -> None:
    """The option that chooses one."""
    told = "the time to take: processor time of the calling thread is for machines that others use, too"
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help=told)


def elapsed_ms(run: Callable[[], Any], clock: Clock) -> float:
    """The time of one call in milliseconds."""
    begin = clock()
    run()
    return (clock() - begin) * 1e3


def call_ms(run: Callable[[], Any], seconds: float, clock: Clock) -> float:
    """The median time of a call in milliseconds, from calls for `seconds` on the wall, at least one. Calls of less than
    SHORT_MS are timed by totals of a thousand."""
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
