"""Odd text and numbers in every place of every route and gRPC call: never an unexpected error, and none in the log."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import grpc
import httpx
import pytest
from google.protobuf.json_format import ParseDict, ParseError

from lathe.server.access.scopes import GRPC_METHODS, ROUTES
from lathe.server.api.grpc.messages import HEALTH, INFERENCE, message_class
from lathe.server.errors import Unprocessable
from tests.server.jobs.world import fake_jobs
from tests.server.repository.world import toy
from tests.server.route_parameters import PARAMETERS
from tests.server.running import Raw
from tests.server.service import Service, service

TEXTS = [
    "",
    " ",
    "²",  # a digit for `str.isdigit`, not for `int`
    "٣",  # a decimal digit for `int`, too
    "9" * 5000,  # more digits than `int` converts
    "-1",
    "+1",
    "1_0",
    "1.0",
    "01",
    "0",
    "nan",
    "a\0b",
    "\n",
    "..",
    "%",
    "m" * 300,
    "\udcff",  # no valid UTF-8: a lone byte in a path, a lone surrogate in JSON
]
NUMBERS = [-1, 0, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, 1.5, 1e308, True, None, [], {}]
INPUT = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4], "parameters": {"classification": 1}}
GATE = {
    "min": {"accuracy": 0.5},
    "max": {"loss": 1.0},
    "not_worse_than_live": {"metric": "accuracy", "by": 0.1},
    "refused": "discard",
}
JOB = {
    "kind": "train",
    "recipe": {"steps": 1},
    "dataset": "digits",
    "publish": {"model": "m", "alias": "blue", "promote": False, "gate": GATE},
    "priority": 0,
    "limits": {"seconds": 10.0, "memory": 1 << 30},
}
PARENT = {"kind": "finetune", "recipe": {"steps": 1}, "dataset": "digits", "model": {"name": "m", "version": "live"}}
INFERENCE_BODY = {
    "id": "a",
    "parameters": {"timeout": 0, "priority": 0, "sequence_id": 0, "binary_data_output": False},
    "inputs": [INPUT],
    "outputs": [{"name": "y", "parameters": {"classification": 1, "binary_data": False}}],
}
MESSAGE = {
    "modelName": "m",
    "modelVersion": "1",
    "id": "a",
    "parameters": {"timeout": {"int64Param": 0}, "priority": {"uint64Param": 0}},
    "inputs": [
        {
            "name": "x", "datatype": "FP32", "shape": [1, 4], "contents": {"fp32Contents": [1, 2, 3, 4]},
            "parameters": {"a": {"stringParam": "b"}},
        }
    ],
    "outputs": [{"name": "y", "parameters": {"classification": {"int64Param": 1}}}],
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/infer": INFERENCE_BODY,
    "/aliases/{alias}": {"version": 1, "allow_signature_change": False},
    "/rollback": {"alias": "live", "to": 1},
    "/canary": {
        "version": 2, "shadow": 0.1, "rtol": 1e-3, "atol": 1e-5, "tolerated": 0.01, "promote": True,
        "steps": [{"weight": 0.1, "seconds": 1, "requests": 0}], "start_at": "2099-01-01T00:00:00Z",
    },
    "/api/v1/jobs": JOB,
    "/register": {"key": "/none", "offset": 0, "byte_size": 4},
    "/v2/logging": {"log_info": True, "log_verbose_level": 0, "log_format": "default", "log_file": ""},
    "/trace/setting": {"trace_level": ["OFF"], "trace_rate": "1000", "trace_file": ""},
    "/load": {"parameters": {"config": "{}"}},
    "/unload": {"parameters": {"unload_dependents": False}},
    "/index": {"ready": True},
}  # fmt: skip
HEADERS = [
    "accept-encoding", "authorization", "content-digest", "content-encoding", "content-length", "content-type",
    "idempotency-key", "inference-header-content-length", "last-event-id", "lathe-sticky-key", "origin", "range",
    "traceparent", "x-request-id",
]  # fmt: skip
METHODS = {
    method.name: method
    for file in (INFERENCE, HEALTH)
    for service_described in file.services_by_name.values()
    for method in service_described.methods
}
MESSAGES: dict[str, dict[str, Any]] = {  # as protobuf's JSON; without one, all texts of a message are "m"
    "ModelInfer": MESSAGE,
    "ModelStreamInfer": MESSAGE,
    "ModelReady": {"name": "m", "version": "1"},
    "ModelMetadata": {"name": "m", "version": "1"},
    "ModelConfig": {"name": "m", "version": "1"},
    "ModelStatistics": {"name": "m", "version": "1"},
    "RepositoryIndex": {"repositoryName": "", "ready": True},
    "RepositoryModelLoad": {"modelName": "m", "parameters": {"a": {"stringParam": "b"}}},
    "RepositoryModelUnload": {"modelName": "m", "parameters": {"unload_dependents": {"boolParam": False}}},
    "SystemSharedMemoryRegister": {"name": "r", "key": "/none", "offset": 0, "byteSize": 4},
    "TraceSetting": {"modelName": "m", "settings": {"trace_level": {"value": ["OFF"]}}},
    "LogSettings": {"settings": {"log_info": {"boolParam": True}, "log_file": {"stringParam": ""}}},
    "Check": {"service": ""},
}


class NoData:
    """Checks uploaded data without a child process; no data is valid."""

    async def run(self, task: str, *arguments: str | Path) -> bytes:
        raise Unprocessable("the file is of no known kind")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("odd") / "repo"
    serving = service(root, check=NoData(), make_jobs=fake_jobs, grpc_port=0, shared_memory=True)
    with serving as running, running.client() as client:
        for scale in (1.0, 2.0):
            client.upload("m", toy(scale))
        yield running


@pytest.fixture(scope="module")
def client(served: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=30, verify=False) as found:
        yield found


@pytest.fixture(scope="module")
def description(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


@pytest.fixture(autouse=True)
def _no_error_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def escaped(text: str) -> str:
    """Percent-encoded, with the dots of "..", which clients would resolve."""
    return quote(text, safe="", errors="surrogateescape").replace("..", "%2E%2E")


def odd_paths(template: str) -> Iterator[str]:
    names = [part[1:-1] for part in template.split("/") if part.startswith("{")]
    for odd in names:
        for text in TEXTS:
            values = {**PARAMETERS, odd: text}
            yield template.format(**{n: escaped(values[n]) for n in names})


def places(document: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The keys and indices that lead to each value of a document."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))


def variants(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The document with one odd value, or with one odd key."""
    for at in places(document):
        for value in [*TEXTS, *NUMBERS]:
            changed, place = with_place(document, at)
            place[at[-1]] = value
            yield changed
        for text in TEXTS if isinstance(at[-1], str) else ():
            changed, place = with_place(document, at)
            place[text] = place.pop(at[-1])
            yield changed


