"""Where a call comes in: whose it is, whether there is room for it, and its messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

from server.access.authority import Authority, Mode
from server.api.grpc.calls import Call, Calls
from server.api.grpc.connections import Connections
from server.api.grpc.messages import Message
from server.errors import ServerError
from server.settings import Settings

HEALTH = frozenset({"Check", "ServerLive", "ServerReady"})  # answered when nothing else is
Answer: TypeAlias = Callable[[Any, Any], Any]


class Entrance:
    """Wraps methods. They get their message, or the error that is to be answered in its place."""

    def __init__(self, calls: Calls, connections: Connections, authority: Authority, settings: Settings) -> None:
        self._calls = calls
        self._connections = connections
        self._authority = authority
        self._settings = settings

    def unary(self, answer: Answer, name: str) -> Answer:
        """Return a method that takes its one message from a stream."""

        async def taken(_requests: Any, context: Any) -> Message:
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

        return taken

    def streaming(self, answer: Answer, name: str, *, one: bool) -> Answer:
        """Return a method that answers with a stream; ``one``: to one message."""

        async def taken(_requests: Any, context: Any) -> AsyncIterator[Message]:
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

        return taken

    def _enter(self, context: Any, name: str) -> Call:
        """Take a call in; raises Unauthorized, Overloaded."""
        shown = ""
        if self._authority.mode is Mode.KEYED:
            shown = self._key(context)
        settings = self._settings
        patience = settings.grpc_stream_idle if name == "ModelStreamInfer" else settings.body_timeout
        connection = self._connections.of(context.peer())
        call = self._calls.enter(shown or connection.client, patience, has_key=bool(shown), is_health=name in HEALTH)
        call.sit_on(connection)
        return call

    def _key(self, context: Any) -> str:
        """Return the id of a call's key, empty where it shows none."""
        authorization = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not authorization:
            return ""
        caller = self._authority.caller(authorization)
        return caller.key.id if caller.key else ""
