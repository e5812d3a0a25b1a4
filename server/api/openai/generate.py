"""The answer to `POST /v2/models/MODEL/generate` and `generate_stream`, the extension of Triton's protocol.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lathe.server.api.openai.connected import while_connected
from lathe.server.errors import ServerError
from lathe.server.generation.texts import Texts


class GenerateAnswer(Response):
    """One text, as a JSON object or as an event for each part. When the client disconnects, the text is cancelled."""

    def __init__(self, texts: Texts, id: str | None, prefix: str, *, streams: bool) -> None:
        """`id`: of the request. `prefix`: comes before the text."""
        self.status_code, self.background = 200, None
        self._texts, self._prefix, self._streams = texts, prefix, streams
        ref = texts.servable.ref
        self._head: dict[str, Any] = {"model_name": ref.name, "model_version": str(ref.version)}
        if id is not None:
            self._head["id"] = id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises the ServerError of a text that has failed before anything was sent."""
        self._texts.admit()
        try:
            await while_connected(self._send_events(send) if self._streams else self._send_whole(send), receive)
        finally:
            self._texts.close()

    async def _send_whole(self, send: Send) -> None:
        text = self._prefix
        async for _, part in self._texts.parts():
            text += part.text
        body = self._document(text)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, send: Send) -> None:
        text, began = self._prefix, False
        try:
            async for _, part in self._texts.parts():
                text += part.text
                if not began:
                    began = True
                    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                if text:
                    await send({"type": "http.response.body", "body": _event(self._document(text)), "more_body": True})
                    text = ""
            await send({"type": "http.response.body", "body": b""})
        except ServerError as error:
            if not began:
                raise
            await send({"type": "http.response.body", "body": _event(orjson.dumps({"error": error.message}))})

    def _document(self, text: str) -> bytes:
        return orjson.dumps({**self._head, "text_output": text})


def _event(document: bytes) -> bytes:
    return b"data: " + document + b"\n\n"
