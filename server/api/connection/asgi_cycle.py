"""The server side of one ASGI request: uvicorn's `RequestResponseCycle` with five additions.

HTTP/1.0 clients may keep the connection, and get no chunked answers. A connection that closes after an answer first
discards what its client still sends; otherwise the client might never read the answer. A connection whose client still
waits for `100 Continue` closes after the answer. The application may allow a body more time and bytes than the default.
And the application may start later: a request waits for its turn.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn._types import ASGISendEvent, HTTPScope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from lathe.server.access.authority import Caller

UPLOAD = "lathe.upload"  # the ASGI extension: a function that applies the limits of file uploads to a request's body
_NO_BODY = (204, 304)


class ResponseTransport:
    """The transport as an ASGI response uses it; `close` may delay the closing of the connection."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class AsgiCycle(RequestResponseCycle):
    """One ASGI request and its answer."""

    def __init__(
        self,
        scope: HTTPScope,
        outlet: ResponseTransport,
        flow: FlowControl,
        default_headers: list[tuple[bytes, bytes]],
        *,
        expects_continue: bool,
        keep_alive: bool,
        on_response: Callable[[], None],
        on_upload: Callable[[AsgiCycle], None],
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
        self.is_started = False  # the application runs, or has run
        self._unsized = False  # the answer has no length: it ends when the connection closes
        this = weakref.ref(self)  # the scope belongs to the cycle: another reference would keep both

        def allow_upload() -> None:
            cycle = this()
            if cycle is not None:
                on_upload(cycle)

        extensions: dict[str, Any] = {UPLOAD: allow_upload}
        scope["extensions"] = extensions

    @property
    def has_valid_key(self) -> bool:
        """Whether the application has found a valid key in the request."""
        caller = self.scope.get("state", {}).get("caller")
        return isinstance(caller, Caller) and caller.key is not None

    @property
    def has_buffered_enough(self) -> bool:
        """Whether more than `HIGH_WATER_LIMIT` bytes of the body wait for the application, and more will come.

        Then the connection should not read further. False once the answer is complete.
        """
        return self.more_body and not self.response_complete and len(self.body) > HIGH_WATER_LIMIT

    def add_body(self, part: bytes) -> None:
        """Hand a part of the body to the application, or drop it if the request is already answered.

        Pauses reading from the connection while more than `HIGH_WATER_LIMIT` bytes are unread.
        """
        if self.response_complete:
            return
        self.body += part
        if len(self.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.message_event.set()

    def end_body(self) -> None:
        """Tell the application that the body is complete."""
        if not self.response_complete:
            self.more_body = False
            self.message_event.set()

    def disconnect(self) -> None:
        """Tell the application that its client has left, and never send `100 Continue` for it.

        The transport may be closed, and a `100 Continue` after the answer would look like a second answer.
        """
        self.disconnected = True
        self.waiting_for_100_continue = False
        self.message_event.set()

    async def send(self, message: ASGISendEvent) -> None:
        """Send one message of the application, with the headers and framing that an HTTP/1.0 client needs.

        If the client still waits for `100 Continue`, the connection closes after the answer: the next bytes are
        ambiguous.
        """
        if message["type"] == "http.response.start" and not self.response_started:
            if self.waiting_for_100_continue:
                self.keep_alive = False  # the client may or may not send the body: the next bytes are ambiguous
            if self.scope["http_version"] == "1.0":
                message["headers"] = [*message.get("headers", ()), *self._begin_http_1_0(message)]
        elif message["type"] == "http.response.body" and self._unsized:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)

    def _begin_http_1_0(self, start: Any) -> list[tuple[bytes, bytes]]:
        """The headers to add to an answer for an HTTP/1.0 client: `connection: keep-alive` if it stays connected.

        The client stays connected only if the answer has a length, or no body. Otherwise the answer is not chunked, and
        the end of the connection is the end of the answer.
        """
        names = {name.lower() for name, _ in start.get("headers", ())}
        if b"content-length" not in names and start["status"] not in _NO_BODY and self.scope["method"] != "HEAD":
            self._unsized, self.chunked_encoding, self.keep_alive = True, False, False
        return [(b"connection", b"keep-alive")] if self.keep_alive and b"connection" not in names else []


def add_request_line(scope: HTTPScope, method: str, version: str, target: bytes) -> None:
    """Set method, version, path and query of a request line in an ASGI scope; HttpParserError for an invalid target."""
    path, query = target, b""
    if target != b"*":
        parsed = httptools.parse_url(target)
        path, query = parsed.path or b"/", parsed.query or b""
    text = path.decode("ascii")
    scope["method"], scope["http_version"] = method, version
    scope["path"] = unquote(text) if "%" in text else text
    scope["raw_path"], scope["query_string"] = path, query
