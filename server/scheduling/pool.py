"""The threads that execute batches, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

log = logging.getLogger("lathe.workers")

Job = Callable[[], Any]
Done = Callable[[Any], None]


class WorkerPool:
    """A fixed number of threads; each job's result comes back to the event loop in one call."""

    def __init__(self, threads: int) -> None:
        self.busy = 0  # jobs handed out and not yet back; kept on the event loop
        self._jobs: SimpleQueue[tuple[asyncio.AbstractEventLoop, Job, Done] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"lathe-worker-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, done: Done) -> None:
        """Run ``job`` on a worker, then ``done(result)`` on the running loop; a job must not raise."""
        self.busy += 1
        self._jobs.put((asyncio.get_running_loop(), job, done))

    def close(self) -> None:
        """Let the threads end after what they were given; returns once they did."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            loop, job, done = item
            result = job()
            try:
                loop.call_soon_threadsafe(self._back, done, result)
            except RuntimeError:  # the loop closed while the job ran
                log.warning("a batch ended after the event loop had closed")
            del item, job, done, result  # nothing of a batch outlives it while this thread waits

    def _back(self, done: Done, result: Any) -> None:
        self.busy -= 1
        done(result)
