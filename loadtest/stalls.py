"""Scenario: how long one bad request, or one whose answer is large, keeps everybody else waiting.

A client that stands by asks for `live` every 20 ms and notes its longest wait, while one connection sends one request
that costs much to be read or answered. In the same seconds a process that does nothing else wakes as often: how late it
wakes is the machine's, and is taken off.

python -m loadtest.stalls     that process: it ends with its standard input, and writes down what it saw
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
from loadtest.build import Entry, build
from loadtest.connection import Target
from loadtest.scenario import Options, Report
from loadtest.text_bodies import MIB
from loadtest.wire import http_request, infer_path

EVERY, LIMIT_MS, ROUNDS = 0.02, 50.0, 3
REST, PATIENCE = 0.5, 120.0  # seconds before and after each request, and in which it is answered
MODEL, ROWS, WIDTH = "loadtest-stalls", 16, 1 << 16

Wait = tuple[float, float]  # when it began, on the monotonic clock, and how long it was; both in seconds


@dataclass(frozen=True, slots=True)
class Bad:
    """A request that costs its sender little. ``accepts``: the coding that its answer is to have."""

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
    """The same over gRPC; ``address`` is the port's."""

    name: str
    data: bytes
    address: str

    def send(self, target: Target) -> str:
        """Send it and return the status of the answer."""
        return f"gRPC {text_bodies.call(self.address, self.data, PATIENCE)}"


