"""Admission of gRPC calls: identifies the client, applies the call limits, and receives the messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

from grpc.aio import AbortError

from lathe.server.access.authority import Authority, Mode
from lathe.server.api.grpc.calls import Call, Calls
from lathe.server.api.grpc.connections import Connections
from lathe.server.api.grpc.messages import Message
from lathe.server.errors import ServerError
from lathe.server.settings import Settings

HEALTH_CALLS = frozenset({"Check", "ServerLive", "ServerReady"})  # calls that may use the reserve beyond the limits
Method: TypeAlias = Callable[[Any, Any], Any]


class CallAdmission:
    """Wraps methods so that calls are limited. A wrapped method is called with its message, or with a ServerError.

    It has to answer the error instead: the call was refused, or its message did not arrive.
    """

    def __init__(self, calls: Calls, connections: Connections, authority: Authority, settings: Settings) -> None:
        self._calls = calls
        self._connections = connections
        self._authority = authority
        self._settings = settings

    def unary(self, answer: Method, name: str) -> Method:
        """A method for gRPC that admits a call, receives its only message from a stream, and calls `answer` with it.

        An AbortError loses its traceback: gRPC keeps the error in the state of the call, to which the frames of the
        traceback refer. This cycle would keep the message in memory until the next garbage collection.
        """

        async def admit_and_answer(context: Any) -> Message:
            try:
                call = self._enter(context, name)
            except ServerError as error:
                return await answer(error, context)
            with call:
                try:
                    request: bytes | ServerError = await call.one(context)
                except ServerError as error:
                    request = error
                return await answer(request, context)

        async def method(_requests: Any, context: Any) -> Message:
            try:
                return await admit_and_answer(context)
            except AbortError as error:
                raise error.with_traceback(None) from None

        return method

    def streaming(self, answer: Method, name: str, *, one: bool) -> Method:
        """A method for gRPC that admits a call and yields the stream of `answer`.

        `answer` is called with the single request message if `one`, otherwise with an iterator of the messages.
        """

        async def admit_and_answer(context: Any) -> AsyncIterator[Message]:
            try:
                call = self._enter(context, name)
            except ServerError as error:
                async for message in answer(error, context):
                    yield message
                return
            with call:
                try:
                    request: Any = await call.one(context) if one else call.each(context)
                except ServerError as error:
                    request = error
                async for message in answer(request, context):
                    yield message
                    call.answered()

        async def method(_requests: Any, context: Any) -> AsyncIterator[Message]:
            try:
                async for message in admit_and_answer(context):
                    yield message
            except AbortError as error:
                raise error.with_traceback(None) from None  # see `unary`

        return method

    def _enter(self, context: Any, name: str) -> Call:
        """Count a call of the method `name`, for its client and connection; may raise Unauthorized or Overloaded."""
        key = ""
        if self._authority.mode is Mode.KEYED:
            key = self._key(context)
        settings = self._settings
        patience = settings.grpc_stream_idle if name == "ModelStreamInfer" else settings.body_timeout
        connection = self._connections.of(context.peer())
        call = self._calls.enter(key or connection.client, patience, has_key=bool(key), is_health=name in HEALTH_CALLS)
        call.attach(connection)
        return call

    def _key(self, context: Any) -> str:
        """The id of a call's key; empty if it sends none, Unauthorized if its key is not valid."""
        authorization = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not authorization:
            return ""
        caller = self._authority.caller(authorization)
        return caller.key.id if caller.key else ""
