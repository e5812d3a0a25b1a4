"""The connection class, byte by byte: framing, order, limits, deadlines, and clients that disconnect."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.server.fakes import FakeModel, doubler
from tests.server.running import Running, infer_request, request, rows, serving, tensor_of, wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving({"doubler": doubler()}, max_body=100_000, max_header=8192, keep_alive=30) as running:
        yield running


@pytest.fixture
def gated() -> Iterator[tuple[Running, FakeModel]]:
    """A server whose model waits until its gate is opened, and never runs on the event loop."""
    model = doubler()
    with serving({"doubler": model}, inline_budget_us=0, max_pipeline=8) as running:
        yield running, model


def chunked(raw: bytes, size: int) -> bytes:
    """The same request with its body in chunks."""
    head, body = raw.split(b"\r\n\r\n", 1)
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]) + b"\r\n\r\n" + coded


def test_keep_alive_answers_one_request_after_another(server: Running) -> None:
    with server.connect() as raw:
        for start in range(5):
            raw.send(infer_request("doubler", rows(2, start=start)))
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(2, start=start) * 2)


def test_requests_may_arrive_in_any_slices(server: Running) -> None:
    """The parser reads the first request; later ones are recognised as a whole, wherever they are cut."""
    data = infer_request("doubler", rows(1))
    with server.connect() as raw:
        for cut in (len(data), 1, 40, data.index(b"\r\n\r\n") + 4, data.index(b"\r\n\r\n") + 20, len(data) - 1):
            raw.send(data[:cut])
            time.sleep(0.01)
            raw.send(data[cut:])
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)


def test_requests_may_arrive_one_byte_at_a_time(server: Running) -> None:
    with server.connect() as raw:
        raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in infer_request("doubler", rows(1)):
            raw.send(bytes([byte]))
        np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)


def test_pipelined_requests_of_all_kinds_are_answered_in_order(server: Running) -> None:
    parts, expected = [], []
    for index in range(20):
        parts += [infer_request("doubler", rows(1, start=index)), request("GET", "/v2")]
        parts += [chunked(infer_request("doubler", rows(1, start=-index)), 7), request("GET", "/nowhere")]
        expected += [index, None, -index, None]
    with server.connect() as raw:
        raw.send(b"".join(parts))
        for position, start in enumerate(expected):
            answer = raw.answer()
            if start is None:
                assert answer.status == (200 if position % 4 == 1 else 404)
            else:
                np.testing.assert_array_equal(tensor_of(answer), rows(1, start=start) * 2)


def test_pipelined_answers_keep_their_order_if_work_ends_out_of_order() -> None:
    slow, fast = doubler(), doubler()
    with serving({"slow": slow, "fast": fast}, inline_budget_us=0) as running, running.connect() as raw:
        slow.gate.clear()
        raw.send(infer_request("slow", rows(1)) + infer_request("fast", rows(1, start=5)) + request("GET", "/v2"))
        wait_for(lambda: fast.batches == [1])
        raw.socket.settimeout(0.1)
        with pytest.raises(TimeoutError):
            raw.answer()
        raw.socket.settimeout(10)
        slow.gate.set()
        assert raw.answer().json["model_name"] == "slow"
        np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1, start=5) * 2)
        assert raw.answer().json["name"] == "lathe"


def test_pipelined_requests_share_a_batch(gated: tuple[Running, FakeModel]) -> None:
    running, model = gated
    with running.connect() as raw:
        raw.send(infer_request("doubler", rows(1)) * 5)
        for _ in range(5):
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)
    assert sum(model.batches) == 5
    assert len(model.batches) < 5


def test_reading_pauses_when_too_many_answers_are_pending(gated: tuple[Running, FakeModel]) -> None:
    running, model = gated
    model.gate.clear()
    data = infer_request("doubler", rows(1))
    with running.connect() as raw:
        for _ in range(40):
            raw.send(data)
            time.sleep(0.001)
        servable = running.registry.resolve("doubler")
        time.sleep(0.05)
        assert servable.in_flight < 40
        model.gate.set()
        for _ in range(40):
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)


def test_the_server_stops_reading_from_a_client_that_reads_nothing() -> None:
    """Its answers stay bounded: the server stops reading instead of buffering without limit."""
    data = infer_request("doubler", rows(5000)) * 1000  # 80 MB; two small and two default socket buffers hold far less
    with serving({"doubler": doubler(max_batch=8192)}) as running:
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            raw.connect(("127.0.0.1", running.port))
            raw.settimeout(2)
            with pytest.raises(TimeoutError):
                raw.sendall(data)
            connection = next(iter(running.server.server_state.connections))
            assert connection.flow is not None
            assert connection.flow.read_paused
            assert connection.transport.get_write_buffer_size() < 16 << 20
        assert running.ask_raw(infer_request("doubler", rows(1))).status == 200


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_chunked_bodies(server: Running, size: int) -> None:
    with server.connect() as raw:
        for _ in range(2):
            raw.send(chunked(infer_request("doubler", rows(3)), size))
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(3) * 2)


def test_expect_100_continue(server: Running) -> None:
    head, body = infer_request("doubler", rows(1), Expect="100-continue").split(b"\r\n\r\n", 1)
    with server.connect() as raw:
        for _ in range(2):
            raw.send(head + b"\r\n\r\n")
            assert raw.answer().status == 100
            raw.send(body)
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)


def test_100_continue_never_overtakes_an_answer(gated: tuple[Running, FakeModel]) -> None:
    running, model = gated
    model.gate.clear()
    head, body = infer_request("doubler", rows(1), Expect="100-continue").split(b"\r\n\r\n", 1)
    with running.connect() as raw:
        raw.send(infer_request("doubler", rows(1, start=3)) + head + b"\r\n\r\n")
        wait_for(model.entered.is_set)
        model.gate.set()
        np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1, start=3) * 2)
        assert raw.answer().status == 100
        raw.send(body)
        np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)


def test_connection_close_and_http_1_0(server: Running) -> None:
    for data in (
        infer_request("doubler", rows(1), Connection="close"),
        infer_request("doubler", rows(1)).replace(b"HTTP/1.1", b"HTTP/1.0"),
    ):
        with server.connect() as raw:
            raw.send(data)
            answer = raw.answer()
            assert answer.headers["connection"] == "close"
            np.testing.assert_array_equal(tensor_of(answer), rows(1) * 2)
            assert raw.is_closed()


def test_an_upgrade_is_ignored(server: Running) -> None:
    with server.connect() as raw:
        for data in (infer_request("doubler", rows(1)), request("GET", "/v2"), request("POST", "/v2/logging", b"{}")):
            raw.send(data.replace(b"Host", b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHost"))
            assert raw.answer().status == 200
        raw.send(b"CONNECT other:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.answer().status == 400


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"nonsense\r\n\r\n", 400, "request line: not valid HTTP/1.1"),
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400, "expected one Host, got 0"),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "expected one Host, got 2"),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 9000 + b"\r\n\r\n", 431, "at most 8192 bytes"),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431, "at most 8192 bytes"),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 2000 + b"\r\n", 431, "at most 8192 bytes"),
        (
            b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "Transfer-Encoding can't be present with Content-Length",
        ),
        (
            b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n",
            413,
            "at most 100000 bytes, got 200000",
        ),
        (
            b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            400,
            "body: Invalid character in chunk size",
        ),
    ],
)
def test_bad_requests_are_refused_before_their_body_is_read(
    server: Running, data: bytes, status: int, message: str
) -> None:
    with server.connect() as raw:
        raw.send(request("GET", "/v2") + data)
        assert raw.answer().status == 200
        answer = raw.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert message in answer.error
        assert raw.is_closed()


def test_an_endless_header_is_refused_before_its_end(server: Running) -> None:
    with server.connect() as raw:
        raw.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: ")
        for _ in range(10):
            raw.send(b"x" * 1000)
            time.sleep(0.002)
        assert raw.answer().status == 431


def test_a_long_chunked_body_is_refused_and_the_answer_arrives(server: Running) -> None:
    head = request("POST", "/v2/models/doubler/infer").split(b"Content-Length")[0]
    with server.connect() as raw:
        raw.send(head + b"Transfer-Encoding: chunked\r\n\r\n" + (b"4000\r\n" + b"x" * 0x4000 + b"\r\n") * 20)
        answer = raw.answer()
        assert (answer.status, answer.error) == (413, "body: expected at most 100000 bytes, got more")


def test_a_million_one_byte_chunks_are_refused() -> None:
    with serving({"doubler": doubler()}) as running, running.connect() as raw:
        raw.send(b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        raw.send(b"1\r\nx\r\n" * 1_000_000)
        answer = raw.answer()
        assert answer.status == 400
        assert "chunks of 64 bytes or more" in answer.error


def test_a_malformed_body_for_the_application_is_refused(server: Running) -> None:
    with server.connect() as raw:
        raw.send(b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        time.sleep(0.02)
        raw.send(b"zz\r\n")
        assert raw.answer().status == 400
        assert raw.is_closed()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "headers"),
        (b"POST /v2/models/doubler/infer HTTP/1.1\r\nHos", "headers"),
        (b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", "body"),
        (b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", "body"),
    ],
)
def test_a_client_that_is_too_slow_is_disconnected(sent: bytes, message: str) -> None:
    with serving({"doubler": doubler()}, header_timeout=0.2, body_timeout=0.2) as running, running.connect() as raw:
        raw.send(sent)
        began = time.monotonic()
        if sent:
            answer = raw.answer()
            assert answer.status == 408
            assert f"the request's {message} did not arrive" in answer.error
        assert raw.is_closed()
        assert time.monotonic() - began > 0.1


def test_a_trickling_body_does_not_extend_the_deadline() -> None:
    """Half of a remembered request's body arrives byte by byte: the deadline counts from the head."""
    data = infer_request("doubler", rows(64))
    with serving({"doubler": doubler()}, body_timeout=0.3) as running, running.connect() as raw:
        raw.send(data)
        assert raw.answer().status == 200
        raw.send(data[:-300])
        assert raw.trickle(data[-300:], 0.01).status == 408


