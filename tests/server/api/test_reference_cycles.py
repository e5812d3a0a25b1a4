"""A refused request leaves no reference cycle that keeps its body in memory until the next garbage collection."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from urllib.parse import urlsplit

import grpc
import pytest

from lathe.server.access.scopes import ROUTES
from tests.server.jobs.world import fake_jobs
from tests.server.repository.world import toy
from tests.server.route_parameters import PARAMETERS
from tests.server.running import Raw
from tests.server.server_thread import until
from tests.server.service import Service, service

LARGE = 200_000
PATHS = sorted((method, template.format(**PARAMETERS)) for method, template in ROUTES if method in ("POST", "PUT"))
BODIES = (b"", b"{}", b"[" + b"1," * (LARGE // 2), b'{"inputs": [' + b" " * LARGE + b"]}", b"\x08" * LARGE)
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("cycles") / "repo"
    with service(root, make_jobs=fake_jobs, grpc_port=0) as found, found.client() as client:
        client.upload("m", toy(2.0))
        yield found


def bodies_in_garbage(send: Callable[[], None]) -> list[str]:
    """Call `send`; the frames and other objects with large bytes that then only a garbage collection frees."""
    gc.collect()
    gc.freeze()  # what exists already is not looked at
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        send()
        time.sleep(0.3)  # tasks and threads of the server end after the answer
        gc.collect()
        found = list[str]()
        for thing in gc.garbage:
            frame = thing.tb_frame if isinstance(thing, TracebackType) else None
            values = [*frame.f_locals.values()] if frame else gc.get_referents(thing)
            if any(isinstance(value, bytes | bytearray) and len(value) >= LARGE for value in values):
                found.append(frame.f_code.co_qualname if frame else repr(type(thing)))
        return found
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()


def test_the_check_finds_a_body_in_a_cycle() -> None:
    def refuse() -> None:
        body = bytes(LARGE)
        try:
            raise ValueError
        except ValueError as error:
            kept = error
        assert body and kept

    assert "refuse" in " ".join(bodies_in_garbage(refuse))


@pytest.mark.parametrize("body", BODIES, ids=["empty", "object", "broken list", "no inputs", "no JSON"])
def test_http_requests_leave_no_body_in_a_cycle(running: Service, body: bytes) -> None:
    port = urlsplit(running.url).port
    assert port is not None
    statuses = list[int]()

    def send() -> None:
        for method, path in PATHS:
            if path.startswith("/api/v1/datasets/"):  # a child process checks it, which takes a second
                continue
            with Raw(port) as raw:
                head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                raw.send(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
                statuses.append(raw.answer().status)

    assert not bodies_in_garbage(send)
    assert sum(status >= 400 for status in statuses) > len(PATHS) // 2


def test_grpc_messages_leave_no_body_in_a_cycle(running: Service) -> None:
    body = b"\x2a\x00" * (2 << 20)  # more inputs than may be parsed
    codes = list[grpc.StatusCode]()

    def send() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
            for _ in range(3):  # gRPC refers to the last call until the next one
                done = channel.unary_unary(INFER).future(body, timeout=60)
                until(done.done)
                codes.append(done.code())

    assert not bodies_in_garbage(send)
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
