"""Inference as an ASGI endpoint, for servers other than the one with Lathe's own connection class."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.addresses import client_of
from server.api.callhead import call_head
from server.api.infer import InferCall, InferService
from server.api.ledger import Claim
from server.api.reply import Reply, error_reply
from server.errors import ServerError, TooLarge

PIECE = 1 << 20  # bytes of an answer that are sent in one go, less than a millisecond of work


class ClientLeft(Exception):
    """The connection ended before the request was complete."""


class HeadAsGet:
    """Answers HEAD as it would GET; the server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, HEAD under its other name."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class InferEndpoint:
    """The same calls as on the direct path, fed from ASGI messages."""

    def __init__(self, service: InferService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; one whose caller leaves is taken out of the queue."""
        try:
            head = call_head(scope["raw_path"], scope["headers"])
            with self._service.reading.ledger.claim(whose(scope)) as claim:
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
    """Return whose address a request comes from, empty where the server cannot tell (a Unix socket)."""
    client = scope.get("client")
    return client_of(str(client[0])) if client else ""


def whose(scope: Scope) -> str:
    """Return the client that a request counts for: the id of its key, else its address."""
    caller = scope.get("state", {}).get("caller")
    return caller.key.id if caller is not None and caller.key is not None else client_address(scope)


async def read_body(receive: Receive, limit: int, claim: Claim) -> bytearray:
    """Return the whole body, which ``claim`` counts while it comes.

    Raises TooLarge as soon as it is longer than ``limit`` bytes, Overloaded where there is no room for it.
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
    """Send a whole answer, a large one in pieces: each is copied, and between them others get their turn."""
    await send({"type": "http.response.start", "status": reply.status, "headers": list(reply.headers)})
    parts = [reply.text, *payloads]
    if sum(map(len, parts)) <= PIECE:
        await send({"type": "http.response.body", "body": b"".join(parts)})
        return
    for part in parts:
        for at in range(0, len(part), PIECE):
            await send({"type": "http.response.body", "body": bytes(part[at : at + PIECE]), "more_body": True})
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})
