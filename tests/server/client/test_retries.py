"""Retries: after a refusal with Retry-After, and after a connection that the server closed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lathe.server.client import ApiError, ClientError, Unreachable
from lathe.server.client.retry_policy import RetryPolicy
from tests.server.client.both_clients import BOTH
from tests.server.repository.world import toy
from tests.server.running import free_port

READY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n[]"
JOB = (
    b'{"id":"j","kind":"train","state":"failed","owner":"","dataset":{"name":"d","digest":""},"model":null,'
    b'"publish":null,"priority":0,"submitted":"","started":null,"finished":null,"ran":0,"attempts":0,'
    b'"cancelling":false,"error":"","result":null}'
)


def refusal(seconds: int | None, status: str = "503 Service Unavailable") -> bytes:
    body = b'{"error": "the queue is full", "code": "overloaded"}'
    after = b"retry-after: %d\r\n" % seconds if seconds is not None else b""
    return b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (status.encode(), after, len(body), body)


@contextmanager
def scripted(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server with one answer per connection (b"": it closes the connection); yields its URL and its requests."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        heard: list[bytes] = []

        def serve() -> None:
            for number, answer in enumerate(answers, 1):
                connection, _ = listening.accept()
                if number == len(answers):
                    listening.close()
                with connection:
                    heard.append(request_of(connection))
                    connection.sendall(answer.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", heard
        thread.join(10)
        assert not thread.is_alive(), f"{len(heard)} of {len(answers)} requests came"


def request_of(connection: socket.socket) -> bytes:
    """Read one request with a Content-Length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the clients would have slept."""
    slept: list[float] = []

    async def asleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("lathe.server.client.blocking.time.sleep", slept.append)
    monkeypatch.setattr("lathe.server.client.asynchronous.asyncio.sleep", asleep)
    return slept


@pytest.mark.parametrize("kind", BOTH)
def test_a_refusal_with_retry_after_is_retried_after_that_time(kind: str, pauses: list[float]) -> None:
    with scripted(refusal(2), refusal(1, "429 Too Many Requests"), READY) as (url, heard), BOTH[kind](url) as client:
        assert client.models() == []
    assert (len(heard), pauses) == (3, [2.0, 1.0])


@pytest.mark.parametrize("kind", BOTH)
def test_a_refusal_is_raised_when_the_patience_is_over(kind: str, pauses: list[float]) -> None:
    with scripted(refusal(6), refusal(6)) as (url, _), BOTH[kind](url, patience=10) as client:
        with pytest.raises(ApiError, match="the queue is full") as refused:
            client.models()
        assert (refused.value.status, refused.value.code, refused.value.retry_after) == (503, "overloaded", 6.0)
    assert pauses == [6.0]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("answer", [refusal(None), refusal(1, "500 Internal Server Error")])
def test_other_refusals_are_raised_at_once(kind: str, answer: bytes, pauses: list[float]) -> None:
    with scripted(answer) as (url, _), BOTH[kind](url) as client, pytest.raises(ApiError):
        client.models()
    assert pauses == []


@pytest.mark.parametrize("kind", BOTH)
def test_a_closed_connection_is_retried_with_the_same_key_and_body(
    kind: str, pauses: list[float], tmp_path: Path
) -> None:
    (tmp_path / "m.onnx").write_bytes(toy(1.0))
    with scripted(b"", b"", refusal(None)) as (url, heard), BOTH[kind](url) as client, pytest.raises(ApiError):
        client.upload("m", tmp_path / "m.onnx")
    assert len({request.lower() for request in heard}) == 1  # the idempotency key is the call's, not the attempt's
    assert b"idempotency-key: " in heard[0].lower()
    assert heard[0].endswith(toy(1.0))
    assert len(pauses) == 2
    assert pauses[0] < pauses[1]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "ask", [lambda client: client.delete_dataset("d"), lambda client: client.delete_job("j")], ids=["dataset", "job"]
)
def test_a_request_that_may_have_had_an_effect_is_not_repeated(
    kind: str, ask: Callable[[Any], Any], pauses: list[float]
) -> None:
    with scripted(b"") as (url, _), BOTH[kind](url) as client, pytest.raises(ClientError, match="DELETE /api/v1"):
        ask(client)
    assert pauses == []


@pytest.mark.parametrize("kind", BOTH)
def test_a_server_that_never_answered_is_not_waited_for(kind: str, pauses: list[float]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with BOTH[kind](url) as client, pytest.raises(Unreachable, match=f"no server answers at {url}: "):
        client.models()
    assert pauses == []


@pytest.mark.parametrize("kind", BOTH)
def test_a_server_that_restarts_is_waited_for(kind: str) -> None:
    with scripted(READY) as (url, _), BOTH[kind](url) as client:
        assert client.models() == []
        with restarting(int(url.rpartition(":")[2])):
            assert client.delete_job("j").state == "failed"  # the request was not sent before, so it may be sent


@contextmanager
def restarting(port: int) -> Iterator[None]:
    """A server that starts after half a second, and answers one request."""

    def serve() -> None:
        time.sleep(0.5)
        with socket.create_server(("127.0.0.1", port)) as listening:
            connection, _ = listening.accept()
            with connection:
                request_of(connection)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(JOB) + JOB)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    thread.join(10)
    assert not thread.is_alive()


def test_which_outcomes_are_retried_and_when() -> None:
    def before(outcome: Any, seconds: float = 10, *, is_repeatable: bool = True, has_answered: bool = True) -> Any:
        return RetryPolicy(seconds, is_repeatable=is_repeatable, has_answered=has_answered).pause_before_next(outcome)

    later = httpx.Response(503, headers={"retry-after": "3"})
    assert before(later) == 3.0
    assert before(later, 2) is None
    assert before(later, is_repeatable=False) is None
    assert before(httpx.Response(503, headers={"retry-after": "soon"})) is None
    assert before(httpx.Response(200, headers={"retry-after": "3"})) is None
    assert before(httpx.Response(503, headers={"retry-after": "0"})) > 0
    closed, refused = httpx.ReadError(""), httpx.ConnectError("")
    assert before(closed) > 0
    assert before(closed, is_repeatable=False) is None
    assert before(refused, is_repeatable=False) > 0
    assert before(refused, has_answered=False) is None
    unknown = RetryPolicy(10.0, is_repeatable=True, has_answered=False)
    assert [unknown.pause_before_next(closed) is not None for _ in range(4)] == [True, True, False, False]
    assert before(httpx.ReadTimeout("")) is None
    patience = RetryPolicy(10.0, is_repeatable=True, has_answered=True)
    waits = [pause for pause in iter(lambda: patience.pause_before_next(closed), None) if pause]
    assert sum(waits) <= 10.0
    assert len(waits) < 15
