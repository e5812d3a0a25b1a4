"""Inference as an ASGI endpoint, for servers that do not use Lathe's own connection class."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lathe.server.access.addresses import client_of
from lathe.server.api.codec.call_head import call_head
from lathe.server.api.codec.reply import Reply, error_reply
from lathe.server.api.inference.infer import InferCall, InferService
from lathe.server.api.inference.memory_ledger import MemoryClaim
from lathe.server.errors import ServerError, TooLarge

PIECE_BYTES = 1 << 20  # bytes of an answer per ASGI message: copying them takes less than a millisecond


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


class HeadAsGet:
    """Middleware that answers HEAD like GET; the server omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with GET instead of HEAD."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class InferEndpoint:
    """The ASGI application of inference routes: answers by an `InferCall`, as Lathe's own connection class does."""

    def __init__(self, service: InferService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; if its caller leaves, the request is cancelled."""
        try:
            head = call_head(scope["raw_path"], scope["headers"])
            with self._service.reading.ledger.claim(client_id(scope)) as claim:
                body = await read_body(receive, self._service.settings.max_body, claim)
        except ServerError as error:
            await send_reply(send, error_reply(error))
            return
        except ClientLeft:
            return
        answered = asyncio.Event()
        call = self._service.call(head, lambda _: answered.set(), client_address(scope))
        call.start(body)
        await _answered_or_left(call, answered, receive)
        if call.reply is not None:
            await send_reply(send, call.reply, call.payloads)


def client_address(scope: Scope) -> str:
    """The address that a request comes from, for IPv6 its /64 network; empty if it is unknown (a Unix socket)."""
    client = scope.get("client")
    return client_of(str(client[0])) if client else ""


def client_id(scope: Scope) -> str:
    """The client that a request is counted for: the id of its key, or its address if it has no key."""
    caller = scope.get("state", {}).get("caller")
    return caller.key.id if caller is not None and caller.key is not None else client_address(scope)


async def read_body(receive: Receive, limit: int, claim: MemoryClaim) -> bytearray:
    """Receive the whole body; `claim` counts its bytes as they arrive.

    TooLarge when it exceeds `limit` bytes, Overloaded if the ledger has no room, ClientLeft if the client disconnects.
    """
    body = bytearray()
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        if len(body) + len(part) > limit:
            raise TooLarge(f"body: expected at most {limit} bytes, got more")
        claim.add(len(part))
        body += part
        if not message.get("more_body", False):
            return body


async def _answered_or_left(call: InferCall, answered: asyncio.Event, receive: Receive) -> None:
    if answered.is_set():
        return
    waits = [asyncio.ensure_future(answered.wait()), asyncio.ensure_future(receive())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        if call.reply is None:
            call.cancel()


async def send_reply(send: Send, reply: Reply, payloads: Sequence[bytes | memoryview] = ()) -> None:
    """Send a whole answer. More than `PIECE_BYTES` are sent in copied pieces, and other tasks run in between."""
    await send({"type": "http.response.start", "status": reply.status, "headers": list(reply.headers)})
    parts = [reply.text, *payloads]
    if sum(map(len, parts)) <= PIECE_BYTES:
        await send({"type": "http.response.body", "body": b"".join(parts)})
        return
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            await send({"type": "http.response.body", "body": bytes(part[at : at + PIECE_BYTES]), "more_body": True})
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})
