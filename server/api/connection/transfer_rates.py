"""Minimum transfer rates of uploads and answers, so that slow clients cannot hold connections (slowloris)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class UploadRate:
    """The deadlines of one upload, in loop time: for the whole body, between two reads, and by a minimum rate.

    The minimum rate is that of MinRate in Apache's mod_reqtimeout: `pause` seconds at first, and one more for every
    `rate` bytes.
    """

    began: float
    limit: float  # seconds for the whole body
    pause: float  # seconds between two reads
    rate: float  # bytes per second
    heard: float  # when bytes arrived last
    seen: float  # when `look` was called last
    received: int = 0  # bytes

    @property
    def deadline(self) -> float:
        """The loop time at which the upload times out if no more bytes arrive."""
        slowest = self.began + self.pause + self.received / self.rate
        return min(self.began + self.limit, self.heard + self.pause, slowest)

    def take(self, size: int, now: float) -> None:
        """Count received bytes."""
        self.received += size
        self.heard = now

    def look(self, now: float, *, reading: bool) -> float:
        """The deadline in loop time. `reading`: whether the server reads from the connection now.

        If not, the time since the last call counts for the whole body's limit, but not for the pause and the rate.
        """
        if not reading:
            waited = now - self.seen
            self.began += waited
            self.limit -= waited
            self.heard += waited
        self.seen = now
        return self.deadline


@dataclass(slots=True)
class AnswerRate:
    """The deadline of an answer whose client reads more slowly than the server writes.

    As for uploads: `pause` seconds at first and between two reads, and one more for every `rate` bytes.
    """

    began: float
    pause: float
    rate: float  # bytes per second
    left: int  # bytes that were not sent yet at the last `look`
    read: float  # when the client read last
    sent: int = 0  # bytes

    def look(self, left: int, now: float) -> float:
        """The deadline in loop time, given that `left` bytes are still to be sent."""
        if left < self.left:
            self.sent += self.left - left
            self.read = now
        self.left = left
        return min(self.read + self.pause, self.began + self.pause + self.sent / self.rate)
