"""Log lines that a server writes without a request: live versions, readiness, missing keys, and reasons of refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from lathe.server.access.authority import Authority
from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.client import ApiError
from tests.server.cli.running import run_lathe
from tests.server.repository.world import copy_by_hand, toy
from tests.server.running import wait_for
from tests.server.service import service
from tests.server.telemetry.test_logs import lines, logged, request_lines


def test_a_change_of_the_live_version_is_logged(tmp_path: Path) -> None:
    with logged() as stream, service(tmp_path / "repo") as running, running.client() as client:
        for scale in (2.0, 3.0):
            client.upload("m", toy(scale))
        client.set_alias("m", "live", 2)
        client.rollback("m")
        client.unload("m")
    found = [
        (line["event"], line["version"])
        for line in lines(stream)
        if line["logger"] == "lathe.server.repository.live_models"
    ]
    assert found == [
        ("m: version 1 is live", 1),
        ("m: version 2 is live, version 1 was", 2),
        ("m: version 1 is live, version 2 was", 1),
        ("m: no version answers any more", 1),
    ]
    loaded = [line for line in lines(stream) if " is in memory after " in line["event"]]
    assert [(line["model"], line["version"]) for line in loaded] == [("m", 1), ("m", 2)]
    assert all(line["seconds"] >= 0 for line in loaded)


def test_a_server_logs_when_it_is_ready_and_how_many_models_answer(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("good", toy(2.0))
    copy_by_hand(tmp_path / "repo", 1, b"no model", name="bad")
    with logged() as stream, service(tmp_path / "repo", held=True) as running:
        running.stages.gate.set()
        with running.client() as client:
            wait_for(lambda: any(line["event"].startswith("ready: ") for line in lines(stream)))
            states = {state.name: state for state in client.models()}
        shown = run_lathe("top", "--rounds", "1", "--interval", "0.05", "--url", running.url)
    (ready,) = [line["event"] for line in lines(stream) if line["event"].startswith("ready: ")]
    assert ready.startswith("ready: 1 of 2 models answer, after ")
    assert states["good"].ready and not states["bad"].ready
    assert f"bad does not answer: {states['bad'].reason}" in shown and "good does not answer" not in shown


def refusal_line(stream: Any) -> dict[str, Any]:
    (line,) = request_lines(stream, 1)
    return {name: line.get(name) for name in ("status", "code", "model", "version", "error")}


def test_a_refused_upload_is_logged_with_its_model_and_reason(tmp_path: Path) -> None:
    with logged() as stream, service(tmp_path / "repo") as running, running.client() as client:
        with pytest.raises(ApiError) as raised:
            client.upload("m", b"no model")
        found = refusal_line(stream)
    assert found == {
        "status": raised.value.status,
        "code": "unprocessable",
        "model": "m",
        "version": None,
        "error": str(raised.value),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/api/v1/models/nobody", (404, "not_found", "nobody", None)),
        ("DELETE", "/api/v1/models/nobody/versions/3", (404, "not_found", "nobody", "3")),
        ("GET", "/v2/models/nobody/versions/3/config", (404, "not_found", "nobody", "3")),
        ("POST", "/v2/repository/models/nobody/load", (404, "not_found", "nobody", None)),
        ("GET", "/nowhere", (404, "not_found", None, None)),
        ("DELETE", "/v2/models/stats", (405, "method_not_allowed", None, None)),
    ],
)
def test_refused_calls_are_logged_with_code_model_and_version(
    method: str, path: str, expected: tuple[object, ...], tmp_path: Path
) -> None:
    with logged() as stream, service(tmp_path / "repo") as running:
        answer = httpx.request(method, running.url + path)
        found = refusal_line(stream)
    assert (found["status"], found["code"], found["model"], found["version"]) == expected
    assert found["error"] and found["error"] == answer.json()["error"]


def test_a_key_without_the_scope_is_logged_with_the_reason(tmp_path: Path) -> None:
    key, shown = make_key("bot", [Scope.INFER], ["*"], 1_800_000_000, None)
    write_keys(tmp_path / "keys.json", [key])
    with logged() as stream, service(tmp_path / "repo", keys_file=tmp_path / "keys.json") as running:
        url = f"{running.url}/api/v1/models/m/rollback"
        assert httpx.post(url, headers={"authorization": f"Bearer {shown}"}).status_code == 403
        found = refusal_line(stream)
    assert (found["status"], found["code"], found["model"]) == (403, "forbidden", "m")
    assert "'bot' does not have scope 'promote'" in str(found["error"])
    assert shown not in stream.getvalue()


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", 1), ("127.0.0.1", 0)])
def test_a_reachable_server_without_keys_logs_a_warning(host: str, warned: int) -> None:
    with logged() as stream:
        Authority(host)
    found = [line for line in lines(stream) if line["level"] == "warning"]
    assert len(found) == warned and all("LATHE_KEYS_FILE" in line["event"] for line in found)
