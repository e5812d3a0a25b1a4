"""The access log of gRPC: one line per call, and one for a whole stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any, TypeAlias

import grpc

from lathe.server.access.addresses import client_of_peer
from lathe.server.api.grpc.messages import Message
from lathe.server.errors import ServerError
from lathe.server.telemetry.access_log import AccessLog, ServedRequest
from lathe.server.telemetry.logs import CALLER, Caller, parse_trace_id

REQUEST_ID = "x-request-id"
Read: TypeAlias = Callable[[Any], Message | None]
Method: TypeAlias = Callable[[Any, Any], Any]

_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class CallLogging:
    """Wraps the methods of one service so that they write log lines."""

    def __init__(self, access: AccessLog) -> None:
        self._access = access

    def unary(self, answer: Method, path: str, read: Read, names_caller: bool) -> Method:
        """A unary method that calls `answer` and logs the outcome; `read` gives the message whose model the line names.

        Successes are logged only if the access log is to have them; cancelled calls are not logged. With
        `names_caller`, all log lines that are written during the call have the ids of its caller.
        """

        async def logged(request: Any, context: Any) -> Message:
            began = monotonic()
            if names_caller:
                CALLER.set(_caller(context))  # each call is a task and has its own context variables
            try:
                response = await answer(request, context)
            except grpc.aio.AbortError:
                self._log(path, context, began, _read(read, request))
                raise
            if self._access.every:
                self._log(path, context, began, _read(read, request))
            return response

        return logged

    def streaming(self, answer: Method, path: str) -> Method:
        """A streaming method that calls `answer` and logs the outcome of the whole stream, when `unary` would."""

        async def logged(request: Any, context: Any) -> AsyncIterator[Message]:
            began = monotonic()
            try:
                async for message in answer(request, context):
                    yield message
            except grpc.aio.AbortError:
                self._log(path, context, began, None)
                raise
            if self._access.every:
                self._log(path, context, began, None)

        return logged

    def _log(self, path: str, context: Any, began: float, message: Message | None) -> None:
        code = context.code() or grpc.StatusCode.OK
        ok = code is grpc.StatusCode.OK
        if not self._access.wants(ok):
            return
        caller = _caller(context)
        served = ServedRequest("GRPC", path, code.name, ok, monotonic() - began, *caller)
        served.request_id = getattr(message, "id", "") or caller.request_id
        served.model = getattr(message, "model_name", "") or getattr(message, "name", "")
        served.version = getattr(message, "model_version", "") or getattr(message, "version", "")
        served.client = client_of_peer(context.peer())
        served.error, served.fault = context.details() or "", code in _FAULTS
        self._access.write(served)


def _caller(context: Any) -> Caller:
    metadata = dict(context.invocation_metadata() or ())
    return Caller(str(metadata.get(REQUEST_ID, "")), parse_trace_id(str(metadata.get("traceparent", ""))))


def _read(read: Read, request: Any) -> Message | None:
    try:
        return read(request)
    except ServerError:  # the call was refused because the message is invalid
        return None
