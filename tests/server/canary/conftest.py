"""A clock for trials that only the delays of toy models advance."""

from __future__ import annotations

import threading
import time

import pytest


class DelayClock:
    """Monotonic seconds that stand still, except while a toy model with a delay runs.

    Latencies measured with it are the delays that a test states. Equal versions get equal latencies, and so the same
    verdict after the same number of requests on a busy machine as on an idle one.
    """

    def __init__(self) -> None:
        self._now = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """Wait these seconds in truth, too: callers can leave meanwhile."""
        time.sleep(seconds)
        with self._lock:
            self._now += seconds


@pytest.fixture(autouse=True)
def delay_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = DelayClock()
    monkeypatch.setattr("lathe.server.canary.traffic.monotonic", clock)
    monkeypatch.setattr("tests.server.repository.world.pause", clock.sleep)
