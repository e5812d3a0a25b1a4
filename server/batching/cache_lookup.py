"""Looks a request up in the response cache before it is queued, and stores its answer after a miss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import TYPE_CHECKING

from lathe.server.batching.entry import Entry, Outcome, State
from lathe.server.batching.response_cache import ResponseCache, copy_arrays, inputs_digest
from lathe.server.errors import Internal, ServerError
from lathe.server.types import Tensors

if TYPE_CHECKING:
    from lathe.server.telemetry.statistics import Statistics

INLINE_BYTES = (
    1 << 16
)  # bytes up to which the digest is computed on the event loop (about 0.1 ms); larger ones on a thread


class CacheLookup:
    """The response cache in front of one version's queue. Used on the event loop's thread only."""

    def __init__(
        self, max_bytes: int, stats: Statistics, queue: Callable[[Entry], None], beside: set[asyncio.Task[None]]
    ) -> None:
        """`queue` takes a request after a miss; for a large request, an error that it raises becomes the outcome.

        The tasks of large requests and answers are added to `beside`, which may hold other tasks of the version.
        """
        self.cache = ResponseCache(max_bytes)
        self._stats = stats
        self._queue = queue
        self._tasks = beside

    def submit(self, entry: Entry) -> None:
        """Answer a request from the cache with `call_soon`, or queue it.

        Raises what `queue` raises, except for requests above `INLINE_BYTES`, which are looked up in a task.
        """
        started = monotonic()
        if entry.nbytes > INLINE_BYTES:
            entry.state = State.RUNNING  # not queued yet: cancelling must not remove it from the queue
            self._start(self._look_up_in_thread(entry, started))
        elif not self._answer(entry, _key(entry), started):
            self._queue(entry)

    async def _look_up_in_thread(self, entry: Entry, started: float) -> None:
        try:
            key = await asyncio.to_thread(_key, entry)
            if entry.state is State.DONE:  # its caller left
                return
            entry.state = State.WAITING
            if not self._answer(entry, key, started):
                self._queue(entry)
        except Exception as error:
            entry.finish(error if isinstance(error, ServerError) else Internal(f"no digest ({type(error).__name__})"))

    def _answer(self, entry: Entry, key: bytes, started: float) -> bool:
        """Answer from the cache and return True; on a miss, arrange that the outputs are stored: False."""
        outputs = self.cache.get(key)
        if outputs is None:
            self._stats.cache_miss.add(monotonic() - started)
            entry.done = self._storing(key, entry.done)
            return False
        entry.state = State.RUNNING
        asyncio.get_running_loop().call_soon(entry.finish, outputs)
        self._stats.cache_hit.add(monotonic() - started)
        return True

    def _storing(self, key: bytes, done: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
        def store_and_finish(outcome: Outcome) -> None:
            if not isinstance(outcome, Exception):
                self._store(key, outcome)
            done(outcome)

        return store_and_finish

    def _store(self, key: bytes, outputs: Tensors) -> None:
        nbytes = sum([array.nbytes for array in outputs.values()])
        if nbytes > self.cache.max_bytes:
            return
        if nbytes > INLINE_BYTES:
            self._start(self._store_in_thread(key, outputs))
        else:
            self.cache.put(key, copy_arrays(outputs))

    async def _store_in_thread(self, key: bytes, outputs: Tensors) -> None:
        self.cache.put(key, await asyncio.to_thread(copy_arrays, outputs))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _key(entry: Entry) -> bytes:
    """The cache key of a request: a digest of its inputs, and the token limit of its texts if it sets one."""
    digest = inputs_digest(entry.inputs)
    return b"%b %d" % (digest, entry.most_tokens) if entry.most_tokens else digest
