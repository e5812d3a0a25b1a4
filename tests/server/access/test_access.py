"""Keys, scopes and the table of routes: every route with every scope, over real connections."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from typer.testing import CliRunner

from lathe.server.access import authority
from lathe.server.access.authority import Authority, Mode
from lathe.server.access.keys import DamagedKeys, Key, KeyRing, make_key, read_keys, write_keys
from lathe.server.access.scopes import GRPC_METHODS, ROUTES, RequiredScope, Scope, alternatives
from lathe.server.archive import archive_of
from lathe.server.cli.app import app as cli
from lathe.server.errors import Forbidden, Unauthorized
from tests.server.repository.world import toy
from tests.server.route_parameters import PARAMETERS
from tests.server.running import Raw
from tests.server.service import Service, service, until

NOW = 1_800_000_000


def new_key(path: Path, scopes: Iterable[Scope], models: Iterable[str] = ("*",), expires: int | None = None) -> str:
    """Add a key to a file; return the bearer token."""
    key, shown = make_key("bot", scopes, models, NOW, expires)
    write_keys(path, [*(read_keys(path).keys.values() if path.exists() else ()), key])
    return shown


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of keys of this module's server."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write_keys(path, [])
    return path


@pytest.fixture(scope="module")
def everything(keys: Path) -> str:
    """A key with all scopes."""
    return new_key(keys, Scope)


@pytest.fixture(scope="module")
def guarded(keys: Path, everything: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server with keys, and version 1 of model m."""
    root = tmp_path_factory.mktemp("guarded") / "repo"
    with service(root, keys_file=keys) as running:
        assert call(running, "POST", "/api/v1/models/m/versions", everything, content=toy(2.0)).status_code == 201
        yield running


def call(running: Service, method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    # without TLS there is nothing to verify, and reading the system's certificates takes longer than the call
    return httpx.request(method, running.url + path, headers=headers, verify=False, **options)


def _port(running: Service) -> int:
    port = urlsplit(running.url).port
    assert port
    return port


def fill_path(template: str) -> str:
    return template.format(**PARAMETERS)


def fresh_key(running: Service, keys: Path, scopes: Iterable[Scope], models: Iterable[str] = ("*",)) -> str:
    """Add a key and wait until the server knows it."""
    shown = new_key(keys, scopes, models)
    until(lambda: call(running, "GET", "/v2/models/m/ready", shown).status_code != 401)
    return shown


def test_the_table_has_exactly_the_routes_of_the_application(guarded: Service) -> None:
    described = httpx.get(f"{guarded.url}/openapi.json").json()["paths"]
    served = {(method.upper(), path) for path, methods in described.items() for method in methods}
    assert served == ROUTES.keys()


def test_the_description_names_the_scope_of_each_route(guarded: Service) -> None:
    described = httpx.get(f"{guarded.url}/openapi.json").json()
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for (method, path), need in ROUTES.items():
        operation = described["paths"][path][method.lower()]
        assert operation.get("security") == ([{"key": []}] if need else None), (method, path)
        assert ({"401", "403"} <= operation["responses"].keys()) == (need is not None), (method, path)


def test_every_route_with_every_scope(guarded: Service, keys: Path, everything: str) -> None:
    """A route answers 401 without a key, 403 with any other scope, and neither with its own scope."""
    shown = {scope: fresh_key(guarded, keys, [scope]) for scope in Scope}
    described = httpx.get(f"{guarded.url}/openapi.json").json()["paths"]
    for (method, template), need in ROUTES.items():
        path, statuses = fill_path(template), described[template][method.lower()]["responses"].keys()
        without = call(guarded, method, path).status_code
        assert str(without) in statuses, (method, path, without)
        assert (without == 401) == (need is not None), (method, path, without)
        for scope, key in shown.items() if need else ():
            status = call(guarded, method, path, key).status_code
            assert (status == 403) == (need is None or scope not in alternatives(need)), (method, path, scope, status)
            assert status != 500, (method, path, scope)
            assert str(status) in statuses, (method, path, scope, status)
    assert call(guarded, "POST", "/v2/repository/models/m/load", everything).status_code == 200  # after the unload


def test_a_key_is_limited_to_the_models_it_names(guarded: Service, keys: Path, everything: str) -> None:
    call(guarded, "POST", "/api/v1/models/team-a/versions", everything, content=toy(2.0))
    key = fresh_key(guarded, keys, [Scope.INFER, Scope.READ], ["team-*"])
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}
    seen = {name: call(guarded, "POST", f"/v2/models/{name}/infer", key, json=body) for name in ("team-a", "m")}
    assert {name: answer.status_code for name, answer in seen.items()} == {"team-a": 200, "m": 403}
    assert seen["m"].json()["error"] == "key 'bot' does not have scope 'infer' for model 'm'"
    assert call(guarded, "GET", "/v2/models/team-a", key).status_code == 200
    assert call(guarded, "GET", "/api/v1/models", key).status_code == 403  # a list of all models


