"""A finished HTTP answer, independent of the transport: the fast path and the ASGI route both send it."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import TypeAlias

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from lathe.server.errors import Internal, ServerError, UnknownModel, drop_frames

log = logging.getLogger("lathe.api")

Header: TypeAlias = tuple[bytes, bytes]


@dataclass(slots=True)
class Reply:
    """Status, headers and the first part of the body; `block` holds headers and text as bytes on the wire.

    One reply may be used for many answers that differ in their payloads, which follow the text.
    """

    status: int
    headers: tuple[Header, ...]
    text: bytes
    block: bytes
    begun: bytes = b""  # cache of `head_bytes`: status line, default headers and block
    lines: list[Header] | None = None  # the default headers in `begun`; uvicorn replaces them once a second

    def head_bytes(self, lines: list[Header]) -> bytes:
        """Status line, the default headers `lines`, the reply's own headers and the text, as bytes on the wire.

        The result is cached until a call with another list object.
        """
        if lines is not self.lines:
            self.begun = STATUS_LINE[self.status] + b"".join([b"%b: %b\r\n" % header for header in lines]) + self.block
            self.lines = lines
        return self.begun


def render_block(headers: tuple[Header, ...], text: bytes) -> bytes:
    """The header lines, the empty line and the first part of the body, as bytes."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"%b\r\n%b" % (lines, text)


def with_close(reply: Reply) -> Reply:
    """A copy of the reply with the header `connection: close`."""
    headers = ((b"connection", b"close"), *reply.headers)
    return Reply(reply.status, headers, reply.text, render_block(headers, reply.text))


def json_reply(status: int, text: bytes, extra: tuple[Header, ...] = ()) -> Reply:
    """A reply whose whole body is this JSON."""
    headers = (*_json_headers(len(text)), *extra)
    return Reply(status, headers, text, render_block(headers, text))


def begun_json_reply(text: bytes, size: int) -> Reply:
    """A reply 200 with `size` bytes of JSON, of which `text` is the beginning; the payloads are the rest."""
    headers = _json_headers(size)
    return Reply(200, headers, text, render_block(headers, text))


def _json_headers(size: int) -> tuple[Header, ...]:
    return (b"content-type", b"application/json"), (b"content-length", b"%d" % size)


def binary_headers(text: bytes) -> tuple[Header, ...]:
    """The headers of a body that consists of this JSON and binary data, without its content-length."""
    return (
        (b"content-type", b"application/octet-stream"),
        (b"inference-header-content-length", b"%d" % len(text)),
    )


def binary_reply(text: bytes, payload_bytes: int) -> Reply:
    """A reply 200 of this JSON, to be followed by `payload_bytes` bytes of binary data."""
    headers = (*binary_headers(text), (b"content-length", b"%d" % (len(text) + payload_bytes)))
    return Reply(200, headers, text, render_block(headers, text))


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_FIELD = re.compile(r"(?:body\.)?([a-z_]+)(?:[.\[][^:]*)?: ")


def openai_error(error: ServerError) -> dict[str, object]:
    """The body of an error in OpenAI's API: an object with `message`, `type`, `param` and `code`."""
    status = error.http_status
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    field = _FIELD.match(error.message) if status == 400 else None
    code = "model_not_found" if isinstance(error, UnknownModel) else error.code
    return {"error": {"message": error.message, "type": kind, "param": field[1] if field else None, "code": code}}


def answered_error(error: Exception) -> ServerError:
    """The error if it is a ServerError; any other is logged, and replaced by an Internal without details.

    The error loses its traceback, which refers to the body of the request.
    """
    if isinstance(error, ServerError):
        drop_frames(error)
        return error
    log.error("unexpected error", exc_info=error)
    drop_frames(error)
    return Internal("an internal error happened; the server's log has it")


def error_reply(error: Exception, path: bytes | str = "") -> Reply:
    """A reply `{"error": ...}` with the error's status; for paths below /api it also has the `code`.

    For paths below /v1 it has the form of OpenAI's API.
    It has the header `retry-after` if the error has a `retry_after`, and `www-authenticate` for status 401. It says
    what `answered_error` returns.
    """
    error = answered_error(error)
    extra: tuple[Header, ...] = ()
    if error.retry_after is not None:
        extra = ((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))),)
    if error.http_status == 401:
        extra += ((b"www-authenticate", b"Bearer"),)
    document: dict[str, object] = {"error": error.message}
    if path[:5] in ("/api/", b"/api/"):
        document["code"] = error.code
    elif path[:4] in ("/v1/", b"/v1/"):
        document = openai_error(error)
    return json_reply(error.http_status, orjson.dumps(document), extra)
