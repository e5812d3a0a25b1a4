"""Answers before the end of a request: a refused client keeps its connection for seconds and can read the reason.

For uploads: the server gives the long deadline and memory only to clients that it has authorized."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx
import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.api.connection import receive_deadline
from lathe.server.api.connection.asgi_cycle import AsgiCycle, ResponseTransport
from lathe.server.api.connection.transfer_rates import UploadRate
from tests.server.access.test_tls import SERVER, trusting
from tests.server.fakes import doubler
from tests.server.running import Raw, infer_request, request, rows, serving, wait_for
from tests.server.service import Service, service

SILENT = [
    b"POST /api/v1/datasets/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000000\r\n\r\n",
    b"POST /api/v1/models/m/versions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST /api/zzz/versions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000000\r\n\r\n",
    b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
    b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
    b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    """A server with keys and short timeouts, and a key with all scopes."""
    root = tmp_path_factory.mktemp("early")
    key, shown = make_key("all", list(Scope), ["*"], int(time.time()), None)
    write_keys(root / "keys.json", [key])
    limits = {"header_timeout": 2.0, "body_timeout": 1.0, "keep_alive": 60.0, "max_connections": 20}
    with service(root / "repo", keys_file=root / "keys.json", min_receive_rate=1000.0, **limits) as running:
        yield running, shown


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an answer a client has one second, and half a second between two reads."""
    monkeypatch.setattr(receive_deadline, "LINGER", 1.0)
    monkeypatch.setattr(receive_deadline, "LINGER_PAUSE", 0.5)


def port_of(running: Service) -> int:
    return int(running.url.rpartition(":")[2])


def until_closed(raw: Raw, say: Callable[[], None] = lambda: None, seconds: float = 20) -> float:
    """Return the seconds until the server closed the connection; `say` is called meanwhile."""
    began = time.monotonic()
    raw.socket.settimeout(0.05)
    while time.monotonic() - began < seconds:
        try:
            say()
            if not raw.socket.recv(65536):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began


@pytest.mark.sample(3)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("head", SILENT, ids=lambda head: head.split()[1].decode())
def test_a_client_that_is_silent_after_an_early_answer_is_closed(guarded: tuple[Service, str], head: bytes) -> None:
    with Raw(port_of(guarded[0])) as raw:
        raw.send(head)
        assert raw.answer().status in (200, 401, 404)
        assert until_closed(raw) < 5


@pytest.mark.usefixtures("impatient")
def test_a_refused_client_that_goes_on_sending_is_closed(guarded: tuple[Service, str]) -> None:
    for head in SILENT[:2]:
        with Raw(port_of(guarded[0])) as raw:
            raw.send(head)
            assert raw.answer().status == 401
            assert 0.5 < until_closed(raw, lambda raw=raw: raw.send(b"1\r\nx\r\n")) < 8  # type: ignore[misc]


def test_refused_clients_do_not_block_other_clients(guarded: tuple[Service, str], impatient: None) -> None:
    """Without a key, each once held its connection for half an hour."""
    running, _ = guarded
    silent = [Raw(port_of(running)) for _ in range(20)]
    try:
        for raw in silent:
            raw.send(SILENT[0])
        wait_for(lambda: httpx.get(f"{running.url}/v2/health/live").status_code == 200, 10)
    finally:
        for raw in silent:
            raw.close()


