"""Adds a newline to JSON answers, so that a shell's prompt after `curl` begins on a new line.

Answers of inference are not changed: binary data may follow their JSON, whose length is in a header.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lathe.server.api.codec.call_head import is_infer_path


class TrailingNewline:
    """Middleware that appends a newline to JSON bodies and corrects their content-length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; add a newline to an answer of JSON."""
        if scope["type"] != "http" or is_infer_path(scope["raw_path"]):
            await self._app(scope, receive, send)
            return
        is_json = False

        async def sent(message: Message) -> None:
            nonlocal is_json
            if message["type"] == "http.response.start":
                kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
                is_json = kinds == [b"application/json"]
                if is_json:
                    message = {**message, "headers": [_plus_one(header) for header in message["headers"]]}
            elif is_json and not message.get("more_body", False):
                message = {**message, "body": message.get("body", b"") + b"\n"}
            await send(message)

        await self._app(scope, receive, sent)


def _plus_one(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    name, value = header
    return (name, b"%d" % (int(value) + 1)) if name.lower() == b"content-length" else header
