"""The threads that execute batches, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

log = logging.getLogger("lathe.workers")

Job = Callable[[], Iterator[Any]]  # its results; runs on a worker, must not raise
Result = Callable[[Any], None]
Ended = Callable[[], None]


class WorkerPool:
    """A fixed number of threads; each result comes back to the event loop in one call."""

    def __init__(self, threads: int) -> None:
        self.busy = 0  # jobs handed out and not yet ended; kept on the event loop
        self._jobs: SimpleQueue[tuple[asyncio.AbstractEventLoop, Job, Result, Ended] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"lathe-worker-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def wanted(self) -> bool:
        """Whether jobs wait for a worker."""
        return not self._jobs.empty()

    def submit(self, job: Job, result: Result, ended: Ended) -> None:
        """Run ``job`` on a worker; on the running loop ``result`` takes each result, then ``ended`` is called."""
        self.busy += 1
        self._jobs.put((asyncio.get_running_loop(), job, result, ended))

    def close(self, patience: float = 2.0) -> None:
        """Let the threads end after what they were given; an execution without an end is left behind in time."""
        for _ in self._threads:
            self._jobs.put(None)
        end = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            loop, job, result, ended = item
            try:
                for value in job():
                    loop.call_soon_threadsafe(result, value)
                    del value  # nothing of a batch outlives it while this thread waits
                loop.call_soon_threadsafe(self._end, ended)
            except RuntimeError:  # the loop closed meanwhile
                log.warning("a batch ended after the event loop had closed")
            del item, loop, job, result, ended

    def _end(self, ended: Ended) -> None:
        self.busy -= 1
        ended()
