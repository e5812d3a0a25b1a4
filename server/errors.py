"""The errors that reach clients: each has a stable code, an HTTP status and a message of one sentence.

A message names the object, what was expected and what was given. It never contains a path of the server, a traceback
or an address, so it can be sent unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class ServerError(Exception):
    """Base of all errors that reach a client."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after  # seconds


def drop_frames(error: BaseException) -> None:
    """Drop the frames to which an answered error refers, and those of its causes.

    The frames refer to the body of the request, and often to the error itself. Such a cycle would keep the body in
    memory until the next garbage collection.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:  # an error that is raised several times can be its own cause
            continue
        seen.add(id(each))
        each.__traceback__ = None
        waiting += [cause for cause in (each.__cause__, each.__context__) if cause is not None]


class BadRequest(ServerError):
    code, http_status = "bad_request", 400


class ContextExceeded(BadRequest):
    """A prompt has more tokens than the language model can take."""

    code = "context_length_exceeded"


class Unauthorized(ServerError):
    code, http_status = "unauthorized", 401


class Forbidden(ServerError):
    code, http_status = "forbidden", 403


class NotFound(ServerError):
    code, http_status = "not_found", 404


class UnknownModel(NotFound):
    """No model has this name. `known` are the existing names, which not every caller may see.

    `lathe.server.access.suggestions.with_suggestion` adds the nearest name that the caller may see to the message.
    """

    model = ""
    known: Iterable[str] = ()

    @classmethod
    def of(cls, model: str, known: Iterable[str]) -> UnknownModel:
        """Return the error for a model name that is not in `known`."""
        error = cls(f"unknown model {model[:80]!r}")
        error.model, error.known = model, known
        return error


class MethodNotAllowed(ServerError):
    code, http_status = "method_not_allowed", 405


class RequestTimeout(ServerError):
    """The client sent its request too slowly."""

    code, http_status = "request_timeout", 408


class Conflict(ServerError):
    code, http_status = "conflict", 409


class TooLarge(ServerError):
    code, http_status = "too_large", 413


class UnsupportedMedia(ServerError):
    """The content encoding or type of the body is not supported."""

    code, http_status = "unsupported_media", 415


class Misdirected(ServerError):
    """The Host header names a host that this server does not serve (`LATHE_SERVED_HOSTS`)."""

    code, http_status = "misdirected", 421


class Unprocessable(ServerError):
    """The request is well-formed, but the server cannot use the model or document in it."""

    code, http_status = "unprocessable", 422


class HeaderTooLarge(ServerError):
    code, http_status = "header_too_large", 431


class QuotaExceeded(ServerError):
    code, http_status = "quota_exceeded", 429


class Internal(ServerError):
    code, http_status = "internal", 500

    @classmethod
    def missing_output(cls, ref: object, name: str) -> Internal:
        """Return the error for a version (`ref`) that has left out an output which it declares."""
        return cls(f"model {ref} gave no output {name!r}")


class Unsupported(ServerError):
    """The server does not implement this part of the protocol, or its settings do not allow it."""

    code, http_status = "unsupported", 501


class Unavailable(ServerError):
    """The target exists but cannot answer now: not loaded, draining, repository read-only."""

    code, http_status = "unavailable", 503


class Overloaded(Unavailable):
    """A queue or another limit of the server is full; the request was refused, or evicted before it ran."""

    code = "overloaded"


class ExecutionInterrupted(Unavailable):
    """The server interrupted an execution that had not ended at its deadline, or when its model was unloaded."""

    code = "broken_off"

    def __init__(
        self,
        message: str = "the execution exceeded its time limit and was interrupted",
        *,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, retry_after=retry_after)


class Shed(Unavailable):
    """Load shedding (CoDel): the request waited too long in a queue that does not empty."""

    code = "shed"


class DeadlineExceeded(Unavailable):
    """The request's deadline has passed or cannot be met."""

    code = "deadline_exceeded"


class UnsupportedProtocol(ServerError):
    code, http_status = "unsupported_protocol", 505


class StorageFull(ServerError):
    code, http_status = "storage_full", 507


class OutOfMemory(ServerError):
    """A model needs more memory than is left."""

    code, http_status = "out_of_memory", 507