def test_a_key_that_may_run_a_model_may_read_what_its_clients_read_first(guarded: Service, keys: Path) -> None:
    key = fresh_key(guarded, keys, [Scope.INFER], ["m"])
    for path in ("", "/ready", "/versions/1", "/versions/1/ready"):
        assert call(guarded, "GET", f"/v2/models/m{path}", key).status_code == 200, path
    for path in ("/v2/models/m/config", "/v2/models/m/stats", "/api/v1/models/m", "/api/v1/models", "/metrics"):
        assert call(guarded, "GET", path, key).status_code == 403, path
    other = call(guarded, "GET", "/v2/models/team-a", key)
    assert (other.status_code, other.json()["error"]) == (
        403,
        "key 'bot' does not have scope 'read' or 'infer' for model 'team-a'",
    )
    asked = CliRunner().invoke(cli, ["infer", "m", "--url", guarded.url, "--api-key", key])
    assert "answered by m version 1" in asked.output


def test_a_promotion_needs_more_than_the_scope_to_upload(guarded: Service, keys: Path) -> None:
    key = fresh_key(guarded, keys, [Scope.WRITE])
    refused = call(guarded, "POST", "/api/v1/models/m/versions?promote=true", key, content=toy(9.0))
    assert refused.status_code == 403
    assert "'promote'" in refused.json()["error"]


def test_a_pipeline_needs_the_right_to_run_its_models(guarded: Service, keys: Path) -> None:
    text = b'inputs = ["x"]\noutputs = ["y"]\n'
    text += b'step = [{name = "s", model = "m", inputs = {x = "x"}, outputs = {y = "y"}}]\n'
    content = b"".join(archive_of({"pipeline.toml": [text]}).pieces())
    path = "/api/v1/models/way-round/versions"
    for models, status in ((("way-round",), 403), (("way-round", "m"), 201)):
        key = fresh_key(guarded, keys, (Scope.WRITE, Scope.INFER), models)
        assert call(guarded, "POST", path, key, content=content).status_code == status


def test_the_audit_log_names_the_key(guarded: Service, everything: str) -> None:
    assert call(guarded, "GET", "/api/v1/models/m/audit", everything).json()[0]["actor"] == "bot"


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"authorization": ""},
        {"authorization": "Basic YTpi"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer lathe_000000000000_" + "x" * 43},
        {"authorization": "Bearer " + "\xff" * 30},
    ],
)
def test_an_invalid_key_is_refused_with_a_challenge(guarded: Service, header: dict[str, str]) -> None:
    raw = {name: value.encode("latin-1") for name, value in header.items()}
    answer = httpx.get(f"{guarded.url}/api/v1/models", headers=raw)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json()["code"] == "unauthorized"
    direct = httpx.post(f"{guarded.url}/v2/models/m/infer", headers=raw, json={})
    assert (direct.status_code, direct.headers["www-authenticate"]) == (401, "Bearer")


def test_a_key_with_one_wrong_letter_is_refused(everything: str, keys: Path) -> None:
    ring = read_keys(keys)
    assert ring.find(everything, NOW) is not None
    for at in (6, 20, len(everything) - 1):
        other = everything[:at] + ("a" if everything[at] != "a" else "b") + everything[at + 1 :]
        assert ring.find(other, NOW) is None


def test_keys_expire_and_are_revoked_without_a_restart(guarded: Service, keys: Path) -> None:
    key, shown = make_key("bot", [Scope.READ], ["*"], NOW, NOW + 10)
    assert KeyRing([key]).find(shown, NOW + 9) == key
    assert KeyRing([key]).find(shown, NOW + 10) is None

    passing = fresh_key(guarded, keys, [Scope.READ])
    before = read_keys(keys)
    write_keys(keys, [key for key in before.keys.values() if before.find(passing, NOW) != key])
    until(lambda: call(guarded, "GET", "/v2/models/m", passing).status_code == 401)


def test_an_invalid_file_leaves_the_keys_unchanged(guarded: Service, keys: Path, everything: str) -> None:
    whole = keys.read_bytes()
    try:
        for broken in (b"", b"{", b'{"schema": 1, "keys": [{}]}', b'{"schema": 2, "keys": []}'):
            keys.write_bytes(broken)
            with pytest.raises(DamagedKeys):
                read_keys(keys)
            assert call(guarded, "GET", "/v2/models/m", everything).status_code == 200
    finally:
        keys.write_bytes(whole)


