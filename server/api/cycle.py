"""A request that the application answers, on the server's side of ASGI: uvicorn's, with what it leaves out.

HTTP/1.0 clients may keep the connection, and know no chunks. A connection that closes after an answer goes on
discarding what its client is still sending, else the client might never read the answer. And the application may grant
more time and room to a body than everybody has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn._types import ASGISendEvent, HTTPScope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

UPLOAD = "lathe.upload"  # the ASGI extension: a function that lets a request's body be a file
_NO_BODY = (204, 304)


class Outlet:
    """The transport as an answer sees it. It is not the one that decides when the connection is closed."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class Cycle(RequestResponseCycle):
    """One request and its answer."""

    def __init__(
        self,
        scope: HTTPScope,
        outlet: Outlet,
        flow: FlowControl,
        default_headers: list[tuple[bytes, bytes]],
        *,
        expects_continue: bool,
        keep_alive: bool,
        on_response: Callable[[], None],
        on_upload: Callable[[RequestResponseCycle], None],
    ) -> None:
        super().__init__(
            scope=scope,
            transport=cast(asyncio.Transport, outlet),
            flow=flow,
            logger=logging.getLogger("uvicorn.error"),
            access_logger=logging.getLogger("uvicorn.access"),
            access_log=False,
            default_headers=default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expects_continue,
            keep_alive=keep_alive,
            on_response=on_response,
        )
        self._unsized = False  # its end is the connection's end
        extensions: dict[str, Any] = {UPLOAD: lambda: on_upload(self)}
        scope["extensions"] = extensions

    async def send(self, message: ASGISendEvent) -> None:
        """Send one message of the application."""
        if message["type"] == "http.response.start" and not self.response_started:
            if self.waiting_for_100_continue:
                self.keep_alive = False  # the body may come or not: what follows could be taken for it
            if self.scope["http_version"] == "1.0":
                message["headers"] = [*message.get("headers", ()), *self._begin_http_1_0(message)]
        elif message["type"] == "http.response.body" and self._unsized:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)

    def _begin_http_1_0(self, start: Any) -> list[tuple[bytes, bytes]]:
        """Return the headers that tell an HTTP/1.0 client where the answer ends."""
        names = {name.lower() for name, _ in start.get("headers", ())}
        if b"content-length" not in names and start["status"] not in _NO_BODY and self.scope["method"] != "HEAD":
            self._unsized, self.chunked_encoding, self.keep_alive = True, False, False
        return [(b"connection", b"keep-alive")] if self.keep_alive and b"connection" not in names else []


def describe(scope: HTTPScope, method: str, version: str, target: bytes) -> None:
    """Complete a scope by the request line; raises HttpParserError for a target that is none."""
    path, query = target, b""
    if target != b"*":
        parsed = httptools.parse_url(target)
        path, query = parsed.path or b"/", parsed.query or b""
    text = path.decode("ascii")
    scope["method"], scope["http_version"] = method, version
    scope["path"] = unquote(text) if "%" in text else text
    scope["raw_path"], scope["query_string"] = path, query
