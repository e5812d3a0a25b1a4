"""The open loop's pacer: calls `fire(first, last)` on the event loop when requests [first, last) are due.

A thread sleeps, because event loops round their timers to milliseconds, which is longer than the latencies measured.
Linux wakes threads up to 50 us late to coalesce timers (timer slack); the pacer switches that off.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from loadtest.arrivals import Times

SWITCH_INTERVAL = 0.0005  # seconds; Python's 5 ms would make the pacing thread late whenever the loop is busy
TICK = 0.0001  # seconds; requests due within one tick are sent together, since each wake-up costs processor time
_SET_TIMER_SLACK = 29  # of prctl(2)


class Pacer(threading.Thread):
    """A thread that runs through one schedule. `start_time` is its start in seconds of the monotonic clock."""

    def __init__(self, due: Times, fire: Callable[[int, int], None], tick: float = TICK) -> None:
        super().__init__(daemon=True, name="pacer")
        self.due, self.fire, self.tick = due, fire, tick
        self.loop = asyncio.get_running_loop()
        self.finished = asyncio.Event()
        self.stopped = threading.Event()
        self.start_time = 0.0

    def run(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        wake_on_time()
        self.start_time = time.monotonic()
        first, now = 0, -math.inf
        while first < len(self.due) and not self.stopped.is_set():
            wait = max(self.start_time + float(self.due[first]), now + self.tick) - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            # everything due by now is sent in one call: a late generator catches up and never reduces the load
            now = time.monotonic()
            last = int(np.searchsorted(self.due, now - self.start_time, side="right"))
            if last > first:
                self.loop.call_soon_threadsafe(self.fire, first, last)
                first = last
        self.loop.call_soon_threadsafe(self.finished.set)


def wake_on_time() -> None:
    """Set this thread's timer slack to 1 ns (Linux), so that sleeps end on time."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