def test_an_unexpected_error_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys that are revoked after it would stay valid otherwise."""
    file = tmp_path / "keys.json"
    shown = new_key(file, [Scope.READ])
    ring = Authority("127.0.0.1", file)
    write_keys(file, [])
    with monkeypatch.context() as patched:
        patched.setattr(authority, "read_keys", lambda _: 1 // 0)
        assert not ring.refresh()
    assert "the keys cannot be reloaded and stay unchanged: integer division" in caplog.text
    assert check(ring, Scope.READ, shown) is None
    assert ring.refresh()
    assert check(ring, Scope.READ, shown) is Unauthorized


def test_without_keys_a_reachable_address_refuses_management(tmp_path: Path) -> None:
    assert [Authority(host).mode for host in ("127.0.0.1", "::1", "0.0.0.0", "10.0.0.1")] == [
        *[Mode.OPEN, Mode.OPEN, Mode.UNMANAGED, Mode.UNMANAGED]
    ]
    assert Authority("0.0.0.0", open_management=True).mode is Mode.OPEN
    authority = Authority("0.0.0.0")
    for scope in (Scope.INFER, Scope.READ):
        authority.check("", scope, "m")
    for scope in (Scope.WRITE, Scope.PROMOTE, Scope.ADMIN):
        with pytest.raises(Forbidden, match="LATHE_KEYS_FILE"):
            authority.check("Bearer whatever", scope, "m")
    with service(tmp_path / "repo", host="0.0.0.0") as running:
        refused = httpx.post(f"{running.url}/api/v1/models/m/versions", content=toy(1.0))
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        assert httpx.get(f"{running.url}/api/v1/models").json() == []


def test_every_grpc_call_is_in_the_table() -> None:
    from lathe.server.api.grpc.messages import HEALTH, INFERENCE

    named = {m.name for file in (INFERENCE, HEALTH) for s in file.services_by_name.values() for m in s.methods}
    assert named == GRPC_METHODS.keys()


def test_a_server_with_a_broken_file_of_keys_does_not_start(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text("{}")
    for env in ({"LATHE_KEYS_FILE": str(file)}, {"LATHE_KEYS_FILE": str(tmp_path / "absent.json")}):
        result = CliRunner().invoke(cli, ["serve", "--model-repo", str(tmp_path), "--port", "0"], env=env)
        assert result.exit_code == 1
        assert "keys" in result.output


@pytest.mark.parametrize("days", ["inf", "1e9"])
def test_a_key_that_would_never_expire_by_its_days_is_refused(tmp_path: Path, days: str) -> None:
    arguments = ["keys", "add", "ci", "--scope", "read", "--file", str(tmp_path / "keys.json"), "--days", days]
    refused = CliRunner().invoke(cli, arguments)
    assert refused.exit_code == 1
    assert "--days: expected at most 36500, got" in refused.output
    assert not (tmp_path / "keys.json").exists()


def test_keys_are_added_listed_and_revoked_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"

    def run_lathe(*arguments: str) -> Any:
        return CliRunner().invoke(cli, ["keys", *arguments, "--file", str(file)], env={"COLUMNS": "200"})

    made = run_lathe("add", "ci", "--scope", "write", "--scope", "promote", "--model", "digits*", "--days", "90")
    shown = made.stdout.strip()
    (key,) = read_keys(file).keys.values()
    assert isinstance(key, Key)
    assert read_keys(file).find(shown, key.created + 1) == key
    assert (key.name, key.scopes, key.models) == ("ci", {Scope.WRITE, Scope.PROMOTE}, ("digits*",))
    assert key.expires == key.created + 90 * 86_400
    assert shown.split("_", 2)[2] not in file.read_text()  # a secret may contain underscores too
    assert os.stat(file).st_mode & 0o077 == 0
    assert {"promote", "write"} <= set(run_lathe("list").output.split())  # in one line of a cell or in two
    assert "there is no key with this id" in run_lathe("revoke", "0" * 12).output
    assert run_lathe("revoke", "ci").output.endswith(f"; the id of 'ci' is {key.id}\n")
    assert run_lathe("revoke", key.id).exit_code == 0
    assert not read_keys(file).keys


def check(authority: Authority, need: RequiredScope, key: str, model: str = "m") -> type[Exception] | None:
    try:
        if need is not None:
            authority.check(f"Bearer {key}", need, model)
    except (Unauthorized, Forbidden) as error:
        return type(error)
    return None


def test_no_scope_includes_another(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    shown = {scope: new_key(file, [scope]) for scope in Scope}
    authority = Authority("127.0.0.1", file)
    for own, key in shown.items():
        for scope in Scope:
            assert check(authority, scope, key) is (None if scope is own else Forbidden)
    assert {check(authority, scope, "lathe_x_y") for scope in Scope} == {Unauthorized}


def test_without_a_key_no_body_is_received(guarded: Service) -> None:
    """The head is refused; a body still to come would use memory that callers with keys need."""
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000\r\n\r\n"
    for _ in range(2):
        with Raw(_port(guarded)) as connection:
            connection.send(head)
            assert connection.answer().status == 401


def test_a_remembered_head_is_refused_before_its_body_if_its_key_is_revoked(guarded: Service, keys: Path) -> None:
    key = fresh_key(guarded, keys, [Scope.INFER, Scope.READ])
    body = b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}'
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with Raw(_port(guarded)) as connection:
        for _ in range(2):
            connection.send(head.encode() + body)
            assert connection.answer().status == 200
        before = read_keys(keys)
        write_keys(keys, [other for other in before.keys.values() if before.find(key, NOW) != other])
        until(lambda: call(guarded, "GET", "/v2/models/m/ready", key).status_code == 401)
        connection.send(head.encode() + body[:10])
        assert connection.answer().status == 401
