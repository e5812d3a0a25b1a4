"""Bodies of what is not inference: small documents are received whole and counted, uploads pass in blocks."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.asgi import ClientLeft, read_body, send_reply, whose
from server.api.callhead import is_infer_path
from server.api.jsonbound import DOCUMENT_VALUES, check_values
from server.api.ledger import Ledger
from server.api.reply import error_reply
from server.errors import ServerError

DOCUMENT = 1 << 20  # bytes of a management call's JSON
UPLOAD = 2 << 20  # bytes that an upload holds at most: a block that is being written, and the next one
_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class Received:
    """Middleware. Nothing behind it waits for a body of JSON, or meets one that takes long to read."""

    def __init__(self, app: ASGIApp, ledger: Ledger, max_body: int) -> None:
        self._app = app
        self._ledger = ledger
        self._limit = min(DOCUMENT, max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; one whose body is too large, or for which there is no room, is answered here."""
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY or is_infer_path(scope["raw_path"]):
            await self._app(scope, receive, send)
            return
        try:
            with self._ledger.claim(whose(scope)) as claim:
                if scope["state"]["uploads"]:
                    claim.add(UPLOAD)
                    await self._app(scope, receive, send)
                    return
                body = await read_body(receive, self._limit, claim)
                check_values(body, "body", DOCUMENT_VALUES)
                await self._app(scope, _replayed(bytes(body), receive), send)
        except ServerError as error:  # of this class alone: what is behind it answers its own
            await send_reply(send, error_reply(error, scope["path"]))
        except ClientLeft:
            return


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return what gives the body first, then what else comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message
