"""The management API over a real connection, through the client and with raw requests."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from lathe.server.client import ApiError, Client, ClientError
from tests.server.repository.fake_fs import ReadOnlyFs
from tests.server.repository.world import copy_by_hand, toy
from tests.server.service import Service, service, until

ROW = np.ones((1, 4), np.float32)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "repo") as running:
        yield running


@pytest.fixture
def client(served: Service) -> Iterator[Client]:
    with served.client() as connected:
        yield connected


def test_upload_promote_roll_back_delete(client: Client) -> None:
    first = client.upload("m", toy(2.0), metadata={"accuracy": 0.9})
    assert (first.version, first.live, first.state) == (1, True, "ready")
    assert first.digest == hashlib.sha256(toy(2.0)).hexdigest()
    second = client.upload("m", toy(3.0), promote=True)
    assert (second.version, second.live, second.generation) == (2, True, 2)
    answer = client.infer("m", {"x": ROW})
    assert (answer.version, answer.outputs["y"][0, 0]) == (2, 3.0)

    back = client.rollback("m")
    assert (back.version, back.previous, back.history) == (1, None, [1, 2])
    assert client.infer("m", {"x": ROW}).version == 1
    assert client.infer("m", {"x": ROW}, 2).version == 2
    assert client.rollback("m", to=2).version == 2

    canary = client.set_alias("m", "canary", 1)
    assert (canary.version, canary.generation) == (1, 5)
    assert client.infer("m", {"x": ROW}, "canary").version == 1
    with pytest.raises(ApiError, match="'canary' names") as refused:
        client.delete("m", 1)
    assert (refused.value.status, refused.value.code) == (409, "conflict")
    client.set_alias("m", "canary", 2)
    assert client.delete("m", 1).action == "delete"
    assert [version.version for version in client.versions("m")] == [2]
    assert [entry.action for entry in client.audit("m")] == [
        *["publish", "publish", "rollback", "rollback", "alias", "alias", "delete"]
    ]


def test_an_alias_that_stays_where_it_is_is_no_change(client: Client) -> None:
    client.upload("m", toy(2.0))
    client.upload("m", toy(3.0))
    assert client.promote("m", 2).changed
    before = client.audit("m")
    for repeat in (lambda: client.promote("m", 2, key="again"), lambda: client.rollback("m", to=2, key="back")):
        state = repeat()
        assert (state.version, state.previous, state.generation, state.changed) == (2, 1, 3, False)
    assert client.audit("m") == before

    client.promote("m", 1)
    repeated = client.promote("m", 2, key="again")  # as from a client that got no answer to its first attempt
    assert (repeated.version, repeated.changed) == (2, False)
    assert client.model("m").aliases == {"live": 1}
    with pytest.raises(ApiError, match="'again' was used before with another request") as refused:
        client.promote("m", 1, key="again")
    assert refused.value.status == 422


def test_models_and_versions_are_listed(client: Client) -> None:
    client.upload("m", toy(2.0), metadata={"accuracy": 0.9})
    client.upload("m", toy(3.0))
    (model,) = client.models()
    assert model == client.model("m")
    assert (model.ready, model.versions, model.aliases, model.answering) == (True, [1, 2], {"live": 1}, {"live": 1})
    assert [(v.state, v.aliases) for v in client.versions("m")] == [("ready", ["live"]), ("ready", [])]
    manifest = client.version("m", 1).manifest
    assert manifest is not None
    assert manifest["metadata"] == {"accuracy": 0.9}
    assert manifest["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert client.ready()


def test_a_large_upload_streams_with_progress_beyond_the_limit_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(toy(2.0, padding="x" * (3 << 20)))
    seen: list[tuple[int, int]] = []
    with service(tmp_path / "repo", max_body=1 << 20) as running, running.client() as client:
        client.upload("m", file, progress=lambda done, total: seen.append((done, total)))
        assert client.infer("m", {"x": ROW}).version == 1
    size = file.stat().st_size
    assert seen[-1] == (size, size)
    assert len(seen) > 10


def test_the_limit_of_uploads_holds_with_and_without_a_length(tmp_path: Path) -> None:
    with service(tmp_path / "repo", max_upload=10_000) as running:
        url = f"{running.url}/api/v1/models/m/versions"
        announced = httpx.post(url, content=toy(2.0, padding="x" * 20_000))
        chunked = httpx.post(url, content=iter([toy(2.0, padding="x" * 20_000)] * 3))
        assert [announced.status_code, chunked.status_code] == [413, 413]
        assert "10000" in chunked.json()["error"]
        assert chunked.json()["code"] == "too_large"
        assert list(running.root.glob("m/*")) == []


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"content-digest": "sha-256=:" + base64.b64encode(bytes(32)).decode() + ":"}, 400, "Content-Digest says"),
        ({"content-digest": "md5=:abc:"}, 400, "expected sha-256="),
        ({"content-encoding": "gzip"}, 415, "gzip"),
        ({"content-type": "multipart/form-data; boundary=x"}, 415, "multipart"),
        ({"idempotency-key": "a b"}, 400, "Idempotency-Key"),
        ({"idempotency-key": "x" * 300}, 400, "Idempotency-Key"),
    ],
)
def test_invalid_upload_headers_are_refused(
    headers: dict[str, str], status: int, message: str, served: Service
) -> None:
    response = httpx.post(f"{served.url}/api/v1/models/m/versions", content=toy(2.0), headers=headers)
    assert response.status_code == status
    assert message in response.json()["error"]
    assert list(served.root.glob("m/*")) == []


@pytest.mark.parametrize(
    ("metadata", "status"), [("{", 400), ("[1]", 400), ('{"a": NaN}', 400), ('{"a": "' + "x" * 17_000 + '"}', 413)]
)
def test_metadata_is_a_small_json_object(metadata: str, status: int, served: Service) -> None:
    response = httpx.post(f"{served.url}/api/v1/models/m/versions", params={"metadata": metadata}, content=toy(2.0))
    assert response.status_code == status
    assert "metadata" in response.json()["error"]


def test_a_digest_and_an_idempotency_key_are_checked(served: Service) -> None:
    digest = base64.b64encode(hashlib.sha256(toy(2.0)).digest()).decode()
    headers = {"content-digest": f"sha-512=:AAAA:, sha-256=:{digest}:", "idempotency-key": "abc"}
    url = f"{served.url}/api/v1/models/m/versions"
    answers = [httpx.post(url, content=toy(2.0), headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert [answer.json()["replayed"] for answer in answers] == [False, True]
    assert answers[0].json()["version"] == answers[1].json()["version"] == 1
    other = httpx.post(url, content=toy(3.0), headers={"idempotency-key": "abc"})
    assert (other.status_code, other.json()["code"]) == (422, "unprocessable")


BAD_NAMES = [
    "..",
    "../m",
    "%2e%2e",
    "%2e%2e%2fm",
    "%252e%252e%252fm",
    "..%5cm",
    "%00",
    "m%00",
    "/etc",
    "%2fetc",
    ".hidden",
    "-m",
    "m%20n",
    "m%0a",
    "%c3%a9",
    "x" * 129,
    "m%2f..%2f..%2fx",
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_name_leads_out_of_the_repository(name: str, served: Service) -> None:
    with served.client() as client:
        client.upload("m", toy(2.0))
    before = lying_about(served)
    for method, path, body in (
        ("POST", f"/api/v1/models/{name}/versions", toy(2.0)),
        ("GET", f"/api/v1/models/{name}", b""),
        ("GET", f"/api/v1/models/{name}/versions", b""),
        ("GET", f"/api/v1/models/m/versions/{name}", b""),
        ("DELETE", f"/api/v1/models/m/versions/{name}", b""),
        ("PUT", f"/api/v1/models/m/aliases/{name}", b'{"version": 1}'),
        ("POST", f"/v2/repository/models/{name}/load", b"{}"),
        ("POST", f"/v2/repository/models/{name}/unload", b"{}"),
    ):
        status, answer = by_hand(served, method, path, body)
        assert status in (400, 404, 405), (method, path)
        assert str(served.root).encode() not in answer
    assert lying_about(served) == before
    with served.client() as client:
        assert client.infer("m", {"x": ROW}).version == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 0}',
        b'{"version": -1}',
        b'{"version": "1"}',
        b'{"version": 1.5}',
        b'{"version": true}',
        b'{"version": 1, "more": 1}',
        b'{"version": 99999999999999999999}',
        b"\xff",
        b"[" * 10_000,
    ],
)
def test_an_alias_is_moved_by_a_version_number_only(body: bytes, served: Service) -> None:
    with served.client() as client:
        client.upload("m", toy(2.0))
        status, answer = by_hand(served, "PUT", "/api/v1/models/m/aliases/live", body)
        assert status == 400, answer
        assert b'"error"' in answer
        assert client.model("m").generation == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None, "application/jsonp"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "models/m/aliases/live"), ("POST", "jobs"), ("POST", "models/m/rollback"), ("POST", "models/m/canary")],
)
def test_json_with_another_content_type_is_refused(method: str, path: str, kind: str | None, served: Service) -> None:
    """`curl -d` sends such a type; a form of another site's page must not be read as JSON either."""
    headers = {"content-type": kind} if kind else {}
    answer = httpx.request(method, f"{served.url}/api/v1/{path}", content=b'{"version": 1}', headers=headers)
    assert answer.status_code == 415, answer.text
    assert (
        answer.json()["error"]
        == f"header content-type: expected application/json, got {repr(kind) if kind else 'none'}"
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "aliases/live"), ("POST", "rollback"), ("DELETE", "versions/1"), ("POST", "elsewhere")]
)
def test_a_management_body_over_the_limit_is_refused_early(method: str, path: str, served: Service) -> None:
    """Only an upload may be large, and it is written to the disk."""
    head = f"{method} /api/v1/models/m/{path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with socket.create_connection(_address(served), timeout=60) as connection:
        connection.sendall(head.encode())
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(chunk)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    if path in ("aliases/live", "rollback"):  # the other routes answer without waiting for a body
        assert answer.startswith(b"HTTP/1.1 413")
        assert b'"code":"too_large"' in answer


