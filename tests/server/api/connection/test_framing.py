"""Trailers, repeated headers, transfer codings, request targets and offers of other protocols."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.api.connection.framing import SINGLE_HEADERS
from tests.server.fakes import doubler
from tests.server.running import Running, infer_request, request, rows, serving, tensor_of

INFER = b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n"
OFFER = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving({"doubler": doubler()}, max_header=8192) as running:
        yield running


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """A server with keys, and a key with all scopes."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    key, shown = make_key("all", list(Scope), ["*"], int(time.time()), None)
    write_keys(Path(path), [key])
    with serving({"doubler": doubler()}, keys_file=path) as running:
        yield running, shown


def test_a_key_in_a_trailer_is_ignored(keyed: tuple[Running, str]) -> None:
    """A line after the body must not bypass a proxy that checks or strips headers."""
    running, shown = keyed
    for target in (b"GET /metrics", b"POST /v2/repository/index", b"POST /v2/models/doubler/infer?x"):
        head = target + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = running.ask_raw(head + b"0\r\nAuthorization: Bearer " + shown.encode() + b"\r\n\r\n")
        assert answer.status == 401


def test_trailers_are_read_and_dropped(server: Running) -> None:
    head, body = infer_request("doubler", rows(1)).split(b"\r\n\r\n", 1)
    head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length"))
    data = head + b"\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
    with server.connect() as raw:
        raw.send(data + b"Content-Encoding: gzip\r\nInference-Header-Content-Length: 1\r\nHost: b\r\n\r\n")
        np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)
        raw.send(request("GET", "/v2"))
        assert raw.answer().status == 200


@pytest.mark.parametrize("part", [b"X: " + b"x" * 50_000, b"4;" + b"x" * 50_000, b"X: y\r\n" * 10_000])
def test_chunk_framing_is_bounded(server: Running, part: bytes) -> None:
    """Also one line without an end, which the parser would collect until it ends."""
    with server.connect() as raw:
        raw.send(INFER + b"Transfer-Encoding: chunked\r\n\r\n" + (b"" if part.startswith(b"4") else b"0\r\n"))
        time.sleep(0.02)
        for at in range(0, len(part), 10_000):
            raw.send(part[at : at + 10_000])
            time.sleep(0.002)
        answer = raw.answer()
        assert (answer.status, answer.headers["connection"]) == (431, "close")


def test_a_request_with_two_keys_is_refused_everywhere(keyed: tuple[Running, str]) -> None:
    running, shown = keyed
    other = b"Authorization: Bearer lathe_000000000000_x\r\n"
    right = b"Authorization: Bearer " + shown.encode() + b"\r\n"
    for line in (b"GET /metrics", b"POST /v2/models/doubler/infer", b"POST /v2/models/doubler/infer?x"):
        head = line + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n"
        assert running.ask_raw(head + right + b"\r\n").status in (200, 400)
        for pair in (other + right, right + other, right + right):
            answer = running.ask_raw(head + pair + b"\r\n")
            assert (answer.status, answer.error) == (400, "headers: authorization: expected one at most, got 2")


@pytest.mark.parametrize("name", sorted(SINGLE_HEADERS - {b"content-length", b"transfer-encoding", b"upgrade"}))
def test_headers_that_may_appear_once_are_refused_twice(server: Running, name: bytes) -> None:
    for infer in (GET, INFER + b"Content-Length: 0\r\n"):
        answer = server.ask_raw(infer + (name.title() + b": 1\r\n" + name + b": 2\r\n") + b"\r\n")
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert answer.error == f"headers: {name.decode()}: expected one at most, got 2"