def test_idle_connections_are_closed() -> None:
    with serving({"doubler": doubler()}, keep_alive=0.2) as running, running.connect() as raw:
        raw.send(infer_request("doubler", rows(1)))
        assert raw.answer().status == 200
        assert raw.is_closed()


def test_too_many_connections_get_503() -> None:
    model = doubler()
    model.gate.clear()
    with (
        serving({"doubler": model}, max_connections=1, inline_budget_us=0) as running,
        running.connect() as first,
    ):
        first.send(request("GET", "/v2"))
        assert first.answer().status == 200
        first.send(infer_request("doubler", rows(1)))
        wait_for(model.entered.is_set)
        with running.connect() as second:
            second.send(request("GET", "/v2"))
            answer = second.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert second.is_closed()
        model.gate.set()
        assert first.answer().status == 200


def test_a_half_closed_client_is_answered(server: Running) -> None:
    for data in (infer_request("doubler", rows(1)), request("GET", "/v2")):
        with server.connect() as raw:
            raw.send(data)
            raw.socket.shutdown(socket.SHUT_WR)
            assert raw.answer().status == 200
            assert raw.is_closed()


@pytest.mark.parametrize("transport", ["direct", "asgi"])
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_requests_of_a_disconnected_client_are_not_executed(transport: str, reset: bool) -> None:
    model = doubler()
    model.gate.clear()
    with serving({"doubler": model}, transport, inline_budget_us=0) as running, running.connect() as stays:
        servable = running.registry.resolve("doubler")
        stays.send(infer_request("doubler", rows(1)))
        wait_for(model.entered.is_set)
        for _ in range(5):
            with running.connect() as leaves:
                leaves.send(infer_request("doubler", rows(1)))
                wait_for(lambda: servable.in_flight == 2)
                if reset:
                    leaves.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wait_for(lambda: servable.in_flight == 1)
        assert servable.stats.cancelled == 5
        model.gate.set()
        np.testing.assert_array_equal(tensor_of(stays.answer()), rows(1) * 2)
    assert model.batches == [1]


def test_a_remembered_head_is_compared_as_a_whole(server: Running) -> None:
    """Two heads differ in one byte: the second must not be taken for the first."""
    first = infer_request("doubler", rows(1))
    other = infer_request("nobody1", rows(1))
    with server.connect() as raw:
        for data, status in ((first, 200), (other, 404), (first, 200), (other, 404)):
            raw.send(data)
            assert raw.answer().status == status
