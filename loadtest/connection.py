"""One keep-alive HTTP connection: sends bytes, returns parsed responses, with little Python per request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast
from urllib.parse import urlsplit

import httptools

from loadtest.wire import Response, http_request

OnResponse = Callable[["Connection", Response | None], None]

HEADS = 64  # cached response heads; their Date header makes new ones every second


@dataclass(frozen=True, slots=True)
class Head:
    """A parsed response head."""

    status: int
    headers: dict[bytes, bytes]
    length: int  # bytes of the body


class Connection(asyncio.Protocol):
    """Sends one request at a time. `send` calls `answered(self, None)` if the connection breaks before the response.

    A response that arrives in one piece and whose head is cached skips the parser. Under overload the generator sees
    the same few heads thousands of times a second, on processors that the server needs.
    """

    heads: ClassVar[dict[bytes, Head]] = {}

    def __init__(self) -> None:
        self.number = -1  # index of the request in flight; set by the sender
        self.transport: asyncio.Transport | None = None
        self.waiting: OnResponse | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._raw = b""  # the response, if all of it arrived in one call
        self._parsing = False  # inside a response

    @property
    def is_usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def send(self, request: bytes, answered: OnResponse) -> None:
        self.waiting = answered
        if self.transport is None:
            self._answer(None)
        else:
            self.transport.write(request)

    async def ask(self, request: bytes) -> Response:
        """Send a request and return its response. ConnectionError if the connection breaks first."""
        answer: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()

        def answered(_: Connection, response: Response | None) -> None:
            if not answer.done():  # the caller may have stopped waiting
                answer.set_result(response)

        self.send(request, answered)
        response = await answer
        if response is None:
            raise ConnectionError("the server closed the connection before it answered")
        return response

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._parsing:
            end = data.find(b"\r\n\r\n") + 4
            known = self.heads.get(data[:end])
            if known is not None and len(data) == end + known.length:
                self._answer(Response(known.status, known.headers, data[end:]))
                return
        self._raw = b"" if self._parsing else data
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._answer(None)

    # httptools
    def on_message_begin(self) -> None:
        self._parsing = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        response = Response(self._parser.get_status_code(), self._headers, b"".join(self._body))
        self._headers, self._body = {}, []
        self._parsing = False
        if not self._parser.should_keep_alive():
            self.close()
        else:
            self._remember(response)
        self._answer(response)

    def _remember(self, response: Response) -> None:
        """Cache the parsed head, if head and body arrived together and the body is not encoded (no chunks)."""
        raw, self._raw = self._raw, b""
        end = raw.find(b"\r\n\r\n") + 4
        if raw[end:] == response.body:
            if len(self.heads) >= HEADS:
                self.heads.clear()
            self.heads[raw[:end]] = Head(response.status, response.headers, len(response.body))

    def _answer(self, response: Response | None) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting(self, response)


class Target:
    """The server's address: opens connections and sends single requests (control plane, statistics)."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"url: expected http://host:port, got {url!r}")
        self.host, self.port = parts.hostname, parts.port or 80
        self.authority = parts.netloc

    async def connect(self) -> Connection:
        _, protocol = await asyncio.get_running_loop().create_connection(Connection, self.host, self.port)
        return protocol

    async def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Response:
        connection = await self.connect()
        try:
            return await connection.ask(http_request(method, path, self.authority, body, headers))
        finally:
            connection.close()