def test_a_body_received_after_its_answer_leaves_the_connection_open(guarded: tuple[Service, str]) -> None:
    with Raw(port_of(guarded[0])) as raw:
        raw.send(b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n")
        assert raw.answer().status == 401
        for _ in range(3):
            time.sleep(0.1)
            raw.send(b"x" * 100_000)
        raw.send(request("GET", "/v2"))
        assert raw.answer().status == 200


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_refused_client_that_sends_its_whole_body_reads_the_answer(tls: bool) -> None:
    """Closing at once would reset the connection and discard the bytes that were sent to the client."""
    with serving({"doubler": doubler()}, max_body=1000, **(SERVER if tls else {})) as running:
        for head in (
            b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n",
            b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 8000000\r\n\r\n",
        ):
            raw = Raw(running.port)
            if tls:
                raw.socket = trusting().wrap_socket(raw.socket, server_hostname="localhost")
            with raw:
                raw.send(head)
                time.sleep(0.2)
                for _ in range(80):
                    raw.send(b"x" * 100_000)
                answer = raw.answer()
                assert answer.status in (404, 413)
                assert answer.headers["connection"] == "close"


@pytest.mark.sample(2)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("refused_by", ["its head", "a deadline"])
def test_a_refusal_waits_for_the_answers_before_it(refused_by: str) -> None:
    """The first request still runs when the second is refused; the client keeps sending, and reads both answers."""
    model = doubler()
    model.gate.clear()
    with serving({"doubler": model}, header_timeout=0.5, body_timeout=30) as running, Raw(running.port) as raw:
        raw.send(infer_request("doubler", rows(1)))
        assert model.entered.wait(20)
        raw.send(b"GET /v2 HTTP/1.1\r\nHost: " + (b"a@b\r\n\r\n" if refused_by == "its head" else b""))
        for _ in range(20):
            time.sleep(0.1)
            raw.send(b"x")
        model.gate.set()
        assert raw.answer().status == 200
        assert raw.answer().status == (400 if refused_by == "its head" else 408)


@pytest.mark.usefixtures("impatient")
def test_nothing_is_read_after_a_refusal_instead_of_100_continue(guarded: tuple[Service, str]) -> None:
    """The client may send the body or not, so the server must not interpret the bytes after the head."""
    with Raw(port_of(guarded[0])) as raw:
        raw.send(SILENT[0].replace(b"Host", b"Expect: 100-continue\r\nHost"))
        answer = raw.answer()
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        assert until_closed(raw) < 5


def upload_head(key: str, length: int) -> bytes:
    head = f"POST /api/v1/models/m/versions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


def test_an_upload_must_make_progress(guarded: tuple[Service, str]) -> None:
    """It has half an hour, but neither in silence nor a byte at a time (1000 bytes per second are required here)."""
    running, key = guarded
    for say in (b"", b"x"):
        with Raw(port_of(running)) as raw:
            raw.send(upload_head(key, 4_000_000))
            raw.send(b"x" * 500)
            assert 0.8 < until_closed(raw, lambda raw=raw, say=say: raw.send(say)) < 8  # type: ignore[misc]


def test_an_upload_that_makes_progress_has_more_time_than_other_bodies(guarded: tuple[Service, str]) -> None:
    running, key = guarded
    with Raw(port_of(running)) as raw:
        raw.send(upload_head(key, 40_000))
        for _ in range(20):
            time.sleep(0.12)
            raw.send(b"x" * 2000)
        assert raw.answer().status == 422  # the whole body arrived, and it is no model


def test_a_large_body_is_refused_where_the_route_takes_no_file(guarded: tuple[Service, str]) -> None:
    running, key = guarded
    headers = {"authorization": f"Bearer {key}"}
    body = b"x" * (2 << 20)
    assert httpx.post(f"{running.url}/api/v1/jobs", content=body, headers=headers).status_code == 413


def test_time_in_which_the_server_does_not_read_is_not_charged() -> None:
    pace = UploadRate(began=0.0, limit=100.0, pause=10.0, rate=10.0, heard=0.0, seen=0.0)
    assert pace.look(5.0, reading=True) == 10.0
    pace.take(1000, 5.0)
    assert pace.deadline == 15.0  # the received bytes pay for 100 more seconds, but not for silence
    assert pace.look(12.0, reading=False) == 22.0
    pace.take(1, 90.0)
    assert pace.deadline == 100.0  # the whole limit
    assert UploadRate(0.0, 100.0, 10.0, 10.0, 9.0, 9.0, received=20).deadline == 12.0


def test_a_body_is_not_read_before_its_turn() -> None:
    """Behind a slow answer, the bytes of an upload would otherwise accumulate in the server's memory."""
    model = doubler()
    model.gate.clear()
    with serving({"doubler": model}, inline_budget_us=0) as running, running.connect() as raw:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        raw.send(infer_request("doubler", rows(1)))
        raw.send(b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n")
        raw.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            raw.send(b" " * 60_000_000)
        (connection,) = running.server.server_state.connections
        assert len(connection.cycle.body) < 2 << 20
        model.gate.set()


def test_http_1_0_may_keep_the_connection_open() -> None:
    with serving({"doubler": doubler()}) as running, running.connect() as raw:
        old = infer_request("doubler", rows(1), Connection="Keep-Alive").replace(b"HTTP/1.1", b"HTTP/1.0")
        for data in (old, old, b"GET /v2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", old):
            raw.send(data)
            answer = raw.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "keep-alive")
            assert "content-length" in answer.headers
        raw.send(b"GET /v2 HTTP/1.0\r\n\r\n")
        assert raw.answer().headers["connection"] == "close"
        assert raw.is_closed()


@pytest.mark.parametrize(("version", "coded"), [("1.0", b"onetwo"), ("1.1", b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")])
def test_http_1_0_gets_no_chunked_answers(version: str, coded: bytes) -> None:
    """Its clients do not know chunks: an answer without a length ends with the connection."""

    class Transport:
        written, closed = b"", False

        def write(self, data: bytes) -> None:
            self.written += data

        def is_closing(self) -> bool:
            return self.closed

        def close(self) -> None:
            self.closed = True

    async def answer() -> Transport:
        transport: Any = Transport()
        scope: Any = {"type": "http", "method": "GET", "http_version": version, "headers": []}
        cycle = AsgiCycle(
            scope,
            ResponseTransport(transport, transport.close),
            FlowControl(transport),
            [],
            expects_continue=False,
            keep_alive=True,
            on_response=lambda: None,
            on_upload=lambda _cycle: None,
        )
        await cycle.send({"type": "http.response.start", "status": 200, "headers": []})
        await cycle.send({"type": "http.response.body", "body": b"one", "more_body": True})
        await cycle.send({"type": "http.response.body", "body": b"two", "more_body": False})
        return cast(Transport, transport)

    transport = asyncio.run(answer())
    head, body = transport.written.split(b"\r\n\r\n", 1)
    assert body == coded
    assert transport.closed == (version == "1.0") == (b"connection: close" in head)


def test_a_refused_request_gets_no_100_continue(caplog: pytest.LogCaptureFixture) -> None:
    """The invalid body arrives together with the head.

    The application, already started, once asked for 100 Continue when nothing could be written any more: each such
    request left a traceback in the log."""
    head = b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    with caplog.at_level(logging.ERROR), serving({"doubler": doubler()}) as server:
        for body in (b"+2\r\n{}\r\n0\r\n\r\n", b"2;\n\r\n{}\r\n0\r\n\r\n"):
            with server.connect() as raw:
                raw.send(head + body)
                answer = raw.answer()
                assert (answer.status, answer.headers["connection"]) == (400, "close")
                assert raw.is_closed()
        assert server.ask("GET", "/v2").status == 200
    assert not caplog.records
