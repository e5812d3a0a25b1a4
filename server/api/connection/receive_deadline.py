"""Deadlines of the message that a connection receives, so that slow clients cannot hold connections (slowloris)."""

from __future__ import annotations

import math

from lathe.server.api.connection.transfer_rates import UploadRate
from lathe.server.settings import Settings

ALLOWANCE = 20.0  # seconds before the lowest rate of a body counts, as Apache's mod_reqtimeout has it
LINGER, LINGER_PAUSE = 30.0, 5.0  # seconds for discarding the rest of an answered request: in total, between two reads
STOP_GRACE = 5.0  # seconds a half-received request gets once the server stops


class ReceiveDeadline:
    """The loop time by which a head, a body, or the rest of an answered message must have arrived.

    At first, and after `clear`, there is no deadline.
    """

    __slots__ = ("_at", "_latest", "_settings", "_upload")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._at = math.inf
        self._latest = math.inf  # the bound of `_at` for a message that is already answered, or that the stop shortens
        self._upload: UploadRate | None = None  # the transfer rate of a body that is a file

    @property
    def is_upload(self) -> bool:
        """Whether the body is a file, which has a longer deadline of its own."""
        return self._upload is not None

    def start_head(self, now: float) -> None:
        """Set the deadline of a head that begins, or of the first head of a new connection."""
        self._at = now + self._settings.header_timeout

    def start_body(self, now: float) -> None:
        """Set the deadline of a body: the head is complete."""
        self._at = now + self._settings.body_timeout

    def start_upload(self, now: float) -> None:
        """Set the deadlines of a body that is an uploaded file (`UploadRate`)."""
        settings = self._settings
        self._upload = UploadRate(
            now, settings.upload_timeout, settings.body_timeout, settings.min_receive_rate, now, now
        )

    def start_linger(self, now: float) -> None:
        """Set the deadlines for the rest of a message that is answered before its end: in total, and between two reads.

        The deadlines work like lingering_time and lingering_timeout of nginx.
        """
        self._upload = None
        self._latest = min(self._latest, now + LINGER)
        self._at = min(self._latest, now + LINGER_PAUSE)

    def start_stop(self, now: float) -> None:
        """Shorten the deadline to `STOP_GRACE` from now: the server stops while the message is received in part."""
        self._latest = min(self._latest, now + STOP_GRACE)
        self._at = min(self._at, self._latest)

    def clear(self) -> None:
        """Remove all deadlines: the message is complete, or its answer waits for those before it."""
        self._at = self._latest = math.inf
        self._upload = None

    def take(self, size: int, now: float) -> None:
        """Count a part of the body, which allows an upload more time."""
        if self._upload is not None:
            self._upload.take(size, now)

    def extend(self, now: float) -> None:
        """Allow another pause if the message is already answered, or the server stops: further bytes have arrived."""
        if self._latest < math.inf:
            self._at = min(self._latest, now + LINGER_PAUSE)

    def has_passed(self, now: float, *, reading: bool) -> bool:
        """Whether the message is late. `reading`: whether the server reads from the connection now.

        If not, the time since the last call counts for an upload's total time, but not for its pauses and its rate.
        """
        if self._upload is not None:
            self._at = min(self._latest, self._upload.look(now, reading=reading))
        return now > self._at

    def is_too_slow(self, received: int, now: float) -> bool:
        """Whether a body of which `received` bytes have arrived comes at less than the lowest rate.

        False for uploads, answered messages, and after `start_stop`: they have deadlines of their own.
        """
        if self._upload is not None or self._latest < math.inf:
            return False
        settings = self._settings
        began = self._at - settings.body_timeout
        return now > began + ALLOWANCE + received / settings.min_receive_rate
