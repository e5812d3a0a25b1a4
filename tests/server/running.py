"""A real server on 127.0.0.1, in a thread, and a client that speaks raw bytes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lathe.server.api.connection.hub import Hub
from lathe.server.api.connection.protocol import LatheProtocol
from lathe.server.api.inference.memory_ledger import MemoryLedger
from lathe.server.app import Engine
from lathe.server.serve import LatheServer, make_server
from lathe.server.settings import Settings
from tests.server.fakes import FakeModel, FakeRegistry, application
from tests.server.server_thread import in_a_thread

CONNECTIONS = {"direct": LatheProtocol, "asgi": HttpToolsProtocol}


@dataclass
class Running:
    """A running server."""

    port: int
    server: LatheServer
    registry: FakeRegistry
    engine: Engine

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def ledger(self) -> MemoryLedger:
        """Counts the bytes of unfinished requests."""
        return self.engine.reading.ledger

    @property
    def hub(self) -> Hub:
        """The state that the direct path's connections share."""
        wait_for(lambda: self.server.server_state.connections)
        return next(connection.hub for connection in self.server.server_state.connections)

    def connect(self, source: str = "127.0.0.1") -> Raw:
        """Connect from an address of this machine; all addresses of 127.0.0.0/8 are."""
        return Raw(self.port, source)

    def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
        return self.ask_raw(request(method, path, body, headers))

    def ask_raw(self, data: bytes) -> Answer:
        with self.connect() as raw:
            raw.send(data)
            return raw.answer()

    def infer(self, model: str, document: dict[str, Any], blobs: bytes = b"", **headers: str) -> Answer:
        head = json.dumps(document).encode()
        if blobs:
            headers["Inference-Header-Content-Length"] = str(len(head))
        return self.ask("POST", f"/v2/models/{model}/infer", head + blobs, headers)


@contextmanager
def serving(models: dict[str, FakeModel], transport: str = "direct", **settings: Any) -> Iterator[Running]:
    """Serve the models as version 1 until the end of the block."""
    config = Settings(port=0, drain_timeout=2, **settings)
    app, registry, engine = application(config, models)
    server = make_server(app, config, CONNECTIONS[transport])
    with in_a_thread(server) as port:
        try:
            yield Running(port, server, registry, engine)
        finally:
            for model in models.values():
                model.gate.set()


def wait_for(condition: Any, seconds: float = 60) -> None:
    """Return when the condition holds; fail the test if it does not hold in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.002)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        size = self.headers.get("inference-header-content-length")
        return json.loads(self.body[: int(size)] if size else self.body)

    @property
    def error(self) -> str:
        assert set(self.json) == {"error"}
        return str(self.json["error"])


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Raw:
    """A connection that sends and reads raw bytes; a context manager that closes it."""

    port: int
    source: str = "127.0.0.1"
    socket: socket.socket = field(init=False)
    buffer: bytes = b""

    def __post_init__(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=60, source_address=(self.source, 0))

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def _read_more(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.buffer += data

    def answer(self) -> Answer:
        """Read one whole answer."""
        while b"\r\n\r\n" not in self.buffer:
            self._read_more()
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        status = int(lines[0].split()[1])
        if status == 100:
            return Answer(status, headers, b"")
        size = int(headers.get("content-length", 0))
        while len(self.buffer) < size:
            self._read_more()
        body, self.buffer = self.buffer[:size], self.buffer[size:]
        return Answer(status, headers, body)

    def trickle(self, data: bytes, pause: float) -> Answer:
        """Send `data` a byte each `pause` seconds until there is an answer. AssertionError if all bytes were sent."""
        self.socket.settimeout(pause)
        for byte in data:
            self.send(bytes([byte]))
            try:
                return self.answer()
            except TimeoutError:
                continue
        raise AssertionError("the server did not answer before the last byte")

    def is_closed(self) -> bool:
        """Whether the server closes the connection without sending further bytes."""
        try:
            return self.buffer == b"" and self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


def request(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a request."""
    fields = {"Host": "localhost", "Content-Length": str(len(body)), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def infer_request(model: str, array: np.ndarray, path: str = "", timeout: int = 0, **headers: str) -> bytes:
    """Return the bytes of a binary request for input x, answered in binary; `timeout` in microseconds, 0 for none."""
    kind = {"float32": "FP32", "int32": "INT32"}[str(array.dtype)]
    tensor = {"name": "x", "datatype": kind, "shape": list(array.shape)}
    tensor["parameters"] = {"binary_data_size": array.nbytes}
    parameters = {"binary_data_output": True, **({"timeout": timeout} if timeout else {})}
    head = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), **headers}
    return request("POST", path or f"/v2/models/{model}/infer", head + array.tobytes(), headers)


def json_request(model: str, array: np.ndarray, path: str = "", timeout: int = 0, **headers: str) -> bytes:
    """Return the bytes of the same request in JSON, answered in JSON."""
    kind = {"float32": "FP32", "int32": "INT32"}[str(array.dtype)]
    tensor = {"name": "x", "datatype": kind, "shape": list(array.shape), "data": array.ravel().tolist()}
    document = {"inputs": [tensor], **({"parameters": {"timeout": timeout}} if timeout else {})}
    return request("POST", path or f"/v2/models/{model}/infer", json.dumps(document).encode(), headers)


RequestMaker = Callable[..., bytes]  # makes a request, as these two functions do
each_form = pytest.mark.parametrize("asked", [infer_request, json_request], ids=["binary", "JSON"])


def rows(count: int, width: int = 4, start: float = 0) -> np.ndarray:
    """Return FP32 rows of distinct values."""
    return (np.arange(count * width, dtype=np.float32) + np.float32(start)).reshape(count, width)


def tensor_of(answer: Answer, index: int = 0) -> np.ndarray:
    """Return one FP32 output of an answer."""
    assert answer.status == 200, answer.body
    if "inference-header-content-length" not in answer.headers:
        output = answer.json["outputs"][index]
        return np.array(output["data"], np.float32).reshape(output["shape"])
    at = int(answer.headers["inference-header-content-length"])
    for output in answer.json["outputs"][:index]:
        at += output["parameters"]["binary_data_size"]
    output = answer.json["outputs"][index]
    size = output["parameters"]["binary_data_size"]
    return np.frombuffer(answer.body[at : at + size], np.float32).reshape(output["shape"])