def bad_requests(model: str) -> Iterator[Bad]:
    infer, index = f"/v2/models/{quote(model)}/infer", "/v2/repository/index"
    yield Bad("1 MiB of empty deflate streams", infer, zlib.compress(b"") * (MIB // 8), "deflate")
    yield Bad("1 MiB of empty gzip members", infer, gzip.compress(b"") * (MIB // 20), "gzip")
    yield Bad("gzip of 255 MiB of zeros", infer, _packed(bytes(MIB), 255), "gzip")
    yield Bad("gzip of 14 MiB of numbers, one of them NaN", infer, _packed(b"1.25," * (MIB // 5), 14, b"NaN"), "gzip")
    yield Bad("gzip of 15 MiB of empty lists, and NaN", infer, _packed(b"[]," * (MIB // 3), 15, b"NaN"), "gzip")
    yield Bad("15 MiB of empty lists", infer, b"[]," * (15 * MIB // 3))
    yield Bad("15 MiB of empty lists as data", infer, b'{"inputs": [{"data": [' + b"[]," * (15 * MIB // 3))
    yield Bad("15 MiB of texts", infer, b'{"inputs": [{"data": [' + b'"a",' * (15 * MIB // 4))
    yield Bad("index of 30 MiB of empty lists", index, b'{"a": [' + b"[]," * (10 * MIB) + b"1]}")
    yield Bad("index of 1 MiB of empty lists", index, b'{"a": [' + b"[]," * ((MIB - 16) // 3) + b"1]}")


def large_answers(model: str) -> Iterator[Bad]:
    """Requests of a kilobyte to :func:`wide`, each of whose answers has a million elements."""
    path = infer_path(model)
    item = {"name": "x", "datatype": "FP32", "shape": [ROWS, 4], "data": [[0.1, 0.2, 0.3, 0.4]] * ROWS}

    def body(**wanted: object) -> bytes:
        return json.dumps({"inputs": [item], "outputs": [{"name": "y", "parameters": wanted}]}).encode()

    yield Bad("answer of 1 Mi numbers as JSON", path, body(binary_data=False))
    yield Bad("answer of 4 MiB as gzip", path, body(binary_data=True), accepts="gzip")
    yield Bad("answer of 1 Mi numbers as JSON, as gzip", path, body(binary_data=False), accepts="gzip")
    yield Bad("answer of 1 Mi classes as BYTES", path, body(binary_data=True, classification=WIDTH))
    yield Bad("answer of 1 Mi classes as JSON", path, body(binary_data=False, classification=WIDTH))


def text_requests() -> Iterator[Bad]:
    for name, body, headers in text_bodies.http_bodies():
        yield Bad(name, infer_path(text_bodies.TEXTS), body, headers=headers)


def wide() -> bytes:
    """A model of rows of four numbers, each of which it answers with 65,536."""
    made: bytes = build(MODEL, Entry((4,), lambda b, x: b.dense(x, 4, WIDTH), (WIDTH,))).SerializeToString()
    return made


def _packed(part: bytes, times: int, last: bytes = b"") -> bytes:
    """A list of so many parts as gzip, which is never there unpacked."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    parts = [packer.compress(b"[" if last else b""), *(packer.compress(part) for _ in range(times))]
    return b"".join([*parts, packer.compress(last + b"]" if last else b""), packer.flush()])


async def stalls(options: Options, report: Report) -> None:
    """One request after the other, beside a client that asks for `live` every 20 ms."""
    target = Target(options.url)
    await Admin(target, MODEL).upload(wide())
    texts = Admin(target, text_bodies.TEXTS)
    await texts.upload(text_bodies.first_text())
    requests: list[Bad | Message] = [*bad_requests(options.model), *large_answers(MODEL), *text_requests()]
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
            f"{name}: others wait at most {LIMIT_MS:g} ms",
            stall < LIMIT_MS / 1e3,
            f"{stall * 1e3:.1f} ms (and {late * 1e3:.1f} ms of the machine's), {status}",
        )


def _measure(target: Target, requests: Sequence[Bad | Message]) -> dict[str, tuple[float, float, str]]:
    """For each request its longest stall and the machine's, in seconds, and the status of its answer."""
    spans: list[tuple[str, float, float, str]] = []
    command = [sys.executable, "-m", "loadtest.stalls"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as idle:
        with _standing_by(target) as waits:
            for request in [*requests] * ROUNDS:
                time.sleep(REST)
                began = time.monotonic()
                status = request.send(target)
                time.sleep(REST)
                spans.append((request.name, began, time.monotonic(), status))
        lates: list[Wait] = [(at, late) for at, late in json.loads(idle.communicate()[0])]
    found: dict[str, tuple[float, float, str]] = {}
    for name, began, ended, status in spans:
        late = longest(lates, began, ended)
        stall = max(0.0, longest(waits, began, ended) - late)
        if name not in found or stall > found[name][0]:
            found[name] = stall, late, status
    return found


def longest(waits: Sequence[Wait], began: float, ended: float) -> float:
    """The longest wait that touches a span of time."""
    return max((wait for at, wait in waits if at < ended and at + wait > began), default=0.0)


@contextmanager
def _standing_by(target: Target) -> Iterator[list[Wait]]:
    """Somebody who asks every 20 ms; gives the waits, which are complete at the end."""
    waits, over = list[Wait](), threading.Event()

    def stand_by() -> None:
        with contextlib.closing(HTTPConnection(target.host, target.port, timeout=PATIENCE)) as connection:

            def once() -> None:
                connection.request("GET", "/v2/health/live", headers={"Content-Length": "0"})
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"the server does not say that it is live: HTTP {answer.status}")

            _note(once, over, waits)

    failed: list[BaseException] = []

    def run() -> None:
        try:
            stand_by()
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


def _note(once: Callable[[], None], over: threading.Event, waits: list[Wait]) -> None:
    """Do something every 20 ms, and note how long after it was due it was done."""
    due = time.monotonic()
    while not over.is_set():
        due = max(due + EVERY, time.monotonic())
        over.wait(max(0.0, due - time.monotonic()))
        once()
        waits.append((due, time.monotonic() - due))


def _send(target: Target, request: Bad) -> int:
    """Send it and return the status of the answer, 0 where the connection ends without one."""
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
    """Read a whole answer, or what comes of it."""
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
    """Wake every 20 ms until the standard input ends; then write how late each time."""
    lates, over = list[Wait](), threading.Event()
    thread = threading.Thread(target=_note, args=(lambda: None, over, lates))
    thread.start()
    sys.stdin.read()
    over.set()
    thread.join()
    print(json.dumps(lates))


if __name__ == "__main__":
    _idle()
