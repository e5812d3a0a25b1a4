"""`TextResponse`: sends the texts of a request, as one JSON document or as server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lathe.core.language.generation.request import Progress
from lathe.server.api.openai.connected import while_connected
from lathe.server.errors import ServerError
from lathe.server.generation.texts import Texts

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class TextResponse(Response, ABC):
    """The answer to a request for texts. When the client disconnects, its texts are cancelled.

    `take` gets the parts of the texts in their order, before `document` or `last_event`.
    """

    def __init__(self, texts: Texts, *, streams: bool) -> None:
        """`streams`: as events."""
        self.status_code, self.background = 200, None
        self.texts = texts
        self._streams = streams

    @abstractmethod
    def take(self, index: int, part: Progress) -> Sequence[Any]:
        """Add a part of a text; returns what `event_of` makes the events for it of, which may be nothing."""

    @abstractmethod
    def event_of(self, item: Any) -> bytes:
        """The event for one item that `take` has returned."""

    @abstractmethod
    def document(self) -> bytes:
        """The whole answer."""

    @abstractmethod
    def last_event(self) -> bytes:
        """The end of the stream."""

    @abstractmethod
    def failure(self, error: ServerError) -> bytes:
        """The event of an error after the first events."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises the ServerError of texts that have failed before anything was sent."""
        try:
            self.texts.admit()
            await while_connected(self._send_events(send) if self._streams else self._send_whole(send), receive)
        finally:
            self.texts.close()

    async def _send_whole(self, send: Send) -> None:
        async for index, part in self.texts.parts():
            self.take(index, part)
        await self.send_document(send)

    async def send_document(self, send: Send) -> None:
        """Send `document`, as JSON."""
        await send_json(send, self.document())

    async def _send_events(self, send: Send) -> None:
        began = False
        try:
            async for index, part in self.texts.parts():
                events = b"".join(map(self.event_of, self.take(index, part)))
                if not began:
                    began = True
                    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": self.last_event()})
        except ServerError as error:
            if not began:
                raise
            await send({"type": "http.response.body", "body": self.failure(error)})


async def send_json(send: Send, body: bytes) -> None:
    """Send a JSON document with status 200."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def event(document: bytes) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + document + b"\n\n"
