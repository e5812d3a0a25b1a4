"""Every operation of both clients, against a server."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import ml_dtypes
import numpy as np
import pytest
from pydantic import BaseModel

import lathe.client
from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import ROUTES, Scope
from lathe.server.api.management.canary_schemas import CanaryAsked
from lathe.server.api.management.job_schemas import JobAsked
from lathe.server.client import ApiError, AsyncClient, Client, ClientError
from lathe.server.client.call import Call, operation
from tests.server.client.both_clients import BOTH
from tests.server.fakes import doubler, echo
from tests.server.jobs.world import fake_jobs
from tests.server.repository.world import toy
from tests.server.running import serving
from tests.server.service import Service, service, until

ROW = np.ones((1, 4), np.float32)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "repo", make_jobs=fake_jobs, job_slots=2) as running:
        yield running


@pytest.fixture(params=BOTH)
def client(request: pytest.FixtureRequest, served: Service) -> Iterator[Any]:
    with BOTH[request.param](served.url) as connected:
        yield connected


def test_importing_the_client_imports_neither_the_compiler_nor_the_server() -> None:
    script = "import sys, lathe.client; print(*sorted({n.partition('.')[0] for n in sys.modules} | sys.modules.keys()))"
    known = set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )
    assert {"lathe.server", "httpx", "numpy"} <= known
    heavy = {"lathe.core", "llvmlite", "onnx", "fastapi", "starlette", "uvicorn", "sqlalchemy", "typer"}
    assert not known & heavy


def test_versions_from_the_first_upload_to_the_deletion(client: Any, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(toy(2.0))
    sent: list[tuple[int, int]] = []
    first = client.upload("m", str(tmp_path / "model.onnx"), progress=lambda *so_far: sent.append(so_far))
    assert (first.version, first.live, sent[-1]) == (1, True, (len(toy(2.0)),) * 2)
    assert client.upload("m", toy(3.0), key="again").version == 2
    with pytest.raises(ClientError, match=r"^content: expected the path of a file or bytes, got int$"):
        client.upload("m", 3)
    assert client.upload("m", toy(3.0), key="again").replayed
    assert client.promote("m", 2).version == 2
    assert client.infer("m", {"x": ROW})["y"][0, 0] == 3.0
    assert client.rollback("m").version == 1
    assert client.set_alias("m", "stage", 2).generation == 5
    assert client.infer("m", {"x": ROW}, "stage").version == 2
    assert client.start_canary("m", 2, weight=0.1, promote=False).weight == 0.1
    assert client.canary("m").version == 2
    assert client.cancel_canary("m").action == "cancelled"
    with pytest.raises(ApiError, match="alias 'stage' names") as refused:
        client.delete("m", 2)
    assert (refused.value.status, refused.value.code) == (409, "conflict")
    client.set_alias("m", "stage", 1)
    assert client.delete("m", 2).action == "delete"
    actions = [entry.action for entry in client.audit("m")]
    assert actions == ["publish", "publish", "alias", "rollback", "alias", "canary", "cancelled", "alias", "delete"]
    assert [entry.action for entry in client.audit("m", limit=2)] == ["alias", "delete"]


def test_models_and_versions_are_listed(client: Any) -> None:
    client.upload("m", toy(2.0))
    assert client.ready()
    assert client.server()["name"]
    assert "lathe" in client.metrics()
    assert client.status() == [{"name": "m", "version": "1", "state": "READY"}]
    assert client.models() == [client.model("m")]
    assert [found.version for found in client.versions("m")] == [1]
    assert client.version("m", 1).manifest["inputs"][0]["name"] == "x"
    assert client.describe("m")["inputs"] == client.describe("m", "live")["inputs"]
    assert client.config("m", 1)["name"] == "m"
    assert client.statistics("m")["model_stats"][0]["name"] == "m"
    with pytest.raises(ApiError, match="'n'") as refused:
        client.model("n")
    assert refused.value.status == 404


def test_a_model_is_unloaded_and_loaded(client: Any) -> None:
    client.upload("m", toy(2.0))
    client.unload("m")
    until(lambda: not client.model("m").ready)
    client.load("m")
    assert client.infer("m", {"x": ROW}).version == 1


@pytest.mark.sample(2)
def test_a_version_is_compressed(client: Any) -> None:
    client.upload("m", toy(2.0))
    steps = {"steps": 3, "model": toy(3.0).decode()}  # of the fake job
    method, gate = {"kind": "static"}, {"min": {"accuracy": 0.5}}
    job = client.compress("m", method, "digits", version=1, promote=True, gate=gate, recipe=steps, key="once")
    until(lambda: client.job(job.id).finished)
    ended = client.job(job.id)
    assert (ended.kind, ended.model.version, ended.recipe) == ("compress", 1, {**steps, "method": method})
    assert (ended.result.version, ended.result.moved_alias) == (2, True)
    assert client.version("m", 2).manifest["metadata"]["lineage"]["parent"]["version"] == 1
    assert client.compress("m", method, "digits", version=1, promote=True, gate=gate, recipe=steps, key="once").replayed
    other = client.compress("m", method, "digits", recipe=steps, publish={"model": "n"})
    until(lambda: client.job(other.id).finished)
    assert client.job(other.id).result.model == "n"


def test_jobs_on_datasets(client: Any) -> None:
    job = client.submit_job({"steps": 3, "model": toy(3.0).decode()}, "digits", publish={"model": "made"})
    events = client.job_events(job.id)
    assert [event.data["step"] for event in events if event.kind == "step"] == [1, 2, 3]
    assert client.job(job.id).state == "succeeded"
    assert (client.job_model(job.id), client.job_report(job.id)) == (toy(3.0), "<h1>report</h1>")
    assert isinstance(client.job_log(job.id), str)
    assert [found.id for found in client.jobs(state="succeeded")] == [job.id]
    assert client.delete_job(job.id).id == job.id
    long = client.submit_job({"steps": 100_000, "seconds": 0.01}, "digits")
    client.cancel_job(long.id)
    until(lambda: client.job(long.id).finished)
    with pytest.raises(ApiError):
        list(client.job_events("nojob"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", BOTH)
def test_a_dataset_from_upload_to_deletion(kind: str, tmp_path: Path) -> None:
    (tmp_path / "flowers.csv").write_text("a,b,y\n" + "1.5,2,red\n2.5,1,blue\n" * 8)
    with service(tmp_path / "repo") as running, BOTH[kind](running.url) as client:
        found = client.upload_dataset("flowers", tmp_path / "flowers.csv")
        assert (found.rows, found.classes) == (16, client.dataset("flowers").classes)
        assert client.upload_dataset("flowers", str(tmp_path / "flowers.csv")).digest == found.digest
        assert [each.name for each in client.datasets()] == ["flowers"]
        assert client.delete_dataset("flowers").digests == [found.digest]
        with pytest.raises(OSError, match="nowhere"):
            client.upload_dataset("flowers", tmp_path / "nowhere")


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "values",
    [
        np.array([[True, False]]),
        np.arange(6, dtype=np.int8).reshape(3, 2),
        np.arange(6, dtype=">u2").reshape(2, 3),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.array([[1.5, -2.0]], np.float16),
        np.array([[1.5, -2.0]], ml_dtypes.bfloat16),
        np.zeros((0, 3), np.float64),
        np.array([["grün", ""], ["b", "c"]]),
    ],
    ids=lambda values: str(values.dtype),
)
def test_arrays_are_sent_and_received_unchanged(kind: str, values: Any) -> None:
    names = {"bool": "BOOL", "bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "float64": "FP64"}
    datatype = names.get(values.dtype.name) or {"i": "INT8", "u": "UINT16", "U": "BYTES"}[values.dtype.kind]
    with serving({"m": echo(datatype)}) as running, BOTH[kind](f"http://127.0.0.1:{running.port}") as client:
        answer = client.infer("m", {"x": values}, id="seven")
    got = answer["y"]
    expected = np.char.encode(values, "utf-8") if datatype == "BYTES" else values
    assert answer.id == "seven"
    assert got.shape == expected.shape
    assert (got == expected).all()


@pytest.mark.parametrize("kind", BOTH)
def test_outputs_are_chosen_and_parameters_are_sent(kind: str) -> None:
    with serving({"m": doubler()}) as running, BOTH[kind](f"http://127.0.0.1:{running.port}") as client:
        assert client.infer("m", {"x": ROW}, outputs=["y"]).outputs.keys() == {"y"}
        ranked = client.infer("m", {"x": np.arange(4, dtype=np.float32)[None]}, outputs={"y": {"classification": 1}})
        assert ranked["y"].ravel().tolist() == [b"6.000000:3"]
        assert client.infer("m", {"x": ROW}, parameters={"priority": 1}, timeout=30).version == 1
        with pytest.raises(ApiError, match="'z'"):
            client.infer("m", {"x": ROW}, outputs=["z"])
        with pytest.raises(KeyError, match="only y"):
            client.infer("m", {"x": ROW})["z"]


@pytest.mark.parametrize(
    ("inputs", "options", "sentence"),
    [
        (ROW, {}, "inputs: expected a mapping of input names to arrays, got ndarray"),
        ({"x": np.ones(2, np.complex64)}, {}, "input 'x': dtype complex64 has no datatype"),
        ({"x": ROW}, {"outputs": "y"}, "outputs: expected a list of names, got the text 'y'"),
        ({"x": ROW}, {"parameters": {"a": object()}}, "parameters: "),
    ],
)
@pytest.mark.parametrize("kind", BOTH)
def test_invalid_inputs_are_refused_without_a_request(kind: str, inputs: Any, options: Any, sentence: str) -> None:
    with BOTH[kind]("http://127.0.0.1:1") as client, pytest.raises(ClientError, match=sentence):
        client.infer("m", inputs, **options)


@pytest.mark.parametrize("kind", BOTH)
def test_the_key_comes_from_the_environment(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, shown = make_key("all", Scope, ["*"], int(time.time()), None)
    write_keys(tmp_path / "keys.json", [key])
    with service(tmp_path / "repo", keys_file=tmp_path / "keys.json") as running:
        monkeypatch.setenv("LATHE_URL", running.url)
        with BOTH[kind]() as client, pytest.raises(ApiError) as refused:
            client.models()
        assert refused.value.status == 401
        monkeypatch.setenv("LATHE_KEY", shown)
        with BOTH[kind]() as client:
            assert client.models() == []
        with BOTH[kind](api_key="") as client, pytest.raises(ApiError):
            client.models()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("key", ["", "ключ", "a b", "a\n", "k" * 256, "\udcff"])
def test_keys_that_a_header_cannot_have_are_refused_without_a_request(kind: str, key: str) -> None:
    with BOTH[kind]("http://127.0.0.1:1") as client:
        for change in (lambda: client.delete("m", 1, key=key), lambda: client.upload("m", b"", key=key)):
            with pytest.raises(ClientError, match=r"^key: expected 1 to 255 visible ASCII characters, got '"):
                change()
        with pytest.raises(ClientError, match="expected text in UTF-8"):
            client.model("m\udcff")
    if key and len(key) < 256:
        with pytest.raises(
            ClientError, match=r"^api_key: expected visible ASCII characters without blanks, got others$"
        ):
            BOTH[kind]("http://127.0.0.1:1", api_key=key)


@pytest.mark.parametrize("body", [{"error": {"message": "no"}}, {"error": None}, {"error": ["no"]}, ["no"], "no", None])
@pytest.mark.parametrize("status", [401, 404, 500])
def test_an_error_of_another_kind_of_server_is_an_api_error(status: int, body: Any) -> None:
    answer = httpx.MockTransport(lambda request: httpx.Response(status, json=body))
    with Client("http://127.0.0.1:1", transport=answer) as client, pytest.raises(ApiError) as refused:
        client.models()
    assert (refused.value.status, refused.value.code) == (status, "")
    assert str(refused.value) == f"GET /api/v1/models: HTTP {status}"


def test_every_route_has_an_operation() -> None:
    """Every management route except event streams, which are no single answer; and every operation has a route."""
    names = ("model", "version", "alias", "job")
    given: dict[str, Any] = {name: f"{{{name}}}" for name in names}
    given |= {"name": "{dataset}", "content": b"", "recipe": {}, "method": {}, "dataset": "", "inputs": {}}
    asked = set()
    for made in operations():
        with_version = [True, False] if inspect.signature(made).parameters.get("version") else [False]
        for named in with_version:
            wanted = inspect.signature(made).parameters.items()
            arguments = {
                name: given[name]
                for name, parameter in wanted
                if name in given and (parameter.default is parameter.empty or (named and name == "version"))
            }
            call = made(None, **arguments)
            asked.add((call.method, unquote(call.path)))
    asked.remove(("PUT", "/api/v1/models/{model}/aliases/live"))
    assert asked <= ROUTES.keys()
    managing = {(method, route) for method, route in ROUTES if route.startswith("/api/v1") and "/events" not in route}
    assert managing <= asked


def operations() -> list[Callable[..., Call[Any]]]:
    """The functions that make calls."""
    classes = [vars(base).values() for base in Client.__mro__]
    return [value.make for values in classes for value in values if isinstance(value, operation)]


def test_both_clients_have_the_same_operations_with_the_same_signatures() -> None:
    with Client("http://127.0.0.1:1") as blocking:
        waiting = AsyncClient("http://127.0.0.1:1")
        names = [made.__name__ for made in operations()]
        assert len(names) > 30
        for name in names:
            one, other = getattr(blocking, name), getattr(waiting, name)
            assert inspect.signature(one) == inspect.signature(other)
            assert (one.__name__, one.__doc__) == (name, getattr(Client, name).__doc__)
            assert inspect.iscoroutinefunction(other) and not inspect.iscoroutinefunction(one)
            assert next(iter(inspect.signature(getattr(Client, name)).parameters)) == "self"
        with pytest.raises(ClientError):
            Client.model(blocking, "m")
        assert str(inspect.signature(blocking.model)) == "(model: 'str') -> 'ModelState'"
    assert repr(waiting) == "AsyncClient('http://127.0.0.1:1')"
    assert (
        inspect.signature(Client.__init__).parameters.keys()
        == inspect.signature(AsyncClient.__init__).parameters.keys()
    )


@pytest.mark.parametrize(("called", "body"), [("start_canary", CanaryAsked), ("submit_job", JobAsked)])
def test_the_help_of_an_operation_names_the_fields_that_it_passes_on(called: str, body: type[BaseModel]) -> None:
    text = getattr(Client, called).__doc__
    parameters = inspect.signature(getattr(Client, called)).parameters
    assert [name for name in body.model_fields if name not in parameters and f"`{name}" not in text] == []


def test_the_help_explains_idempotency_keys_and_leads_to_the_client() -> None:
    assert "`key` of an operation is its idempotency key" in (Client.__doc__ or "")
    assert "help(lathe.client.Client)" in (lathe.client.__doc__ or "")


@pytest.mark.parametrize("kind", BOTH)
def test_a_key_of_a_certificate_without_the_certificate_is_refused(kind: str) -> None:
    with pytest.raises(ClientError, match=r"^cert_key: expected cert with it$"):
        BOTH[kind]("https://127.0.0.1:1", cert_key="client.key")
