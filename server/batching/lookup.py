"""Looks for a request's answer in the cache before it is queued, and keeps the answer of one that was not there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import TYPE_CHECKING

from server.batching.cache import ResponseCache, copied, key_of
from server.batching.entry import Entry, Outcome, State
from server.errors import Internal, ServerError
from server.types import Tensors

if TYPE_CHECKING:
    from server.telemetry.statistics import Statistics

HERE = 1 << 16  # bytes whose digest is made on the event loop: about 0.1 ms; larger ones by a thread


class Lookup:
    """The cache of one version. Used on the event loop's thread only."""

    def __init__(
        self, max_bytes: int, stats: Statistics, queue: Callable[[Entry], None], beside: set[asyncio.Task[None]]
    ) -> None:
        """``queue`` takes a request that was not found; what it raises for a large one becomes its outcome. ``beside``
        gets the tasks of large requests and answers; others of the same version may be in it."""
        self.cache = ResponseCache(max_bytes)
        self._stats = stats
        self._queue = queue
        self._beside = beside

    def submit(self, entry: Entry) -> None:
        """Answer a request soon from the cache, or queue it; raises what ``queue`` raises for small ones."""
        started = monotonic()
        if entry.nbytes > HERE:
            entry.state = State.RUNNING  # it is in no queue that it would have to be taken out of
            self._start(self._look_beside(entry, started))
        elif not self._answer(entry, key_of(entry.inputs), started):
            self._queue(entry)

    async def _look_beside(self, entry: Entry, started: float) -> None:
        try:
            key = await asyncio.to_thread(key_of, entry.inputs)
            if entry.state is State.DONE:  # its caller left
                return
            entry.state = State.WAITING
            if not self._answer(entry, key, started):
                self._queue(entry)
        except Exception as error:
            entry.finish(error if isinstance(error, ServerError) else Internal(f"no digest ({type(error).__name__})"))

    def _answer(self, entry: Entry, key: bytes, started: float) -> bool:
        """Answer from the cache if it can; else see to it that the answer gets there."""
        outputs = self.cache.get(key)
        if outputs is None:
            self._stats.cache_miss.add(monotonic() - started)
            entry.done = self._keeping(key, entry.done)
            return False
        entry.state = State.RUNNING
        asyncio.get_running_loop().call_soon(entry.finish, outputs)
        self._stats.cache_hit.add(monotonic() - started)
        return True

    def _keeping(self, key: bytes, tell: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
        def done(outcome: Outcome) -> None:
            if not isinstance(outcome, Exception):
                self._keep(key, outcome)
            tell(outcome)

        return done

    def _keep(self, key: bytes, outputs: Tensors) -> None:
        nbytes = sum([array.nbytes for array in outputs.values()])
        if nbytes > self.cache.max_bytes:
            return
        if nbytes > HERE:
            self._start(self._keep_beside(key, outputs))
        else:
            self.cache.put(key, copied(outputs))

    async def _keep_beside(self, key: bytes, outputs: Tensors) -> None:
        self.cache.put(key, await asyncio.to_thread(copied, outputs))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
