"""Limits the bodies of all requests but inference: JSON documents are received whole, uploads pass in blocks."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lathe.server.api.codec.call_head import is_infer_path
from lathe.server.api.codec.json_limit import MAX_DOCUMENT_VALUES, check_values
from lathe.server.api.codec.reply import error_reply
from lathe.server.api.inference.asgi import ClientLeft, client_id, read_body, send_reply
from lathe.server.api.inference.memory_ledger import MemoryLedger
from lathe.server.errors import ServerError

MAX_DOCUMENT = 1 << 20  # the most bytes of JSON in a management call
UPLOAD_MEMORY = 2 << 20  # the most bytes of memory of an upload: the block that is being written, and the next one
_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class BodyLimits:
    """Middleware that receives JSON bodies, so that the routes neither wait for them nor parse too large ones."""

    def __init__(self, app: ASGIApp, ledger: MemoryLedger, max_body: int) -> None:
        self._app = app
        self._ledger = ledger
        self._limit = min(MAX_DOCUMENT, max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; refuse it if its body is too large or has too many values, or the ledger has no room.

        An upload is passed on unread, with `UPLOAD_MEMORY` bytes counted in the ledger until it is answered.
        """
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY or is_infer_path(scope["raw_path"]):
            await self._app(scope, receive, send)
            return
        try:
            with self._ledger.claim(client_id(scope)) as claim:
                if scope["state"]["uploads"]:
                    claim.add(UPLOAD_MEMORY)
                    await self._app(scope, receive, send)
                    return
                body = await read_body(receive, self._limit, claim)
                check_values(body, "body", MAX_DOCUMENT_VALUES)
                await self._app(scope, _replay(bytes(body), receive), send)
        except ServerError as error:  # raised above, not by the application, which answers its own errors
            await send_reply(send, error_reply(error, scope["path"]))
        except ClientLeft:
            return


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, and then the messages that follow."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message
