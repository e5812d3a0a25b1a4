"""How fast bodies must come in and answers must be read, so that nobody holds a connection for next to nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """An upload's deadlines in loop time: one for all of it, one between two reads, and one by what has come.

    The last is Apache's (mod_reqtimeout, MinRate): a first allowance of ``pause`` seconds, and a second for every
    ``rate`` bytes.
    """

    began: float
    limit: float  # seconds for all of it
    pause: float  # seconds between two reads
    rate: float  # bytes per second
    heard: float  # when bytes came last
    seen: float  # when it was looked at last
    received: int = 0

    @property
    def deadline(self) -> float:
        """When it is to be given up if nothing more comes."""
        slowest = self.began + self.pause + self.received / self.rate
        return min(self.began + self.limit, self.heard + self.pause, slowest)

    def take(self, size: int, now: float) -> None:
        """Count bytes that came."""
        self.received += size
        self.heard = now

    def look(self, now: float, *, reading: bool) -> float:
        """Return the deadline; the time since the last look does not count if the server was not reading."""
        if not reading:
            waited = now - self.seen
            self.began += waited
            self.limit -= waited
            self.heard += waited
        self.seen = now
        return self.deadline


@dataclass(slots=True)
class Outflow:
    """The deadline of an answer whose client reads more slowly than the server writes, by the same rule: ``pause``
    seconds at first and between two reads, and a second for every ``rate`` bytes."""

    began: float
    pause: float
    rate: float  # bytes per second
    left: int  # bytes that the client has still to read, when looked at last
    read: float  # when it read last
    sent: int = 0

    def look(self, left: int, now: float) -> float:
        """Return the deadline, now that so many bytes are left."""
        if left < self.left:
            self.sent += self.left - left
            self.read = now
        self.left = left
        return min(self.read + self.pause, self.began + self.pause + self.sent / self.rate)
