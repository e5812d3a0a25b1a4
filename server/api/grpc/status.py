"""Lathe's errors in gRPC's words."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from server.errors import Internal, ServerError

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
    "deadline_exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "broken_off": grpc.StatusCode.DEADLINE_EXCEEDED,
    "storage_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "out_of_memory": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
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
        trailing = () if refused.retry_after is None else ((PUSHBACK, str(int(refused.retry_after * 1000))),)
        await context.abort(STATUS.get(refused.code, grpc.StatusCode.UNKNOWN), refused.message, trailing)
