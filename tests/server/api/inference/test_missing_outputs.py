"""A model that leaves out an output it declares: each form of answer says so, and none is an unexpected error."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from lathe.server.errors import Internal
from lathe.server.settings import Settings
from lathe.server.types import InferRequest, TensorSpec
from tests.server.api.grpc.wire import refusal, stub
from tests.server.api.grpc.wire import request as message
from tests.server.fakes import FakeModel, application
from tests.server.running import Running, infer_request, json_request, request, rows, serving

SPEC = TensorSpec("x", "FP32", (-1, 4))
OUTPUTS = (TensorSpec("y", "FP32", (-1, 4)), TensorSpec("z", "FP32", (-1, 4)))
MISSING = "model m:1 gave no output 'z'"


@pytest.fixture(scope="module", params=["direct", "asgi"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    model = FakeModel(lambda tensors: {"y": tensors["x"] * 2}, [SPEC], OUTPUTS)
    with serving({"m": model}, request.param, grpc_port=0) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_error_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def asked(**outputs: Any) -> bytes:
    """A request in JSON for both outputs, with these parameters of each."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    document = {"inputs": [tensor], "outputs": [{"name": name, "parameters": outputs} for name in "yz"]}
    return request("POST", "/v2/models/m/infer", json.dumps(document).encode())


@pytest.mark.parametrize(
    "sent",
    [
        infer_request("m", rows(1)),
        json_request("m", rows(1)),
        infer_request("m", rows(40)),
        json_request("m", rows(40)),
        request("POST", "/v2/models/m/infer", rows(1).tobytes(), {"Inference-Header-Content-Length": "0"}),
        asked(classification=2),
        asked(binary_data=True),
    ],
    ids=["binary", "JSON", "binary in parts", "JSON in parts", "raw", "classification", "binary on request"],
)
def test_the_missing_output_is_named(server: Running, sent: bytes) -> None:
    for _ in range(4):  # the first request leaves a template, which the others follow
        answer = server.ask_raw(sent)
        assert (answer.status, answer.error) == (500, MISSING)


def test_the_missing_output_is_named_on_one_connection_and_to_several_callers(server: Running) -> None:
    with server.connect() as one, server.connect() as other:
        for _ in range(4):
            for raw in (one, other):
                raw.send(infer_request("m", rows(1)))
            for raw in (one, other):
                assert raw.answer().error == MISSING


def test_the_missing_output_is_named_over_grpc(server: Running) -> None:
    with stub(f"127.0.0.1:{server.server.config.app.state.grpc.port}") as service:  # type: ignore[union-attr]
        assert refusal(service.ModelInfer, message(rows(1), model="m")) == (grpc.StatusCode.INTERNAL, MISSING)
        (answer,) = service.ModelStreamInfer(iter([message(rows(1), model="m")]), timeout=10)
        assert answer.error_message == MISSING


def test_outputs_that_are_there_are_answered(server: Running) -> None:
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    answer = server.infer("m", {**document, "outputs": [{"name": "y"}]})
    assert answer.json["outputs"][0]["data"] == [2, 4, 6, 8]


def test_the_missing_output_is_named_within_the_process() -> None:
    async def scenario() -> None:
        model = FakeModel(lambda tensors: {"y": tensors["x"] * 2}, [SPEC], OUTPUTS)
        app, _, engine = application(Settings(), {"m": model})
        async with app.router.lifespan_context(app):
            with pytest.raises(Internal, match=MISSING):
                await engine.plane.infer(InferRequest("m", {"x": np.zeros((1, 4), np.float32)}))

    asyncio.run(scenario())
