"""Everything the server refuses or fails with: a stable code, an HTTP status and one sentence for the caller.

A message names the object, what was expected and what came. It never holds a path of the server, a traceback
or an address, so it can be sent as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class ServerError(Exception):
    """Base of every error that reaches a caller."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after  # seconds


class BadRequest(ServerError):
    code, http_status = "bad_request", 400


class Unauthorized(ServerError):
    code, http_status = "unauthorized", 401


class Forbidden(ServerError):
    code, http_status = "forbidden", 403


class NotFound(ServerError):
    code, http_status = "not_found", 404


class UnknownModel(NotFound):
    """No model has this name. ``known`` are the names that there are, which not every caller may see: see
    :func:`server.access.nearest.hinted`."""

    model = ""
    known: Iterable[str] = ()

    @classmethod
    def of(cls, model: str, known: Iterable[str]) -> UnknownModel:
        """Return the error for a name that is none of the known ones."""
        error = cls(f"unknown model {model[:80]!r}")
        error.model, error.known = model, known
        return error


class MethodNotAllowed(ServerError):
    code, http_status = "method_not_allowed", 405


class RequestTimeout(ServerError):
    """The client was too slow in sending."""

    code, http_status = "request_timeout", 408


class Conflict(ServerError):
    code, http_status = "conflict", 409


class TooLarge(ServerError):
    code, http_status = "too_large", 413


class UnsupportedMedia(ServerError):
    """The body's encoding is none the server knows."""

    code, http_status = "unsupported_media", 415


class Misdirected(ServerError):
    """The request is for a server of another name."""

    code, http_status = "misdirected", 421


class Unprocessable(ServerError):
    """Well-formed, but a model the server cannot take."""

    code, http_status = "unprocessable", 422


class HeaderTooLarge(ServerError):
    code, http_status = "header_too_large", 431


class QuotaExceeded(ServerError):
    code, http_status = "quota_exceeded", 429


class Internal(ServerError):
    code, http_status = "internal", 500


class Unsupported(ServerError):
    """A part of the protocol this server does not implement."""

    code, http_status = "unsupported", 501


class Unavailable(ServerError):
    """Known, but not able to answer now: not loaded, draining, repository read-only."""

    code, http_status = "unavailable", 503


class Overloaded(Unavailable):
    """Refused at the door because a queue is full."""

    code = "overloaded"


class BrokenOff(Unavailable):
    """What ran would not end, and nobody could wait for it any more."""

    code = "broken_off"

    def __init__(
        self,
        message: str = "the execution had not ended when its time was over, and was broken off",
        *,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, retry_after=retry_after)


class Shed(Unavailable):
    """Waited for too long in a queue that does not empty."""

    code = "shed"


class DeadlineExceeded(Unavailable):
    """The caller's timeout passed, or cannot be met."""

    code = "deadline_exceeded"


class UnsupportedProtocol(ServerError):
    code, http_status = "unsupported_protocol", 505


class StorageFull(ServerError):
    code, http_status = "storage_full", 507


class OutOfMemory(ServerError):
    """A model would take more memory than there is for it."""

    code, http_status = "out_of_memory", 507
