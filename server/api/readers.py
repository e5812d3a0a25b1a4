"""Threads for what is too large to be read or written on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from server.steps import Steps

THREADS = 2
HERE = 1 << 16  # bytes that are still read on the event loop: less than a millisecond of work
TURN = 0.02  # seconds after which work in steps makes way for that of other clients

Result = TypeVar("Result")


class Readers:
    """Runs functions on a few threads, the clients taking turns; all methods are called on the event loop.

    The interpreter lock is one for all threads, so a function must not make long calls into C that keep it: it works
    in slices, between which the event loop gets its turn.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._executor = ThreadPoolExecutor(threads, "lathe-reader")
        self._free = threads
        self._waiting: dict[str, deque[_Job]] = {}  # in the order in which the clients' turns come

    async def run(self, client: str, work: Callable[..., Result], *arguments: Any) -> Result:
        """Return what the function returns, or raise what it raises.

        Cancelling takes it out of the queue; if it runs already, it is waited for, as it still uses its memory.
        """
        job = _Job(partial(work, *arguments))
        self._waiting.setdefault(client, deque()).append(job)
        self._hand_out()
        try:
            await asyncio.shield(job.ended)
        except asyncio.CancelledError:
            if job.running is None:
                self._take_out(client, job)
            else:
                await asyncio.wait([job.ended])
            raise
        result: Result = job.ended.result()
        return result

    async def run_steps(self, client: str, steps: Steps[Result]) -> Result:
        """Return what the steps return, or raise what they raise; other clients get turns between them.

        Cancelling works as above.
        """
        while True:
            ended: list[Result] = await self.run(client, _go_on, steps)
            if ended:
                return ended[0]

    def close(self) -> None:
        """Let the threads end; what waits is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _hand_out(self) -> None:
        loop = asyncio.get_running_loop()
        while self._free and self._waiting:
            client, jobs = next(iter(self._waiting.items()))
            job = jobs.popleft()
            del self._waiting[client]
            if jobs:
                self._waiting[client] = jobs  # behind the others
            self._free -= 1
            job.running = loop.run_in_executor(self._executor, job.work)
            job.running.add_done_callback(partial(self._done, job))

    def _done(self, job: _Job, outcome: asyncio.Future[Any]) -> None:
        self._free += 1
        if outcome.cancelled():
            job.ended.cancel()
        elif (error := outcome.exception()) is not None:
            job.ended.set_exception(error)
            job.ended.exception()  # looked at: its caller may have left
        else:
            job.ended.set_result(outcome.result())
        self._hand_out()

    def _take_out(self, client: str, job: _Job) -> None:
        jobs = self._waiting[client]
        jobs.remove(job)
        if not jobs:
            del self._waiting[client]


def _go_on(steps: Steps[Result]) -> list[Result]:
    """Work for one turn; return the result if there is one by then."""
    until = monotonic() + TURN
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
