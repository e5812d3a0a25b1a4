"""A misspelt model name: every route and call suggests the nearest name, if the caller may read that model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from lathe.server.access.authority import Caller, Mode
from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import GRPC_METHODS, ROUTES, UPLOADS, Scope
from lathe.server.access.suggestions import nearest_name, with_suggestion
from lathe.server.errors import UnknownModel
from tests.server.api.grpc.wire import grpc_serving, refusal, stub
from tests.server.fakes import doubler
from tests.server.repository.world import toy
from tests.server.service import Service, service

HINT = "unknown model 'didgits', did you mean 'digits'?"
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}
BODIES: dict[str, Any] = {
    "infer": BODY, "aliases/{alias}": {"version": 1}, "canary": {"version": 1},
    "generate": {"text_input": "x"}, "generate_stream": {"text_input": "x"},
}  # fmt: skip
NO_HINT = {"ModelReady": "an unknown model is not ready, which is the answer"}


def caller(scopes: list[Scope], models: list[str]) -> Caller:
    return Caller(make_key("bot", scopes, models, 0, None)[0], Mode.KEYED)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A file of keys and two bearer tokens: one with all scopes, and one that may only run models."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    made = {"all": make_key("all", Scope, ["*"], 0, None), "runs": make_key("runs", [Scope.INFER], ["*"], 0, None)}
    made["other"] = make_key("other", [Scope.READ, Scope.INFER], ["did*"], 0, None)
    write_keys(path, [key for key, _ in made.values()])
    return path, {name: f"Bearer {shown}" for name, (_, shown) in made.items()}


@pytest.fixture(scope="module")
def running(keys: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("served") / "repo", keys_file=keys[0]) as found:
        url = f"{found.url}/api/v1/models/digits/versions?promote=true"
        assert httpx.post(url, content=toy(2.0), headers={"authorization": keys[1]["all"]}).status_code == 201
        yield found


def ask(running: Service, key: str, method: str, template: str) -> httpx.Response:
    path = template.replace("{model}", "didgits").replace("{version}", "1").replace("{alias}", "live")
    body = next((body for end, body in BODIES.items() if method != "GET" and template.endswith(end)), None)
    return httpx.request(method, running.url + path, headers={"authorization": key}, json=body)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("method", "template"), [each for each in ROUTES if "{model}" in each[1] and each not in UPLOADS]
)
def test_every_route_suggests_the_nearest_model(
    running: Service, keys: tuple[Path, dict[str, str]], method: str, template: str
) -> None:
    answer = ask(running, keys[1]["all"], method, template)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"] if template.startswith("/v1/") else error) == (404, HINT)


@pytest.mark.parametrize("key", ["runs", "other"])
def test_names_that_a_caller_may_not_read_are_never_suggested(
    running: Service, keys: tuple[Path, dict[str, str]], key: str
) -> None:
    answer = ask(running, keys[1][key], "POST", "/v2/models/{model}/infer")
    assert (answer.status_code, answer.json()["error"]) == (404, "unknown model 'didgits'")


def with_model(kind: Any) -> Any:
    field = next(name for name in ("model_name", "name") if name in kind.DESCRIPTOR.fields_by_name)
    return kind(**{field: "didgits"})


def unary_calls() -> dict[str, Callable[[], Any]]:
    """The calls that name a model, each with a function that makes its message."""
    kinds = {name: getattr(service_pb2, f"{name}Request", None) for name in GRPC_METHODS if "SharedMemory" not in name}
    named = {
        name: kind
        for name, kind in kinds.items()
        if kind is not None and {"name", "model_name"} & set(kind.DESCRIPTOR.fields_by_name) and name not in NO_HINT
    }
    return {name: lambda kind=kind: with_model(kind) for name, kind in named.items()}


def test_every_grpc_call_suggests_the_nearest_model(keys: tuple[Path, dict[str, str]]) -> None:
    calls = unary_calls()
    assert {"ModelInfer", "ModelMetadata", "ModelConfig", "ModelStatistics", "TraceSetting"} <= calls.keys()
    metadata = (("authorization", keys[1]["all"]),)
    with grpc_serving({"digits": doubler()}, keys_file=keys[0]) as (_, address), stub(address) as stubbed:
        for name, make in calls.items():
            code, text = refusal(getattr(stubbed, name), make(), metadata=metadata)
            assert (name, code, text) == (name, grpc.StatusCode.NOT_FOUND, HINT)
        _, text = refusal(stubbed.ModelInfer, calls["ModelInfer"](), metadata=(("authorization", keys[1]["runs"]),))
        assert text == "unknown model 'didgits'"


def test_only_near_and_readable_names_are_suggested() -> None:
    error = UnknownModel.of("didgits", ["digits", "didgitsx", "digits-lenet-5-large", "weather"])
    everybody = Caller()
    assert nearest_name(UnknownModel.of("weather-forecast", ["digits"]), everybody) == ""
    assert nearest_name(UnknownModel.of("", ["digits"]), everybody) == ""
    assert nearest_name(error, everybody) == "didgitsx"
    assert nearest_name(error, caller([Scope.READ], ["digits"])) == "digits"
    assert nearest_name(error, caller([Scope.INFER], ["*"])) == ""
    assert with_suggestion(error, caller([Scope.READ], ["weather"])).message == "unknown model 'didgits'"


def test_the_search_for_the_nearest_name_is_bounded() -> None:
    compared = 0

    def names() -> Iterator[str]:
        nonlocal compared
        for number in range(100_000):
            compared += 1
            yield f"d{number:05}s"

    nearest_name(UnknownModel.of("digitss", names()), Caller())
    assert compared <= 101
