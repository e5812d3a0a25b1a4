from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from loadtest import openloop
from loadtest.arrivals import constant
from loadtest.connection import Target
from loadtest.openloop import Check, OpenLoop, capacity
from loadtest.stats import Log, summarise
from loadtest.wire import Response, http_request
from tests.loadtest.fake_server import Answer, Call, Handler, serving


def drive(handler: Handler, due: np.ndarray, connections: int, check: Check | None = None, patience: float = 5) -> Log:
    async def run() -> Log:
        async with serving(handler) as url:
            target = Target(url)
            requests = [http_request("POST", f"/{i}", target.authority) for i in range(3)]
            return await OpenLoop(target, requests, due, connections, check).run(patience)

    return asyncio.run(run())


async def at_once(_call: Call) -> Answer:
    return 200, b"ok"


def test_requests_are_sent_on_time_and_logged() -> None:
    log = drive(at_once, constant(500, 0.4), connections=4)
    assert log.status.tolist() == [200] * 200
    assert (log.sent >= log.due).all()
    assert (log.done >= log.sent).all()
    # the generator follows the schedule itself, so that delays do not add up
    assert (log.sent - log.due)[100:].min() < 0.005


def test_connections_take_turns() -> None:
    lines: list[str] = []

    async def remember(call: Call) -> Answer:
        lines.append(call.path)
        return 200, b""

    drive(remember, constant(100, 0.06), connections=1)
    assert lines == ["/0", "/1", "/2", "/0", "/1", "/2"]


def test_a_stalled_server_does_not_slow_the_arrivals_and_the_wait_is_measured() -> None:
    """The purpose of an open loop: a pause of 0.3 s delays every request due in it, not only one."""
    pause = [0.3]

    async def stall_once(_call: Call) -> Answer:
        await asyncio.sleep(pause.pop() if pause else 0)
        return 200, b""

    log = drive(stall_once, constant(100, 0.4), connections=1)
    late = log.latency_ms > 50
    assert len(log.due) == 40
    assert late.sum() >= 20
    assert log.latency_ms.max() == pytest.approx(300, abs=60)
    phase = summarise("stalled", log, 0.4)
    assert phase.unconnected_p99_ms > 200, "they waited for the connection, which is not the generator's lateness"
    assert phase.lateness_p99_ms < 100


def test_a_broken_connection_fails_one_request_and_is_replaced() -> None:
    count = [0]

    async def break_every_third(_call: Call) -> Answer:
        count[0] += 1
        return (0 if count[0] == 3 else 200), b""

    log = drive(break_every_third, constant(100, 0.1), connections=1)
    assert log.status.tolist().count(0) == 1
    assert log.status.tolist().count(200) == 9


def test_a_missing_answer_is_a_failure() -> None:
    async def never(_call: Call) -> Answer:
        await asyncio.sleep(60)
        return 200, b""

    log = drive(never, constant(100, 0.02), connections=2, patience=0.2)
    assert log.status.tolist() == [0, 0]
    assert np.isnan(log.done).all()


def test_the_check_sees_each_answer_and_can_fail_it() -> None:
    def check(number: int, sent: float, received: float, response: Response) -> str | None:
        assert sent <= received <= time.monotonic()
        return "odd" if number % 2 else None

    log = drive(at_once, constant(100, 0.1), connections=2, check=check)
    assert log.complaints == {"odd": 5}
    assert log.accepted.tolist() == [True, False] * 5


def test_stop_ends_the_schedule_and_keeps_the_log() -> None:
    async def run() -> Log:
        async with serving(at_once) as url:
            target = Target(url)
            loop = OpenLoop(target, [http_request("POST", "/", target.authority)], constant(200, 60), 2)
            running = asyncio.create_task(loop.run())
            await asyncio.sleep(0.2)
            loop.stop()
            return await asyncio.wait_for(running, 2)

    log = asyncio.run(run())
    assert 10 < len(log.due) < 100
    assert log.accepted.all()


def measured_capacity(delay: float, connections: int, seconds: float) -> float:
    """The capacity of a server that takes `delay` seconds for a request."""

    async def answer(_call: Call) -> Answer:
        await asyncio.sleep(delay)
        return 200, b""

    async def run() -> float:
        async with serving(answer) as url:
            target = Target(url)
            return await capacity(target, [http_request("POST", "/", target.authority)], connections, seconds)

    return asyncio.run(run())


def test_capacity_is_the_rate_that_the_connections_get_answered() -> None:
    assert measured_capacity(0.05, 4, 1.0) == pytest.approx(80, rel=0.3)


def test_a_capacity_waits_for_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < measured_capacity(0.3, 1, 0.01) < 4
    monkeypatch.setattr(openloop, "FIRST_ANSWER", 0.05)
    with pytest.raises(RuntimeError, match=r"no request was answered within 0\.06 s"):
        measured_capacity(0.3, 1, 0.01)


def test_answers_are_separated_however_their_bytes_arrive() -> None:
    """Known and unknown heads, whole answers and parts, chunked bodies."""
    written = [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no", b"k"],
        [b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n"],
        [b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhm\r\n0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhm\r\n0\r\n\r\n"],
    ]

    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for parts in written:
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()
        ended.set()

    async def ask() -> list[tuple[int, bytes]]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        connection = await Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").connect()
        found = [await connection.ask(http_request("POST", "/", "a")) for _ in written]
        await ended.wait()
        connection.close()
        server.close()
        await asyncio.sleep(0.01)
        return [(response.status, response.body) for response in found]

    bodies = [b"ok", b"no", b"ok", b"", b"", b"hm", b"", b"hm"]
    assert asyncio.run(ask()) == [(503 if 3 <= index <= 4 else 200, body) for index, body in enumerate(bodies)]