@pytest.mark.parametrize(
    ("coding", "status", "message"),
    [
        (b"gzip, chunked", 501, "only chunked is understood, got 'gzip, chunked'"),
        (b"identity,chunked", 501, "only chunked is understood"),
        (b"gzip", 400, "expected chunked, got 'gzip'"),
        (b"xyz", 400, "expected chunked, got 'xyz'"),
        (b"Chunked", 200, ""),
    ],
)
def test_only_chunked_is_accepted_as_a_coding(server: Running, coding: bytes, status: int, message: str) -> None:
    for line in (INFER, b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\n"):
        answer = server.ask_raw(line + b"Transfer-Encoding: " + coding + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        if status == 200:
            assert answer.status in (200, 400)  # read, although the request makes no sense
            assert b"coding" not in answer.body
        else:
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            assert message in answer.error


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost/v2", 200),
        (b"HTTP://LOCALHOST:80/v2", 200),
        (b"http://evil.example/v2", 400),
        (b"http://a@evil/v2", 400),
        (b"http://evil@a/v2", 400),
        (b"http:///v2", 400),
        (b"https://localhost:443/v2", 200),
        (b"http://localhost:8080/v2", 400),
        (b"ftp://localhost/v2", 400),
        (b"/v2#part", 400),
        (b"http://localhost/v2#part", 400),
    ],
)
def test_a_whole_url_names_the_host(server: Running, target: bytes, status: int) -> None:
    answer = server.ask_raw(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.status == status, answer.body


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "this port speaks http://, not https://"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "expected HTTP/1.1 or HTTP/1.0, got HTTP/2"),
        (INFER + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "headers: Duplicate Content-Length"),
        (INFER + b"A b: c\r\n\r\n", 400, "headers: Invalid header token"),
        (b"BREW /pot HTTP/1.1\r\n\r\n", 400, "request line: not valid HTTP/1.1 (Invalid method"),
    ],
)
def test_the_refusal_of_a_bad_head_says_what_is_wrong(server: Running, sent: bytes, status: int, message: str) -> None:
    answer = server.ask_raw(sent)
    assert answer.status == status
    assert message in answer.error


def test_a_thousand_upgrade_offers_are_a_thousand_requests(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Each was once a nested call: 75 KB ended the connection with a traceback of 300 KB."""
    count = 1500
    with caplog.at_level(logging.ERROR), server.connect() as raw:
        raw.send((GET + OFFER + b"\r\n") * count)
        for _ in range(count):
            assert raw.answer().status == 200
    assert not caplog.records


def test_an_upgrade_offer_changes_nothing_else(server: Running) -> None:
    closing = OFFER.replace(b"Upgrade\r\n", b"close, Upgrade\r\n", 1)
    for head in (GET, INFER + b"Content-Length: 0\r\n"):
        with server.connect() as raw:
            raw.send(head + closing + b"\r\n")
            assert raw.answer().headers["connection"] == "close"
            assert raw.is_closed()
    with server.connect() as raw:
        raw.send(GET.replace(b"1.1", b"1.0") + OFFER + b"\r\n")
        assert raw.answer().headers["connection"] == "close"
        assert raw.is_closed()
    with server.connect() as raw:  # a head with an offer is not remembered as the head without it
        data = infer_request("doubler", rows(1)).replace(b"Host", OFFER + b"Host")
        for start in range(3):
            raw.send(data + infer_request("doubler", rows(1, start=start)))
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1, start=start) * 2)


def test_proxy_connection_does_not_keep_the_connection_open(server: Running) -> None:
    """The parser treats Proxy-Connection as Connection, unlike other servers (RFC 9112, appendix C.2.2).

    After such a request of HTTP/1.0 they saw the end of the connection, and Lathe saw another request."""
    head = GET.replace(b"1.1", b"1.0") + b"Proxy-Connection: Keep-Alive\r\n"
    with server.connect() as raw:
        raw.send(head + b"\r\n" + GET + b"\r\n")
        answer = raw.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert answer.error == "headers: proxy-connection: expected connection in a request of HTTP/1.0"
        assert raw.is_closed()
    with server.connect() as raw:
        raw.send(GET.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n\r\n" + GET + b"Proxy-Connection: x\r\n\r\n")
        assert [raw.answer().status for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("values", [(b"close, keep-alive",), (b"Keep-Alive", b"close"), (b"x,CLOSE", b"keep-alive")])
def test_close_wins_over_keep_alive(server: Running, values: tuple[bytes, ...]) -> None:
    """The parser kept a connection of HTTP/1.0 open although `close` has precedence (RFC 9112, section 9.3)."""
    lines = b"".join(b"Connection: " + value + b"\r\n" for value in values)
    with server.connect() as raw:
        raw.send(GET.replace(b"1.1", b"1.0") + lines + b"\r\n" + GET + b"\r\n")
        answer = raw.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert answer.error == "headers: connection: expected close or keep-alive, got both"
        assert raw.is_closed()
    with server.connect() as raw:
        raw.send(GET + lines + b"\r\n" + GET + b"\r\n")
        answer = raw.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert raw.is_closed()