def test_unknown_models_versions_and_aliases_are_refused(client: Client) -> None:
    client.upload("m", toy(2.0))
    for call in (
        lambda: client.model("none"),
        lambda: client.versions("none"),
        lambda: client.version("m", 2),
        lambda: client.audit("none"),
        lambda: client.set_alias("m", "live", 2),
        lambda: client.set_alias("none", "live", 1),
        lambda: client.rollback("none"),
        lambda: client.rollback("m", alias="canary"),
        lambda: client.delete("m", 2),
        lambda: client.infer("none", {"x": ROW}),
    ):
        with pytest.raises(ApiError) as missing:
            call()
        assert missing.value.status == 404, missing.value
    with pytest.raises(ApiError, match="first of the history") as refused:
        client.rollback("m")
    assert refused.value.status == 409


def test_a_bad_model_is_refused_and_the_old_one_serves_on(client: Client) -> None:
    client.upload("m", toy(2.0))
    with pytest.raises(ApiError, match="no operator 'Bad'") as refused:
        client.upload("m", b"\x08nonsense", promote=True)
    assert refused.value.status == 422
    with pytest.raises(ApiError, match="zip archive") as refused:
        client.upload("m", b"PK\x03\x04", promote=True)
    assert refused.value.status == 415
    with pytest.raises(ApiError, match="allow_signature_change") as refused:
        client.upload("m", toy(3.0, (-1, 5)), promote=True)
    assert refused.value.status == 409
    assert client.infer("m", {"x": ROW}).version == 1


