"""Scenario: how long one costly request, or one with a large response, delays all other clients.

A probing client requests `/v2/health/live` every 20 ms and records its longest wait, while one connection sends a
request that is costly to read or to answer. At the same time an idle process wakes equally often. The delay of its
wake-ups is the machine's share, and is subtracted.

python -m loadtest.stalls     is that idle process: it ends with its standard input, and then prints its delays
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from urllib.parse import quote

from loadtest import text_bodies
from loadtest.admin import Admin
from loadtest.connection import Target
from loadtest.model_builder import Entry, build
from loadtest.scenario import Options, Report
from loadtest.text_bodies import MIB
from loadtest.wire import http_request, infer_path

EVERY, LIMIT_MS, ROUNDS = 0.02, 50.0, 3
REST, PATIENCE = 0.5, 120.0  # seconds before and after each request; longest time to its response
MODEL, ROWS, WIDTH = "loadtest-stalls", 16, 1 << 16

Wait = tuple[float, float]  # start on the monotonic clock, and length; both in seconds


@dataclass(frozen=True, slots=True)
class CostlyRequest:
    """A request that is cheap to send and costly to serve.

    `coding` is its Content-Encoding, `accepts` its Accept-Encoding.
    """

    name: str
    path: str
    body: bytes
    coding: str = ""
    accepts: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def send(self, target: Target) -> str:
        """Send it and return the status of the answer."""
        status = _send(target, self)
        return f"HTTP {status}" if status else "connection closed"


@dataclass(frozen=True, slots=True)
class Message:
    """A costly gRPC message. `address` is the server's, as host:port."""

    name: str
    data: bytes
    address: str

    def send(self, target: Target) -> str:
        """Send it and return the status of the answer."""
        return f"gRPC {text_bodies.call(self.address, self.data, PATIENCE)}"


