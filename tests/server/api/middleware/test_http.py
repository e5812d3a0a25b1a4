"""General HTTP behaviour: methods, hosts, and paths that are almost right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.server.fakes import doubler
from tests.server.running import Raw, Running, infer_request, request, rows, serving, tensor_of


@pytest.fixture(scope="module", params=["direct", "asgi"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving({"doubler": doubler()}, request.param, served_hosts="*") as running:
        yield running


def head_of_answer(raw: Raw) -> bytes:
    """Read an answer without a body; any further bytes would stay in the buffer."""
    while b"\r\n\r\n" not in raw.buffer:
        raw.buffer += raw.socket.recv(65536)
    head, raw.buffer = raw.buffer.split(b"\r\n\r\n", 1)
    return head


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v2", 200), ("/v2/health/live", 200), ("/v2/models/doubler", 200), ("/v2/models/nobody", 404), ("/v3", 404)],
)
def test_head_is_get_without_the_body(server: Running, path: str, status: int) -> None:
    expected = server.ask("GET", path)
    with server.connect() as raw:
        raw.send(request("HEAD", path))
        head = head_of_answer(raw)
        assert int(head.split()[1]) == expected.status == status
        assert f"content-length: {len(expected.body)}".encode() in head
        raw.send(infer_request("doubler", rows(1)))  # the connection is still in step
        np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v2", "GET, HEAD, OPTIONS"),
        ("DELETE", "/v2/models/doubler", "GET, HEAD, OPTIONS"),
        ("PUT", "/v2/models/doubler/infer", "OPTIONS, POST"),
        ("GET", "/v2/repository/index", "OPTIONS, POST"),
    ],
)
def test_a_wrong_method_is_answered_with_the_allowed_ones(
    server: Running, method: str, path: str, allowed: str
) -> None:
    answer = server.ask(method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
    assert f"{path}: method {method} is not allowed" in answer.error


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/v2", "GET, HEAD, OPTIONS"), ("/v2/models/doubler/infer", "OPTIONS, POST"), ("/v2/logging", None)],
)
def test_options_lists_the_methods_of_a_path(server: Running, path: str, allowed: str | None) -> None:
    answer = server.ask("OPTIONS", path)
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["allow"] == (allowed or "GET, HEAD, OPTIONS, POST")
    assert "access-control-allow-origin" not in answer.headers  # no setting names an origin


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v2/models/doubler%2Fready"), ("GET", "/v2%2fhealth/live"), ("OPTIONS", "/v2/models/doubler%2Fready")],
)
def test_an_encoded_slash_is_part_of_a_name(server: Running, method: str, path: str) -> None:
    assert server.ask("GET", "/v2/models/doubler/ready").status == 200
    assert server.ask(method, path).status == 404


def test_options_of_the_server_and_of_an_unknown_path(server: Running) -> None:
    whole = server.ask("OPTIONS", "*")
    assert (whole.status, whole.headers["allow"]) == (204, "DELETE, GET, HEAD, OPTIONS, POST, PUT")
    assert server.ask("OPTIONS", "/nowhere").status == 404


@pytest.mark.parametrize("host", ["evil.example", "api:1", "[::1]", "a,b", ""])
def test_the_host_header_changes_nothing(server: Running, host: str) -> None:
    """Neither the route nor an error nor its text depends on it."""
    for path, status in (("/nowhere", 404), ("/v2", 200), ("/v2/health/ready/", 404)):
        answer = server.ask("GET", path, headers={"Host": host})
        assert answer.status == status
        if status == 404:
            assert answer.error == f"GET {path}: there is no such route"


def test_no_answer_is_a_redirect(server: Running) -> None:
    """A path with an extra slash does not exist; there is no redirect to the given Host."""
    answer = server.ask("GET", "/v2/", headers={"Host": "evil.example"})
    assert answer.status == 404
    assert "location" not in answer.headers


@pytest.mark.parametrize("target", ["http://localhost/v2", "/v2?x=1", "/%76%32"])
def test_valid_request_targets(server: Running, target: str) -> None:
    assert server.ask("GET", target).json["name"] == "lathe"


@pytest.mark.parametrize("target", ["*", "v2", "/\xff", "http://[/v2"])
def test_invalid_request_targets_are_refused(target: str) -> None:
    with serving({"doubler": doubler()}) as running, running.connect() as raw:
        raw.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("latin-1"))
        assert raw.answer().status in (400, 404)
        assert running.ask("GET", "/v2").status == 200


def test_an_unexpected_error_is_answered_and_keeps_the_connection_open() -> None:
    async def fail(ready: bool = False) -> list[dict[str, object]]:
        raise RuntimeError("a secret path")

    with serving({"doubler": doubler()}) as running, running.connect() as raw:
        running.registry.index = fail  # type: ignore[method-assign]
        for _ in range(2):
            raw.send(request("POST", "/v2/repository/index", b"{}"))
            answer = raw.answer()
            assert (answer.status, "secret" in answer.error) == (500, False)
            assert "connection" not in answer.headers
        raw.send(infer_request("doubler", rows(1)))
        np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)
