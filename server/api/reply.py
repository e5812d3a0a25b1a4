"""A finished HTTP answer, before any transport: what the fast path and the ASGI route both send."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TypeAlias

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from server.errors import Internal, ServerError

log = logging.getLogger("lathe.api")

Header: TypeAlias = tuple[bytes, bytes]


@dataclass(slots=True)
class Reply:
    """Status, headers and the body's first part; ``block`` is the latter two as they go over the wire.

    One reply may stand for many answers, which differ in what follows its text.
    """

    status: int
    headers: tuple[Header, ...]
    text: bytes
    block: bytes
    begun: bytes = b""  # the status line, the lines that every answer has, and the block
    lines: list[Header] | None = None  # with which it was begun; they are replaced once a second

    def beginning(self, lines: list[Header]) -> bytes:
        """Return all but the payloads as it goes over the wire, for an answer that has these header lines, too."""
        if lines is not self.lines:
            self.begun = STATUS_LINE[self.status] + b"".join([b"%b: %b\r\n" % header for header in lines]) + self.block
            self.lines = lines
        return self.begun


def render(headers: tuple[Header, ...], text: bytes) -> bytes:
    """Return header lines, the empty line and the body's first part."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"%b\r\n%b" % (lines, text)


def closing(reply: Reply) -> Reply:
    """Return a reply that also says that the connection ends."""
    headers = ((b"connection", b"close"), *reply.headers)
    return Reply(reply.status, headers, reply.text, render(headers, reply.text))


def json_reply(status: int, text: bytes, extra: tuple[Header, ...] = ()) -> Reply:
    """Return an answer whose whole body is this JSON."""
    headers = (*_json_headers(len(text)), *extra)
    return Reply(status, headers, text, render(headers, text))


def begun_json_reply(text: bytes, size: int) -> Reply:
    """Return an answer of so many bytes of JSON but for what follows this text."""
    headers = _json_headers(size)
    return Reply(200, headers, text, render(headers, text))


def _json_headers(size: int) -> tuple[Header, ...]:
    return (b"content-type", b"application/json"), (b"content-length", b"%d" % size)


def binary_kind(text: bytes) -> tuple[Header, ...]:
    """Return the headers that say where this JSON ends and binary data begins."""
    return (
        (b"content-type", b"application/octet-stream"),
        (b"inference-header-content-length", b"%d" % len(text)),
    )


def binary_reply(text: bytes, payload_bytes: int) -> Reply:
    """Return an answer of this JSON but for the binary data that follows it."""
    headers = (*binary_kind(text), (b"content-length", b"%d" % (len(text) + payload_bytes)))
    return Reply(200, headers, text, render(headers, text))


def error_reply(error: Exception, path: bytes | str = "") -> Reply:
    """Return ``{"error": ...}``, below /api with its ``code``.

    Of an unforeseen exception the caller learns nothing but that it happened.
    """
    if not isinstance(error, ServerError):
        log.error("unforeseen error", exc_info=error)
        error = Internal("an internal error happened; the server's log has it")
    extra: tuple[Header, ...] = ()
    if error.retry_after is not None:
        extra = ((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))),)
    if error.http_status == 401:
        extra += ((b"www-authenticate", b"Bearer"),)
    document = {"error": error.message}
    if path[:5] in ("/api/", b"/api/"):
        document["code"] = error.code
    return json_reply(error.http_status, orjson.dumps(document), extra)
