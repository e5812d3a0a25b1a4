"""The clock of the open loop: calls `fire(first, last)` on the event loop when requests [first, last) are due.

A thread sleeps, because event loops round their timers to milliseconds, which is longer than the answers measured.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from loadtest.arrivals import Times

SWITCH_INTERVAL = 0.0005  # seconds; Python's 5 ms would make the pacing thread late whenever the loop is busy
TICK = 0.001  # seconds; what falls due within one leaves together, as waking for each would take the server's processor


class Pacer(threading.Thread):
    """Runs through one schedule; `start_time` is the monotonic second at which it began."""

    def __init__(self, due: Times, fire: Callable[[int, int], None]) -> None:
        super().__init__(daemon=True, name="pacer")
        self.due, self.fire = due, fire
        self.loop = asyncio.get_running_loop()
        self.finished = asyncio.Event()
        self.stopped = threading.Event()
        self.start_time = 0.0

    def run(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        self.start_time = time.monotonic()
        first, now = 0, -math.inf
        while first < len(self.due) and not self.stopped.is_set():
            wait = max(self.start_time + float(self.due[first]), now + TICK) - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            # everything due by now leaves in one call: a late generator catches up, it never thins out the load
            now = time.monotonic()
            last = int(np.searchsorted(self.due, now - self.start_time, side="right"))
            if last > first:
                self.loop.call_soon_threadsafe(self.fire, first, last)
                first = last
        self.loop.call_soon_threadsafe(self.finished.set)
