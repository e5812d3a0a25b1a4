"""How two other parsers of HTTP/1 read a stream: h11 and gunicorn's. They share no code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import h11
from gunicorn.config import Config
from gunicorn.http.body import LengthReader
from gunicorn.http.errors import NoMoreData, ParseException
from gunicorn.http.parser import RequestParser

_ORIGIN = re.compile(rb"[a-z]+://[^/?#]*", re.IGNORECASE)


class End(Enum):
    """The state of the connection after the last complete request."""

    IDLE = "nothing more came"
    WAITING = "part of a request came"
    REFUSED = "what came is refused"
    CLOSED = "the last request ended it"


@dataclass(frozen=True)
class Request:
    """A complete request."""

    method: bytes
    target: bytes
    body: bytes


@dataclass(frozen=True)
class Reading:
    """The requests that a parser found, and what followed them."""

    requests: tuple[Request, ...]
    end: End


def request(method: bytes, target: bytes, body: bytes) -> Request:
    """A request whose target is a path; for a whole URL, the URL's path (RFC 9112, section 3.2.2)."""
    match = _ORIGIN.match(target)
    if match:
        target = target[match.end() :]
        target = target if target.startswith(b"/") else b"/" + target
    return Request(method, target, body)


def read_by_h11(data: bytes) -> Reading:
    """h11 answers each request at once, and declines offers of other protocols."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    found: list[Request] = []
    head, body = None, b""
    while True:
        try:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                waiting = head is not None or connection.trailing_data[0]
                return Reading(tuple(found), End.WAITING if waiting else End.IDLE)
            if isinstance(event, h11.Request):
                assert head is None
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                found.append(request(head.method, head.target, body))
                connection.send(h11.Response(status_code=405, headers=[("Content-Length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return Reading(tuple(found), End.REFUSED if _may_stay(head) else End.CLOSED)
                connection.start_next_cycle()
                head = None
        except h11.RemoteProtocolError:
            return Reading(tuple(found), End.REFUSED)


def _may_stay(head: h11.Request) -> bool:
    """Whether a request of HTTP/1.0 asks to keep its connection. h11 ignores that and reads no further request."""
    values = b",".join(value for name, value in head.headers if name == b"connection")
    options = {option.strip() for option in values.lower().split(b",")}
    return head.http_version == b"1.0" and b"keep-alive" in options and b"close" not in options


def read_by_gunicorn(data: bytes) -> Reading:
    """A refusal after the last byte may be due to the end of the stream: then it counts as a part of a request."""
    ended = False

    def source() -> Iterator[bytes]:
        nonlocal ended
        yield data
        ended = True

    parser = RequestParser(Config(), source(), ("127.0.0.1", 1))
    found: list[Request] = []
    while True:
        try:
            message: Any = next(parser)
            body = message.body.read()
        except StopIteration:
            return Reading(tuple(found), End.CLOSED if found and parser.mesg.should_close() else End.IDLE)
        except NoMoreData as error:
            return Reading(tuple(found), End.WAITING if error.buf else End.IDLE)
        except ParseException:
            return Reading(tuple(found), End.WAITING if ended else End.REFUSED)
        announced = int(dict(message.headers).get("CONTENT-LENGTH", 0))
        # gunicorn returns the bytes there are
        if isinstance(message.body.reader, LengthReader) and len(body) < announced:
            return Reading(tuple(found), End.WAITING)
        found.append(request(message.method.encode("latin-1"), message.uri.encode("latin-1"), body))