def costly_requests(model: str) -> Iterator[CostlyRequest]:
    infer, index = f"/v2/models/{quote(model)}/infer", "/v2/repository/index"
    yield CostlyRequest("1 MiB of empty deflate streams", infer, zlib.compress(b"") * (MIB // 8), "deflate")
    yield CostlyRequest("1 MiB of empty gzip members", infer, gzip.compress(b"") * (MIB // 20), "gzip")
    yield CostlyRequest("gzip of 255 MiB of zeros", infer, _packed(bytes(MIB), 255), "gzip")
    yield CostlyRequest(
        "gzip of 14 MiB of numbers, one of them NaN", infer, _packed(b"1.25," * (MIB // 5), 14, b"NaN"), "gzip"
    )
    yield CostlyRequest(
        "gzip of 15 MiB of empty lists, and NaN", infer, _packed(b"[]," * (MIB // 3), 15, b"NaN"), "gzip"
    )
    yield CostlyRequest("15 MiB of empty lists", infer, b"[]," * (15 * MIB // 3))
    yield CostlyRequest("15 MiB of empty lists as data", infer, b'{"inputs": [{"data": [' + b"[]," * (15 * MIB // 3))
    yield CostlyRequest("15 MiB of texts", infer, b'{"inputs": [{"data": [' + b'"a",' * (15 * MIB // 4))
    yield CostlyRequest("index of 30 MiB of empty lists", index, b'{"a": [' + b"[]," * (10 * MIB) + b"1]}")
    yield CostlyRequest("index of 1 MiB of empty lists", index, b'{"a": [' + b"[]," * ((MIB - 16) // 3) + b"1]}")


def large_answers(model: str) -> Iterator[CostlyRequest]:
    """Requests of about a kilobyte to `model`, which is that of `wide`; each response has a million elements."""
    path = infer_path(model)
    item = {"name": "x", "datatype": "FP32", "shape": [ROWS, 4], "data": [[0.1, 0.2, 0.3, 0.4]] * ROWS}

    def body(**wanted: object) -> bytes:
        return json.dumps({"inputs": [item], "outputs": [{"name": "y", "parameters": wanted}]}).encode()

    yield CostlyRequest("answer of 1 Mi numbers as JSON", path, body(binary_data=False))
    yield CostlyRequest("answer of 4 MiB as gzip", path, body(binary_data=True), accepts="gzip")
    yield CostlyRequest("answer of 1 Mi numbers as JSON, as gzip", path, body(binary_data=False), accepts="gzip")
    yield CostlyRequest("answer of 1 Mi classes as BYTES", path, body(binary_data=True, classification=WIDTH))
    yield CostlyRequest("answer of 1 Mi classes as JSON", path, body(binary_data=False, classification=WIDTH))


def text_requests() -> Iterator[CostlyRequest]:
    for name, body, headers in text_bodies.http_bodies():
        yield CostlyRequest(name, infer_path(text_bodies.TEXTS), body, headers=headers)


def wide() -> bytes:
    """A model that maps rows of 4 numbers to rows of 65,536."""
    made: bytes = build(MODEL, Entry((4,), lambda b, x: b.dense(x, 4, WIDTH), (WIDTH,))).SerializeToString()
    return made


def _packed(part: bytes, times: int, last: bytes = b"") -> bytes:
    """A gzip stream of `part` repeated `times`, made without holding the unpacked bytes in memory."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    parts = [packer.compress(b"[" if last else b""), *(packer.compress(part) for _ in range(times))]
    return b"".join([*parts, packer.compress(last + b"]" if last else b""), packer.flush()])


async def stalls(options: Options, report: Report) -> None:
    """Costly requests one by one, while another client requests `live` every 20 ms and must not wait long."""
    target = Target(options.url)
    await Admin(target, MODEL).upload(wide())
    texts = Admin(target, text_bodies.TEXTS)
    await texts.upload(text_bodies.first_text())
    requests: list[CostlyRequest | Message] = [*costly_requests(options.model), *large_answers(MODEL), *text_requests()]
    if options.grpc:
        requests += [Message(name, data, options.grpc) for name, data in text_bodies.messages(MODEL)]
    region = f"/v2/systemsharedmemory/region/{text_bodies.IN_MEMORY}"
    with text_bodies.shared_texts() as place:
        await texts.call("POST", f"{region}/register", json.dumps(place).encode())
        try:
            found = await asyncio.to_thread(_measure, target, requests)
        finally:
            await texts.call("POST", f"{region}/unregister")
    for name, (stall, late, status) in found.items():
        report.promise(
            f"{name}: others wait less than {LIMIT_MS:g} ms",
            stall < LIMIT_MS / 1e3,
            f"{stall * 1e3:.1f} ms (and {late * 1e3:.1f} ms of the machine's), {status}",
        )


def _measure(target: Target, requests: Sequence[CostlyRequest | Message]) -> dict[str, tuple[float, float, str]]:
    """By name of request: its longest stall of all rounds, the machine's own delay then, and the response's status.

    Both times are in seconds; the machine's delay is subtracted from the stall.
    """
    spans: list[tuple[str, float, float, str]] = []
    command = [sys.executable, "-m", "loadtest.stalls"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as idle:
        with _probing_client(target) as waits:
            for request in [*requests] * ROUNDS:
                time.sleep(REST)
                began = time.monotonic()
                status = request.send(target)
                time.sleep(REST)
                spans.append((request.name, began, time.monotonic(), status))
        lates: list[Wait] = [(at, late) for at, late in json.loads(idle.communicate()[0])]
    found: dict[str, tuple[float, float, str]] = {}
    for name, began, ended, status in spans:
        late = longest_wait(lates, began, ended)
        stall = max(0.0, longest_wait(waits, began, ended) - late)
        if name not in found or stall > found[name][0]:
            found[name] = stall, late, status
    return found


def longest_wait(waits: Sequence[Wait], began: float, ended: float) -> float:
    """The longest wait that overlaps a span of time, in seconds; 0 if none does."""
    return max((wait for at, wait in waits if at < ended and at + wait > began), default=0.0)


@contextmanager
def _probing_client(target: Target) -> Iterator[list[Wait]]:
    """A probing client in a thread, every 20 ms. Yields its list of waits, which is complete after the block.

    An error of the client ends it, and is raised after the block.
    """
    waits, over = list[Wait](), threading.Event()

    def probe() -> None:
        with contextlib.closing(HTTPConnection(target.host, target.port, timeout=PATIENCE)) as connection:

            def once() -> None:
                connection.request("GET", "/v2/health/live", headers={"Content-Length": "0"})
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"/v2/health/live: expected HTTP 200, got {answer.status}")

            _record_delays(once, over, waits)

    failed: list[BaseException] = []

    def run() -> None:
        try:
            probe()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield waits
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]


def _record_delays(once: Callable[[], None], over: threading.Event, waits: list[Wait]) -> None:
    """Call `once` every 20 ms, and record how long after its due time each call ended."""
    due = time.monotonic()
    while not over.is_set():
        due = max(due + EVERY, time.monotonic())
        over.wait(max(0.0, due - time.monotonic()))
        once()
        waits.append((due, time.monotonic() - due))


def _send(target: Target, request: CostlyRequest) -> int:
    """Send a request and return the response's status, 0 if the connection ends without a response."""
    headers = dict(request.headers)
    if request.coding:
        headers["Content-Encoding"] = request.coding
    if request.accepts:
        headers["Accept-Encoding"] = request.accepts
    data = http_request("POST", request.path, target.authority, request.body, headers)
    with socket.create_connection((target.host, target.port), PATIENCE) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            connection.sendall(data)
        try:
            answer = _read(connection)
        except ConnectionResetError:
            return 0
    return int(answer.split(b" ", 2)[1]) if answer else 0


def _read(connection: socket.socket) -> bytearray:
    """Read a whole response, or as much of it as arrives before the connection ends."""
    answer, size = bytearray(), 1
    while len(answer) < size and (part := connection.recv(1 << 18)):
        answer += part
        head, end, _ = bytes(answer[: 1 << 12]).partition(b"\r\n\r\n")
        if end:
            found = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
            size = len(head + end) + (int(found[1]) if found else 0)
        else:
            size = len(answer) + 1
    return answer


def _idle() -> None:
    """Wake every 20 ms until the standard input ends, then print the delay of each wake-up as JSON."""
    lates, over = list[Wait](), threading.Event()
    thread = threading.Thread(target=_record_delays, args=(lambda: None, over, lates))
    thread.start()
    sys.stdin.read()
    over.set()
    thread.join()
    print(json.dumps(lates))


if __name__ == "__main__":
    _idle()
