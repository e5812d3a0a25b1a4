"""Heads that two parsers could read differently are refused, and no request is read after them.

The cases follow the request smuggling literature (RFC 9112, section 11.2; Linhart et al., 2005; Kettle, 2019)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.fakes import doubler
from tests.server.running import Running, serving

POST = b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /v2 HTTP/1.1\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HIDDEN = b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"

HEADS = {
    "length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 0\r\nContent-Length: 40\r\n\r\n",
    "a length with a sign": POST + b"Content-Length: +4\r\n\r\n{}  ",
    "a list of lengths": POST + b"Content-Length: 4, 4\r\n\r\n{}  ",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked not last": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a vertical tab": POST + b"Transfer-Encoding:\x0bchunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "a space before the colon": POST + b"Content-Length : 4\r\n\r\n{}  ",
    "a folded line": POST + b"X: a\r\n Content-Length: 40\r\nContent-Length: 4\r\n\r\n{}  ",
    "a bare line feed": b"GET /v2 HTTP/1.1\nHost: a\n\n",
    "a bare carriage return": POST + b"X: a\rContent-Length: 40\r\nContent-Length: 4\r\n\r\n{}  ",
    "a zero byte": GET + b"Host: localhost\r\nX: a\0b\r\n\r\n",
    "a negative chunk": CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n",
    "a chunk in C's notation": CHUNKED + b"0x4\r\n{}  \r\n0\r\n\r\n",
    "a chunk that ends in a line feed": CHUNKED + b"4\n{}  \n0\n\n",
    "a line feed in a chunk's extension": CHUNKED + b"4;a=\nb\r\n{}  \r\n0\r\n\r\n",
    "a chunk beyond 64 bits": CHUNKED + b"FFFFFFFFFFFFFFFF1\r\n{}\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /v2/models/doubler/infer HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a space in the target": b"GET /v2 x HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no host": GET + b"\r\n",
    "two hosts": GET + b"Host: a\r\nHost: b\r\n\r\n",
    "a path for a host": GET + b"Host: a/b\r\n\r\n",
    "a user for a host": GET + b"Host: a@b\r\n\r\n",
    "a port of letters": GET + b"Host: a:b\r\n\r\n",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving({"doubler": doubler()}, served_hosts="*") as running:
        yield running


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_an_ambiguous_head_is_refused_and_nothing_behind_it_is_a_request(server: Running, head: bytes) -> None:
    with server.connect() as raw:
        raw.send(head + HIDDEN)
        answer = raw.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert raw.is_closed()


@pytest.mark.parametrize("line", [b"GET /v2 HTTP/2.0\r\nHost: localhost\r\n\r\n", b"GET /v2\r\n\r\n"])
def test_only_version_1_of_http_is_spoken(server: Running, line: bytes) -> None:
    with server.connect() as raw:
        raw.send(line + HIDDEN)
        answer = raw.answer()
        assert (answer.status, answer.headers["connection"]) == (505, "close")
        assert raw.is_closed()


@pytest.mark.parametrize("host", [b"a", b"A:80", b"127.0.0.1", b"[::1]:8080", b"my_service.ns", b""])
def test_hosts_of_all_forms_are_served(server: Running, host: bytes) -> None:
    with server.connect() as raw:
        raw.send(GET + b"Host: " + host + b"\r\n\r\n")
        assert raw.answer().status == 200


def test_a_server_with_host_names_answers_to_no_other() -> None:
    """Protects against DNS rebinding: a page in a browser whose name now points to this address."""
    with serving({"doubler": doubler()}, served_hosts="localhost, Models.Example") as running:
        for host, status in ((b"LOCALHOST:1", 200), (b"models.example", 200), (b"evil.example", 421), (b"", 421)):
            with running.connect() as raw:
                raw.send(GET + b"Host: " + host + b"\r\n\r\n")
                assert raw.answer().status == status
