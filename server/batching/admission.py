"""Admission control of one queue: bounds in requests and bytes, and the `Retry-After` of a refusal."""

from __future__ import annotations

import asyncio
import math

from lathe.server.errors import Overloaded

WINDOW = 5.0  # seconds over which the drain rate is averaged
LONGEST_WAIT = 60.0  # seconds; the upper bound of `Retry-After`


class DrainRate:
    """Requests answered per second: an exponential moving average with time constant `WINDOW`."""

    __slots__ = ("_at", "_level")

    def __init__(self) -> None:
        self._level = 0.0
        self._at = 0.0

    def add(self, count: int, now: float) -> None:
        """Count answers given at `now` (monotonic seconds)."""
        self._level = self._decayed(now) + count
        self._at = now

    def per_second(self, now: float) -> float:
        """The current rate; `now` in monotonic seconds."""
        return self._decayed(now) / WINDOW

    def _decayed(self, now: float) -> float:
        return self._level * math.exp((self._at - now) / WINDOW)


class Admission:
    """The number and bytes of the requests that wait or run, with their bounds."""

    __slots__ = ("_defaults", "_drained", "drain", "items", "max_bytes", "max_items", "nbytes")

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._defaults = (max_items, max_bytes)
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.items = 0
        self.nbytes = 0
        self.drain = DrainRate()
        self._drained: asyncio.Event | None = None  # while a caller waits for it

    def limit(self, max_items: int | None, max_bytes: int | None) -> None:
        """Change the bounds; None: the initial bound. Admitted requests stay."""
        items, nbytes = self._defaults
        self.max_items = max_items or items
        self.max_bytes = max_bytes or nbytes

    def refusal(self, nbytes: int, now: float) -> Overloaded | None:
        """The error for one more request of `nbytes`, with `retry_after`; None if there is room."""
        if self.has_room(nbytes):
            return None
        return Overloaded(
            f"the queue is full: {self.items} of {self.max_items} requests, "
            f"{self.nbytes} of {self.max_bytes} bytes are waiting",
            retry_after=self.retry_after(now),
        )

    def enter(self, nbytes: int) -> None:
        """Count a request in without checking the bounds."""
        self.items += 1
        self.nbytes += nbytes

    def admit(self, nbytes: int) -> bool:
        """Count a request in if there is room, and return whether there was."""
        if not self.has_room(nbytes):
            return False
        self.items += 1
        self.nbytes += nbytes
        return True

    def has_room(self, nbytes: int, items: int = 1) -> bool:
        """Whether `items` more requests with `nbytes` in total may enter.

        A single request larger than the bound may enter an empty queue; otherwise it would be refused for ever.
        """
        after = self.items + items
        return after <= self.max_items and (self.nbytes + nbytes <= self.max_bytes or after == 1)

    def missing(self, nbytes: int) -> tuple[int, int]:
        """How many requests and bytes have to leave before one more of `nbytes` fits; 0 or less: none."""
        return self.items + 1 - self.max_items, self.nbytes + nbytes - self.max_bytes

    def leave(self, nbytes: int, items: int = 1) -> None:
        """Count out `items` requests with `nbytes` in total."""
        self.items -= items
        self.nbytes -= nbytes
        if self._drained is not None and not self.items:
            self._drained.set()
            self._drained = None

    async def drained(self) -> None:
        """Wait until all requests are counted out."""
        if self.items:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()

    def retry_after(self, now: float) -> float:
        """The seconds to answer all present requests at the measured rate, at most `LONGEST_WAIT`; 1 without a rate."""
        rate = self.drain.per_second(now)
        return min(LONGEST_WAIT, self.items / rate) if rate > 0 else 1.0
