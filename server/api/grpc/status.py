"""Lathe's errors in gRPC's words."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from server.errors import BrokenOff, Internal, ServerError

log = logging.getLogger("lathe.api")

STATUS: dict[str, grpc.StatusCode] = {
    "bad_request": grpc.StatusCode.INVALID_ARGUMENT,
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
    "overloaded": grpc.StatusCode.UNAVAILABLE,  # as Triton answers for a full queue, and what clients try again
    "deadline_exceeded": grpc.StatusCode.UNAVAILABLE,  # the request's `timeout`, as with Triton; see `_status_of`
    "broken_off": grpc.StatusCode.UNAVAILABLE,
    "storage_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "out_of_memory": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_OVER = 0.01  # seconds: timers and clocks do not agree to the millisecond
PUSHBACK = "grpc-retry-pushback-ms"  # gRPC's Retry-After, which clients with a retry policy obey by themselves


def known(error: Exception) -> ServerError:
    """Return the error if it is one of Lathe's; of any other the caller learns nothing but that it happened."""
    if isinstance(error, ServerError):
        return error
    log.error("unforeseen error", exc_info=error)
    return Internal("an internal error happened; the server's log has it")


@asynccontextmanager
async def errors_as_status(context: Any) -> AsyncIterator[None]:
    """End the call with the status that belongs to whatever is raised inside."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        refused = known(error)
        await context.abort(_status_of(refused, context.time_remaining()), refused.message, _trailing(refused))


def _status_of(error: ServerError, left: float | None) -> grpc.StatusCode:
    """``left``: seconds to the deadline of the call. When that is over its caller's library says so, whatever comes."""
    if left is not None and left <= _OVER:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return STATUS.get(error.code, grpc.StatusCode.UNKNOWN)


def _trailing(error: ServerError) -> tuple[tuple[str, str], ...]:
    if isinstance(error, BrokenOff):
        return ((PUSHBACK, "-1"),)  # not to be tried again: it would most likely not end either
    return () if error.retry_after is None else ((PUSHBACK, str(int(error.retry_after * 1000))),)
