"""A line in the log per gRPC call, as HTTP requests have theirs; of a stream one for all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any, TypeAlias

import grpc

from server.access.addresses import client_of_peer
from server.api.grpc.messages import Message
from server.errors import ServerError
from server.telemetry.access import AccessLog, Served
from server.telemetry.logs import CALLER, Caller, trace_of

REQUEST_ID = "x-request-id"
Read: TypeAlias = Callable[[Any], Message | None]
Answer: TypeAlias = Callable[[Any, Any], Any]

_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class Accessed:
    """Wraps the methods of one service."""

    def __init__(self, access: AccessLog) -> None:
        self._access = access

    def unary(self, answer: Answer, path: str, read: Read, names_caller: bool) -> Answer:
        """Return a method that tells how it ended; with ``names_caller`` every line logged meanwhile knows whose call
        it is."""

        async def told(request: Any, context: Any) -> Message:
            began = monotonic()
            if names_caller:
                CALLER.set(_caller(context))  # a call is a task, and so has a context of its own
            try:
                response = await answer(request, context)
            except grpc.aio.AbortError:
                self._tell(path, context, began, _read(read, request))
                raise
            if self._access.every:
                self._tell(path, context, began, _read(read, request))
            return response

        return told

    def streaming(self, answer: Answer, path: str) -> Answer:
        """As :meth:`unary`."""

        async def told(request: Any, context: Any) -> AsyncIterator[Message]:
            began = monotonic()
            try:
                async for message in answer(request, context):
                    yield message
            except grpc.aio.AbortError:
                self._tell(path, context, began, None)
                raise
            if self._access.every:
                self._tell(path, context, began, None)

        return told

    def _tell(self, path: str, context: Any, began: float, message: Message | None) -> None:
        code = context.code() or grpc.StatusCode.OK
        ok = code is grpc.StatusCode.OK
        if not self._access.wants(ok):
            return
        caller = _caller(context)
        served = Served("GRPC", path, code.name, ok, monotonic() - began, *caller)
        served.request_id = getattr(message, "id", "") or caller.request_id
        served.model = getattr(message, "model_name", "") or getattr(message, "name", "")
        served.version = getattr(message, "model_version", "") or getattr(message, "version", "")
        served.client = client_of_peer(context.peer())
        served.error, served.fault = context.details() or "", code in _FAULTS
        self._access.write(served)


def _caller(context: Any) -> Caller:
    metadata = dict(context.invocation_metadata() or ())
    return Caller(str(metadata.get(REQUEST_ID, "")), trace_of(str(metadata.get("traceparent", ""))))


def _read(read: Read, request: Any) -> Message | None:
    try:
        return read(request)
    except ServerError:  # no message, which is why it was refused
        return None