def test_an_interrupted_upload_leaves_nothing(served: Service) -> None:
    with socket.create_connection(_address(served)) as connection:
        connection.sendall(
            b"POST /api/v1/models/m/versions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000\r\n\r\n"
            + toy(2.0, padding="x" * (3 << 20))
        )
        until(lambda: list(served.root.glob(".lathe/staging/*/*/model.onnx")))
    until(lambda: not list(served.root.glob(".lathe/staging/*/*/*")))
    with served.client() as client:
        assert client.models() == []


def test_a_read_only_repository_is_served_and_refuses_changes(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    with service(root) as running, running.client() as client:
        client.upload("m", toy(2.0))
        client.upload("m", toy(3.0), promote=True)
    with service(root, ReadOnlyFs()) as running, running.client() as client:
        for call in (
            lambda: client.upload("m", toy(4.0)),
            lambda: client.rollback("m"),
            lambda: client.set_alias("m", "live", 1),
            lambda: client.delete("m", 1),
        ):
            with pytest.raises(ApiError, match="cannot be written: Read-only file system") as refused:
                call()
            assert refused.value.status == 503
            assert client.infer("m", {"x": ROW}).version == 2


def test_switches_under_load_lose_no_request_and_name_the_right_version(served: Service) -> None:
    errors: list[Any] = []
    done = threading.Event()
    answered = Counter[int]()

    def ask() -> None:
        with served.client() as client:
            while not done.is_set():
                answer = client.infer("m", {"x": ROW})
                answered[answer.version] += 1
                if answer.outputs["y"][0, 0] != answer.version:
                    errors.append(answer)

    with served.client() as client:
        client.upload("m", toy(1.0))
        client.upload("m", toy(2.0))
        threads = [threading.Thread(target=_noting(ask, errors)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for turn in range(30):
            version = 2 - turn % 2
            client.set_alias("m", "live", version)
            assert client.infer("m", {"x": ROW}).version == version
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert min(answered[1], answered[2]) > 10


def test_the_calls_of_the_inference_protocol(served: Service) -> None:
    with served.client() as client:
        client.upload("m", toy(2.0))
        client.upload("m", toy(3.0))
    index = httpx.post(f"{served.url}/v2/repository/index").json()
    assert index == [{"name": "m", "version": "1", "state": "READY"}, {"name": "m", "version": "2", "state": "READY"}]
    assert httpx.post(f"{served.url}/v2/repository/models/m/unload").status_code == 200
    until(lambda: "UNLOADING" not in httpx.post(f"{served.url}/v2/repository/index").text)
    assert httpx.post(f"{served.url}/v2/repository/index", json={"ready": True}).json() == []
    assert httpx.get(f"{served.url}/v2/models/m/ready").status_code == 400
    assert httpx.post(f"{served.url}/v2/repository/models/m/load", content=b"{}").status_code == 200
    assert httpx.get(f"{served.url}/v2/models/m/ready").status_code == 200
    assert httpx.post(f"{served.url}/v2/repository/models/none/load").status_code == 404
    other = toy(9.0)
    override = {"parameters": {"file:1/model.onnx": base64.b64encode(other).decode()}}
    refused = httpx.post(f"{served.url}/v2/repository/models/m/load", json=override)
    assert refused.status_code == 501
    assert other not in b"".join(path.read_bytes() for path in served.root.rglob("*") if path.is_file())


def test_a_server_whose_models_still_compile_is_alive_and_not_ready(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    copy_by_hand(root, 1, toy(2.0))
    with service(root, held=True) as running, running.client() as client:
        until(client.models)
        assert httpx.get(f"{running.url}/v2/health/live").status_code == 200
        assert not client.ready()
        with pytest.raises(ApiError, match="not loaded") as waiting:
            client.infer("m", {"x": ROW})
        assert waiting.value.status == 503
        running.stages.gate.set()
        until(client.ready)
        assert client.infer("m", {"x": ROW}).version == 1


def test_openapi_describes_every_route_and_error(served: Service) -> None:
    paths = httpx.get(f"{served.url}/openapi.json").json()["paths"]
    described = {(path, method) for path, methods in paths.items() for method in methods}
    assert {found for found in described if found[0].startswith("/api/v1/models")} == {
        ("/api/v1/models", "get"),
        ("/api/v1/models/{model}", "get"),
        ("/api/v1/models/{model}/versions", "get"),
        ("/api/v1/models/{model}/versions", "post"),
        ("/api/v1/models/{model}/versions/{version}", "get"),
        ("/api/v1/models/{model}/versions/{version}", "delete"),
        ("/api/v1/models/{model}/aliases/{alias}", "put"),
        ("/api/v1/models/{model}/rollback", "post"),
        ("/api/v1/models/{model}/canary", "post"),
        ("/api/v1/models/{model}/canary", "get"),
        ("/api/v1/models/{model}/canary", "delete"),
        ("/api/v1/models/{model}/audit", "get"),
    }
    upload = paths["/api/v1/models/{model}/versions"]["post"]
    assert upload["requestBody"]["content"].keys() == {"application/octet-stream", "application/x-tar"}
    assert {"201", "400", "409", "413", "415", "422", "503", "507"} <= upload["responses"].keys()


def test_the_client_names_a_server_that_does_not_answer() -> None:
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(ClientError, match=r"no server answers at http://127\.0\.0\.1:1: "),
    ):
        client.models()


def lying_about(served: Service) -> set[str]:
    """All files in and beside the repository, except the compiler's scratch."""
    root = served.root.parent
    return {str(path.relative_to(root)) for path in root.rglob("*") if ".cache" not in path.parts}


def by_hand(served: Service, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a request with the path unchanged: clients normalise paths."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n"
    with socket.create_connection(_address(served), timeout=60) as connection:
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # the answer came before the body was read
            while chunk := connection.recv(65536):
                answer += chunk
    return int(answer.split()[1]), answer


def _address(served: Service) -> tuple[str, int]:
    parts = urlsplit(served.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _noting(work: Any, errors: list[Any]) -> Any:
    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    return run


def test_a_candidate_is_tried_watched_and_cancelled(client: Client) -> None:
    client.upload("m", toy(2.0))
    client.upload("m", toy(3.0))
    begun = client.start_canary("m", 2, weight=0.5, shadow=0.05, key="try-it")
    assert (begun.version, begun.live, begun.verdict, begun.requests) == (2, 1, "undecided", 0)
    assert client.start_canary("m", 2, weight=0.5, shadow=0.05, key="try-it").generation == begun.generation

    answers = [client.infer("m", {"x": ROW}) for _ in range(40)]
    assert {(answer.version, float(answer.outputs["y"][0, 0])) for answer in answers} == {(1, 2.0), (2, 3.0)}
    state = client.canary("m")
    assert state.requests == sum(answer.version == 2 for answer in answers) == 8  # at first a fifth
    questions = {found.question: found for found in state.evidence}
    slow = {"slow (p90)", "slow (p99)", "slow (worst)"}
    assert questions.keys() == {"failing", "not finite", *slow, "differing"}
    assert questions["differing"].candidate == 1.0

    ended = client.cancel_canary("m")
    assert (ended.action, ended.version, ended.actor) == ("cancelled", 2, "127.0.0.1")
    assert {client.infer("m", {"x": ROW}).version for _ in range(20)} == {1}
    with pytest.raises(ApiError, match="has no canary") as refused:
        client.canary("m")
    assert refused.value.status == 404


def test_a_sticky_key_in_the_header_decides_which_version_answers(client: Client, served: Service) -> None:
    client.upload("m", toy(2.0))
    client.upload("m", toy(3.0))
    client.start_canary("m", 2, weight=0.5)
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}
    with httpx.Client(base_url=served.url) as http:
        versions: dict[str, set[str]] = {}
        for user in [f"user {i}" for i in range(16)] * 3:
            answer = http.post("/v2/models/m/infer", json=body, headers={"lathe-sticky-key": user})
            versions.setdefault(user, set()).add(answer.json()["model_version"])
    assert all(len(seen) == 1 for seen in versions.values())
    assert {version for seen in versions.values() for version in seen} == {"1", "2"}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"version": 2, "weight": 0.9}, "weight"),
        ({"version": "2"}, "version"),
        ({"version": 2, "wieght": 0.1}, "wieght"),
    ],
)
def test_invalid_trials_are_refused(client: Client, served: Service, asked: dict[str, Any], named: str) -> None:
    client.upload("m", toy(2.0))
    client.upload("m", toy(3.0))
    refused = httpx.post(f"{served.url}/api/v1/models/m/canary", json=asked)
    assert refused.status_code == 400
    assert named in refused.json()["error"]
    assert httpx.get(f"{served.url}/api/v1/models/m/canary").status_code == 404
