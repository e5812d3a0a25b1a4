"""Notices that requests come one by one, so that collecting further ones for a batch only costs time."""

from __future__ import annotations

import asyncio

SINGLE_BATCHES = 8


class SingleBatches:
    """Counts consecutive batches of one request, all run on the event loop's thread.

    After `SINGLE_BATCHES` of them, `can_skip_collecting` is true: a request may run in `submit` itself instead of in a
    `call_soon` callback that would collect further requests. This happens at most once per iteration of the event loop:
    requests read in the same iteration still share a batch.
    """

    __slots__ = ("_awaits_iteration", "_count", "_loop", "can_skip_collecting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.can_skip_collecting = False
        self._count = 0
        self._awaits_iteration = False  # such a batch ran in this iteration of the event loop
        self._loop = loop

    def add(self, requests: int) -> None:
        """Record a batch that ran on the event loop's thread: one request adds 1 to the count, several set it to 0."""
        self._count = self._count + 1 if requests == 1 else 0
        self.can_skip_collecting = False
        if self._count >= SINGLE_BATCHES and not self._awaits_iteration:
            self._awaits_iteration = True
            self._loop.call_soon(self._on_iteration)

    def reset(self) -> None:
        """Set the count to 0, because a batch went to a worker."""
        self._count = 0
        self.can_skip_collecting = False

    def _on_iteration(self) -> None:
        self._awaits_iteration = False
        self.can_skip_collecting = self._count >= SINGLE_BATCHES