def with_place(document: dict[str, Any], at: tuple[str | int, ...]) -> tuple[dict[str, Any], Any]:
    """A copy of the document, and the object or list in it that holds the value at this place."""
    changed = place = copy.deepcopy(document)
    for key in at[:-1]:
        place = place[key]  # type: ignore[index]
    return changed, place


def body_of(template: str) -> dict[str, Any] | None:
    return next((body for end, body in BODIES.items() if template.endswith(end)), None)


def send(client: httpx.Client, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
    """Send a request, JSON with escapes for what is not ASCII, and undo changes that later requests would notice."""
    if body is not None:
        more = {"content": json.dumps(body), "headers": {"content-type": "application/json"}, **more}
    answer = client.request(method, path, **more)
    if answer.is_success and path.endswith("/canary"):
        client.delete("/api/v1/models/m/canary")
    if answer.status_code == 202 and path == "/api/v1/jobs":
        client.post(f"{answer.headers['location']}/cancel")
    if answer.is_success and path.endswith("load"):
        client.post("/v2/repository/models/m/load")
    return answer


def test_the_bodies_are_accepted_without_odd_values(client: httpx.Client) -> None:
    """Otherwise the odd values would not be reached."""
    refused = {"/register": 400, "/load": 501}
    for method, template in ROUTES:
        if method in ("POST", "PUT") and (body := body_of(template)) is not None and "/cuda" not in template:
            end = next(end for end in BODIES if template.endswith(end))
            answer = send(client, method, template.format(**PARAMETERS), body)
            assert answer.is_success or answer.status_code == refused.get(end), (template, answer.text)


@pytest.mark.parametrize(("method", "template"), ROUTES, ids=lambda value: value)
@pytest.mark.sample(4)
def test_no_value_in_a_request_is_an_unexpected_error(
    client: httpx.Client, description: dict[str, Any], method: str, template: str
) -> None:
    for path in odd_paths(template):
        answer = send(client, method, path)
        assert answer.status_code != 500, (method, path[:200])
        if template.startswith("/v2/models/{model}/versions/") and path.startswith("/v2/models/m/versions/"):
            assert answer.status_code in (400, 404), (method, path[:200])  # no odd text is a version of the model
    path, body = template.format(**PARAMETERS), body_of(template) if method in ("POST", "PUT") else None
    more = variants(PARENT) if template == "/api/v1/jobs" and body else ()
    for odd in (*variants(body), *more) if body else ():
        assert send(client, method, path, odd).status_code != 500, (method, path, odd)
    described = description["paths"][template][method.lower()].get("parameters", ())
    for name in [each["name"] for each in described if each["in"] == "query"]:
        for text in TEXTS:
            odd = f"{path}?{name}={escaped(text)}"
            answer = send(client, method, odd, body)
            assert answer.status_code != 500, (method, odd[:200])


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", HEADERS)
def test_no_value_of_a_header_is_an_unexpected_error(served: Service, name: str) -> None:
    """Sent by hand: clients do not send some of them. The bytes are those of Latin-1."""
    port = urlsplit(served.url).port
    assert port is not None
    for method, template in ROUTES:
        for text in ("", "²", "-1", "nan", "9" * 5000, "m" * 300, "a\1b", "\udcff"):
            value = text.encode("utf-8", "surrogateescape")
            path = template.format(**PARAMETERS)
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{name}: "
            with Raw(port) as raw:
                raw.send(head.encode() + value + b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
                status = raw.answer().status
                assert status != 500, (method, template, name, text[:40])


def call(channel: grpc.Channel, name: str, message: bytes) -> grpc.StatusCode:
    """Call a method with serialized bytes; the status, of a stream that of its first answer's end."""
    path = f"/{METHODS[name].containing_service.full_name}/{name}"
    try:
        if name == "ModelStreamInfer":
            for answer in channel.stream_stream(path)(iter([message]), timeout=30):
                assert b"internal error" not in answer
        else:
            channel.unary_unary(path)(message, timeout=30)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("name", [name for name in GRPC_METHODS if name != "Watch"])
def test_no_value_in_a_message_is_an_unexpected_error(served: Service, name: str) -> None:
    described = METHODS[name].input_type
    document = MESSAGES.get(name, {field.name: "m" for field in described.fields if field.type == field.TYPE_STRING})
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        for odd in [document, *variants(document)]:
            try:
                json.dumps(odd, ensure_ascii=False).encode()  # protobuf crashes on some texts that are no UTF-8
                message = ParseDict(odd, message_class(described)()).SerializeToString()
            except (ParseError, UnicodeEncodeError, OverflowError):
                continue  # no such message can be sent
            assert call(channel, name, message) is not grpc.StatusCode.INTERNAL, odd
            if b"m" in message:  # a text of the same length that is no UTF-8
                call(channel, name, message.replace(b"m", b"\xff"))
            if name == "RepositoryModelUnload":
                call(channel, "RepositoryModelLoad", b"\x12\1m")  # field 2, the model's name
