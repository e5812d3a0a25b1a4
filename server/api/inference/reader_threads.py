"""Threads that read and write messages which are too large for the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from lathe.server.steps import Steps

THREADS = 2
INLINE_BYTES = 1 << 16  # bytes up to which messages are read on the event loop: less than a millisecond of work
TURN_SECONDS = 0.02  # seconds of work in steps before another client gets a turn

Result = TypeVar("Result")


class ReaderThreads:
    """Runs functions on a few threads, round robin between clients. All methods are called on the event loop.

    The threads share the interpreter lock with the event loop. A function must not make long C calls that hold the
    lock; it works in slices, between which the event loop can run.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._executor = ThreadPoolExecutor(threads, "lathe-reader")
        self._free = threads
        self._waiting: dict[str, deque[_Job]] = {}  # by client, the client with the next turn first

    async def run(self, client: str, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run the function on a thread; returns its result, or raises its exception.

        Cancelling removes a waiting function from the queue. If the function runs already, cancelling waits for its
        end, because it still uses its memory.
        """
        job = _Job(partial(work, *arguments))
        self._waiting.setdefault(client, deque()).append(job)
        self._start_jobs()
        try:
            await asyncio.shield(job.ended)
        except asyncio.CancelledError:
            if job.running is None:
                self._remove(client, job)
            else:
                await asyncio.wait([job.ended])
            raise
        result: Result = job.ended.result()
        return result

    async def run_steps(self, client: str, steps: Steps[Result]) -> Result:
        """Run a generator of steps on the threads; returns its result, or raises its exception.

        Other clients' functions run between its turns. Cancelling works as in `run`.
        """
        while True:
            ended: list[Result] = await self.run(client, _run_turn, steps)
            if ended:
                return ended[0]

    def close(self) -> None:
        """Stop the threads when their present functions end; waiting functions are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start_jobs(self) -> None:
        loop = asyncio.get_running_loop()
        while self._free and self._waiting:
            client, jobs = next(iter(self._waiting.items()))
            job = jobs.popleft()
            del self._waiting[client]
            if jobs:
                self._waiting[client] = jobs  # after the other clients
            self._free -= 1
            job.running = loop.run_in_executor(self._executor, job.work)
            job.running.add_done_callback(partial(self._on_done, job))

    def _on_done(self, job: _Job, outcome: asyncio.Future[Any]) -> None:
        self._free += 1
        if outcome.cancelled():
            job.ended.cancel()
        elif (error := outcome.exception()) is not None:
            job.ended.set_exception(error)
            job.ended.exception()  # retrieved, so that asyncio does not log it if the caller has left
        else:
            job.ended.set_result(outcome.result())
        self._start_jobs()

    def _remove(self, client: str, job: _Job) -> None:
        jobs = self._waiting[client]
        jobs.remove(job)
        if not jobs:
            del self._waiting[client]


def _run_turn(steps: Steps[Result]) -> list[Result]:
    """Run steps for `TURN_SECONDS`; returns a list with their result, or [] if they are not finished."""
    until = monotonic() + TURN_SECONDS
    try:
        while True:
            next(steps)
            if monotonic() > until:
                return []
    except StopIteration as end:
        return [end.value]


class _Job:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.running: asyncio.Future[Any] | None = None
