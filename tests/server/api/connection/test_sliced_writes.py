"""Large answers over TLS do not delay other clients, and arrive whole and in order."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from lathe.server.api.connection.sliced_transport import SLICE, SlicedTransport
from lathe.server.types import TensorSpec
from tests.server.access.test_tls import SERVER, trusting
from tests.server.fakes import FakeModel
from tests.server.running import Running, request, serving, wait_for

WIDTH = 1 << 24  # numbers of an answer of 64 MiB


def wide(width: int) -> FakeModel:
    """A model that repeats each row's first number in the whole output row."""
    ramp = np.arange(width, dtype=np.float32)
    kinds = [TensorSpec("x", "FP32", (-1, 1))], [TensorSpec("y", "FP32", (-1, width))]
    return FakeModel(lambda tensors: {"y": ramp + tensors["x"]}, *kinds)


def infer(start: int, **headers: str) -> bytes:
    item = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [start]}
    asked = {"inputs": [item], "parameters": {"binary_data_output": True}}
    return request("POST", "/v2/models/wide/infer", json.dumps(asked).encode(), headers)


@contextmanager
def tls_connection(running: Running) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection(("127.0.0.1", running.port), 30) as plain,
        trusting().wrap_socket(plain, server_hostname="127.0.0.1") as found,
    ):
        yield found


class Answers:
    """Reads from the connection, a bounded number of bytes at a time."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self.connection = connection
        self.buffer = bytearray()

    def body(self) -> bytes:
        """Return the tensor of the next answer, without the head."""
        while b"\r\n\r\n" not in self.buffer:
            self.more()
        head, _, _ = bytes(self.buffer).partition(b"\r\n\r\n")
        lines = (line.lower().partition(b": ") for line in head.split(b"\r\n"))
        found = {name: value for name, _, value in lines}
        begin = len(head) + 4
        end = begin + int(found[b"content-length"])
        while len(self.buffer) < end:
            self.more()
        body = bytes(self.buffer[begin + int(found.get(b"inference-header-content-length", 0)) : end])
        del self.buffer[:end]
        return body

    def pass_over(self) -> None:
        """Read the next answer without storing it: a copy of it would hold the interpreter's lock for long."""
        while b"\r\n\r\n" not in self.buffer:
            self.more()
        head, _, rest = bytes(self.buffer).partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
        left, part = size - len(rest), bytearray(1 << 18)
        while left:
            left -= self.connection.recv_into(part)
        self.buffer.clear()

    def more(self) -> None:
        part = self.connection.recv(1 << 18)
        assert part, "the connection ended"
        self.buffer += part


def test_other_clients_do_not_wait_while_a_large_answer_is_encrypted() -> None:
    """64 MiB took the event loop more than 50 ms, and 190 ms the first time."""
    with serving({"wide": wide(WIDTH)}, inline_budget_us=0, **SERVER) as running, tls_connection(running) as connection:
        gaps: list[float] = []
        over = threading.Event()

        async def tick() -> None:
            last = time.monotonic()
            while not over.is_set():
                await asyncio.sleep(0.001)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        wait_for(lambda: running.server.server_state.connections)
        loop = next(iter(running.server.server_state.connections)).loop
        ticking = asyncio.run_coroutine_threadsafe(tick(), loop)
        answers, longest = Answers(connection), []
        for start in range(5):  # the shortest of the longest delays is the server's, whatever else this machine does
            gaps.clear()
            connection.sendall(infer(start))
            answers.pass_over()
            longest.append(max(gaps))
        over.set()
        ticking.result(10)
        assert min(longest) < 0.025, longest


@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_answers_arrive_whole_and_in_order(pause: float) -> None:
    width = 3 << 18  # 3 MiB each
    with serving({"wide": wide(width)}, **SERVER) as running, tls_connection(running) as connection:
        starts, answers = range(6), Answers(connection)
        live = request("GET", "/v2/health/live")
        connection.sendall(b"".join(infer(start) + live for start in starts) + infer(99, connection="close"))
        time.sleep(pause)
        for start in (*starts, 99):
            found = np.frombuffer(answers.body(), np.float32)
            assert found.shape == (width,)
            assert (found == np.arange(width, dtype=np.float32) + start).all()
            if start != 99:
                assert json.loads(answers.body()) == {"live": True}
        assert connection.recv(1) == b""


def test_clients_that_stop_reading_are_dropped_and_disconnected_ones_forgotten() -> None:
    with serving({"wide": wide(WIDTH)}, write_timeout=1.0, **SERVER) as running:
        with tls_connection(running) as connection:
            connection.sendall(infer(0))
            wait_for(lambda: running.hub.connections)
            (served,) = running.hub.connections
            wait_for(lambda: served.outbox.slices._waiting)
            left: Future[int] = Future()  # read by the loop's thread, which moves slices between the two buffers
            served.loop.call_soon_threadsafe(lambda: left.set_result(served.transport.get_write_buffer_size()))
            assert 0 < left.result(10) <= WIDTH * 4 + (1 << 12)
            wait_for(lambda: not running.server.server_state.connections)
            assert not served.outbox.slices._waiting
        with tls_connection(running) as connection:
            connection.sendall(infer(0))
            wait_for(lambda: running.server.server_state.connections)
        wait_for(lambda: not running.server.server_state.connections)


@pytest.mark.parametrize("seed", range(10))
def test_all_bytes_are_written_whatever_the_transport_reports(seed: int) -> None:
    chance = random.Random(seed)

    class Transport:
        """Accepts all bytes, and reports a full buffer now and then."""

        def __init__(self) -> None:
            self.taken = bytearray()
            self.closed = False
            self.over = asyncio.Event()

        def write(self, data: Any) -> None:
            assert not self.closed
            assert len(data) <= SLICE
            self.taken += data
            if chance.random() < 0.3:
                slices.full()
                asyncio.get_running_loop().call_later(0.001, drain)

        def is_closing(self) -> bool:
            return self.closed

        def close(self) -> None:
            self.closed = True
            self.over.set()

        def get_write_buffer_size(self) -> int:
            return 0

    said: list[str] = []

    def drain() -> None:
        if slices.drained():
            said.append("resumed")

    async def scenario() -> None:
        nonlocal slices
        transport: Any = Transport()
        slices = SlicedTransport(transport, lambda: said.append("paused"), lambda: said.append("resumed"))
        written = bytearray()
        for _ in range(30):
            parts = [chance.randbytes(chance.choice([0, 10, SLICE, SLICE + 1, 5 * SLICE])) for _ in range(2)]
            written += b"".join(parts)
            slices.writelines(parts)
            assert slices.get_write_buffer_size() == len(written) - len(transport.taken)
            for _ in range(chance.randrange(5)):
                await asyncio.sleep(0)
        slices.close()
        assert slices.is_closing()
        await asyncio.wait_for(transport.over.wait(), 20)
        assert transport.taken == written
        assert slices.get_write_buffer_size() == 0

    slices: SlicedTransport
    asyncio.run(scenario())
