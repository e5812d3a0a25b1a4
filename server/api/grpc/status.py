"""Maps Lathe's errors to gRPC status codes."""

from __future__ import annotations

from typing import Any

import grpc

from lathe.server.api.codec.reply import answered_error
from lathe.server.errors import ExecutionInterrupted, ServerError

STATUS: dict[str, grpc.StatusCode] = {
    "bad_request": grpc.StatusCode.INVALID_ARGUMENT,
    "context_length_exceeded": grpc.StatusCode.INVALID_ARGUMENT,
    "unauthorized": grpc.StatusCode.UNAUTHENTICATED,
    "forbidden": grpc.StatusCode.PERMISSION_DENIED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "method_not_allowed": grpc.StatusCode.UNIMPLEMENTED,
    "request_timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
    "conflict": grpc.StatusCode.FAILED_PRECONDITION,
    "too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unsupported_media": grpc.StatusCode.UNIMPLEMENTED,
    "unprocessable": grpc.StatusCode.INVALID_ARGUMENT,
    "header_too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "misdirected": grpc.StatusCode.FAILED_PRECONDITION,
    "unsupported_protocol": grpc.StatusCode.UNIMPLEMENTED,
    "quota_exceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "internal": grpc.StatusCode.INTERNAL,
    "unsupported": grpc.StatusCode.UNIMPLEMENTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "shed": grpc.StatusCode.UNAVAILABLE,
    "overloaded": grpc.StatusCode.UNAVAILABLE,  # as Triton does for a full queue; clients retry this status
    "deadline_exceeded": grpc.StatusCode.UNAVAILABLE,  # the request's `timeout`, as with Triton; see `_status_of`
    "broken_off": grpc.StatusCode.UNAVAILABLE,
    "storage_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "out_of_memory": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_DEADLINE_TOLERANCE = (
    0.01  # seconds left at which a deadline counts as passed: timers and clocks differ by milliseconds
)
PUSHBACK = "grpc-retry-pushback-ms"  # gRPC's Retry-After; clients with a retry policy obey it


class ErrorsAsStatus:
    """A context manager: an exception raised inside ends the gRPC call with the status of its `answered_error`."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        """Nothing happens before an exception."""

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: Any) -> None:
        """Abort the call if an error ended the block; cancelled and aborted calls only end."""
        del _traceback
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            refused, context = answered_error(error), self._context
            await context.abort(_status_of(refused, context.time_remaining()), refused.message, _trailing(refused))


def _status_of(error: ServerError, left: float | None) -> grpc.StatusCode:
    """The status of an error; `left`: seconds to the call's deadline, None without one.

    After the deadline the status is DEADLINE_EXCEEDED, because the client reports that status in any case.
    """
    if left is not None and left <= _DEADLINE_TOLERANCE:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return STATUS.get(error.code, grpc.StatusCode.UNKNOWN)


def _trailing(error: ServerError) -> tuple[tuple[str, str], ...]:
    if isinstance(error, ExecutionInterrupted):
        return ((PUSHBACK, "-1"),)  # do not retry: another run would probably not end either
    return () if error.retry_after is None else ((PUSHBACK, str(int(error.retry_after * 1000))),)
