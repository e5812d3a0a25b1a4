"""Who may enter a queue: bounds in items and bytes, and when to come back if there is no room."""

from __future__ import annotations

import math

from server.errors import Overloaded

WINDOW = 5.0  # seconds over which the drain rate is averaged
LONGEST_WAIT = 60.0  # seconds; no caller is told to wait longer


class DrainRate:
    """Requests answered per second, exponentially averaged over ``WINDOW``."""

    __slots__ = ("_at", "_level")

    def __init__(self) -> None:
        self._level = 0.0
        self._at = 0.0

    def add(self, count: int, now: float) -> None:
        """Count answers given at this monotonic time."""
        self._level = self._decayed(now) + count
        self._at = now

    def per_second(self, now: float) -> float:
        """Return the current rate."""
        return self._decayed(now) / WINDOW

    def _decayed(self, now: float) -> float:
        return self._level * math.exp((self._at - now) / WINDOW)


class Admission:
    """What is waiting or running against what may."""

    __slots__ = ("_defaults", "drain", "items", "max_bytes", "max_items", "nbytes")

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._defaults = (max_items, max_bytes)
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.items = 0
        self.nbytes = 0
        self.drain = DrainRate()

    def limit(self, max_items: int | None, max_bytes: int | None) -> None:
        """Bound the queue otherwise; None: as at first. Who is in stays in."""
        items, nbytes = self._defaults
        self.max_items = max_items or items
        self.max_bytes = max_bytes or nbytes

    def refusal(self, nbytes: int, now: float) -> Overloaded | None:
        """Return why there is no room for one more, with the time after which there should be; None if there is."""
        if self.has_room(nbytes):
            return None
        return Overloaded(
            f"the queue is full: {self.items} of {self.max_items} requests, "
            f"{self.nbytes} of {self.max_bytes} bytes are waiting",
            retry_after=self.retry_after(now),
        )

    def enter(self, nbytes: int) -> None:
        """Take one request in."""
        self.items += 1
        self.nbytes += nbytes

    def admit(self, nbytes: int) -> bool:
        """Take one request in if there is room; say whether there was."""
        if not self.has_room(nbytes):
            return False
        self.items += 1
        self.nbytes += nbytes
        return True

    def has_room(self, nbytes: int, items: int = 1) -> bool:
        """Whether so many more requests may enter, which have so many bytes together.

        One larger than the whole bound is let in when nothing else is there, so that it is not refused for ever.
        """
        after = self.items + items
        return after <= self.max_items and (self.nbytes + nbytes <= self.max_bytes or after == 1)

    def missing(self, nbytes: int) -> tuple[int, int]:
        """Return how many requests, and bytes, are too many for one more of so many bytes; 0 or less: none."""
        return self.items + 1 - self.max_items, self.nbytes + nbytes - self.max_bytes

    def leave(self, nbytes: int, items: int = 1) -> None:
        """Give places back: those of so many requests, which have so many bytes together."""
        self.items -= items
        self.nbytes -= nbytes

    def retry_after(self, now: float) -> float:
        """Return the seconds in which what waits now should have been answered, from the measured rate."""
        rate = self.drain.per_second(now)
        return min(LONGEST_WAIT, self.items / rate) if rate > 0 else 1.0
