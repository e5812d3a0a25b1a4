"""Inputs with default values: a request may override them, and then runs without other requests in its batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as triton
from onnx import helper
from tritonclient.utils import InferenceServerException

from lathe.core.compiler.child_stages import main as child
from lathe.server.backends.graph import GraphBackend, GraphModel
from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.signature import Signature
from lathe.server.errors import BadRequest
from lathe.server.repository.builder import warm_up
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.serving.servable import Servable, ServableFactory
from lathe.server.settings import Settings
from lathe.server.telemetry.statistics import StatsBook
from lathe.server.types import ModelRef, Tensors, TensorSpec
from tests.core.frontends.models import theirs
from tests.core.frontends.test_defaults import model as with_defaults
from tests.server.api.grpc.wire import grpc_serving
from tests.server.running import Running, serving


def scaled() -> onnx.ModelProto:
    """y = x * c + b; rows are independent."""
    nodes = [helper.make_node("Mul", ["x", "c"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])]
    return with_defaults(nodes, ["n", 3], {"c": np.float32([2]), "b": np.float32([1, 1, 1])})


X = np.arange(6, dtype=np.float32).reshape(2, 3)
C = np.float32([5])


class Gated(GraphModel):
    """A model with the `gate` that the test server expects."""

    gate = threading.Event()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled model and of the cache for further code."""
    folder = tmp_path_factory.mktemp("scaled")
    onnx.save(scaled(), folder / "model.onnx")
    assert child(["parse", str(folder / "model.onnx"), str(folder / "ir")]) == 0
    options = ["--threads", "1", "--max-batch", "8", "--cache", str(folder / "cache"), "--tune", "off"]
    assert child(["compile", str(folder / "ir"), str(folder / "artifact"), *options]) == 0
    return folder


@pytest.fixture
def model(folder: Path) -> Iterator[GraphModel]:
    loaded = GraphBackend(folder / "cache").load(folder / "artifact", 1)
    warm_up(loaded)
    yield loaded
    loaded.close()


def gated(folder: Path) -> dict[str, Any]:
    """The models for a server, which closes them."""
    return {"scaled": Gated(GraphBackend(folder / "cache").load(folder / "artifact", 1)._session)}


@pytest.fixture(scope="module", params=["direct", "asgi"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    with serving(gated(folder), request.param) as running:
        yield running


def tensor(name: str, array: np.ndarray[Any, Any], kind: str, binary: bool) -> triton.InferInput:
    return triton.InferInput(name, list(array.shape), kind).set_data_from_numpy(array, binary_data=binary)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_a_client_may_override_defaults(server: Running, binary: bool, reverse: bool) -> None:
    bias = np.float32([7, 8, 9])
    with triton.InferenceServerClient(server.address) as client:
        for fed in ({}, {"c": C}, {"c": C, "b": bias}, {"b": bias}, {}):
            inputs = [tensor(name, array, "FP32", binary) for name, array in {"x": X, **fed}.items()]
            got = client.infer("scaled", inputs[::-1] if reverse else inputs).as_numpy("y")
            np.testing.assert_allclose(got, theirs(scaled(), {"x": X, **fed})["y"], rtol=1e-6)


def test_a_client_may_override_defaults_over_grpc(folder: Path) -> None:
    with grpc_serving(gated(folder)) as (_, address), grpc.InferenceServerClient(address) as client:
        for fed in ({}, {"c": C}, {}):
            inputs = []
            for name, array in {"x": X, **fed}.items():
                inputs.append(grpc.InferInput(name, list(array.shape), "FP32"))
                inputs[-1].set_data_from_numpy(array)
            got = client.infer("scaled", inputs).as_numpy("y")
            np.testing.assert_allclose(got, theirs(scaled(), {"x": X, **fed})["y"], rtol=1e-6)
        config = client.get_model_config("scaled", as_json=True)["config"]
        assert config["parameters"]["optional_inputs"]["string_value"].startswith("c (FP32")


def test_values_that_do_not_fit_are_a_bad_request(server: Running) -> None:
    with triton.InferenceServerClient(server.address) as client:
        for array, kind, message in (
            (np.float64([5]), "FP64", "input 'c': expected datatype FP32, got FP64"),
            (np.float32([5, 6]), "FP32", r"input 'c': expected shape \[1\], got \[2\]"),
        ):
            with pytest.raises(InferenceServerException, match=message):
                client.infer("scaled", [tensor("x", X, "FP32", True), tensor("c", array, kind, True)])
        with pytest.raises(InferenceServerException, match=r"expected \['x'\], and if wanted b, c, got \['q', 'x'\]"):
            client.infer("scaled", [tensor("x", X, "FP32", True), tensor("q", C, "FP32", True)])
        with pytest.raises(InferenceServerException, match=r"expected \['x'\], and if wanted b, c, got \['c'\]"):
            client.infer("scaled", [tensor("c", C, "FP32", True)])


def test_metadata_list_required_inputs_and_the_configuration_the_others(server: Running) -> None:
    with triton.InferenceServerClient(server.address) as client:
        inputs = client.get_model_metadata("scaled")["inputs"]
        assert inputs == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
        parameters = client.get_model_config("scaled")["parameters"]
        assert parameters["optional_inputs"] == {"string_value": "c (FP32 [1]), b (FP32 [3])"}


async def submit(servable: Servable, inputs: Tensors) -> Outcome:
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    servable.submit(Entry(inputs, servable.signature.group_of(inputs), future.set_result))
    return await future


def test_requests_that_override_defaults_run_alone(model: GraphModel) -> None:
    plain: list[Tensors] = [{"x": X + i} for i in range(8)]
    fed: list[Tensors] = [{"x": X + i, "c": C + i} for i in range(3)]
    requests = [*plain[:3], fed[0], *plain[3:6], fed[1], fed[2], *plain[6:]]

    async def scenario() -> None:
        pool = WorkerPool(1)
        servable = ServableFactory(Settings(), pool, StatsBook()).make(ModelRef("m", 1), model)
        outcomes = await asyncio.gather(*(submit(servable, inputs) for inputs in requests))
        for inputs, outcome in zip(requests, outcomes, strict=True):
            assert isinstance(outcome, dict), outcome
            np.testing.assert_allclose(outcome["y"], theirs(scaled(), inputs)["y"], rtol=1e-6)
        assert len(fed) < servable.stats.execution_count < len(requests)
        await servable.batcher.drained()
        await asyncio.to_thread(pool.close)

    asyncio.run(scenario())


def test_overrides_never_run_on_the_event_loop(model: GraphModel) -> None:
    """A request with overrides may need a compilation; its time does not count for the cost of other requests."""
    threads: list[str] = []

    class Watched(GraphModel):
        def execute(self, inputs: Tensors) -> Tensors:
            threads.append(f"{sorted(inputs)} {threading.current_thread() is threading.main_thread()}")
            return super().execute(inputs)

    async def scenario() -> None:
        pool = WorkerPool(1)
        settings = Settings()
        servable = ServableFactory(settings, pool, StatsBook()).make(ModelRef("m", 1), Watched(model._session))
        for _ in range(100):
            await submit(servable, {"x": X})
        here = len(threads)
        assert threads[-1] == "['x'] True"
        for _ in range(3):
            await submit(servable, {"x": X, "c": C})
        assert set(threads[here:]) == {"['c', 'x'] False"}
        await servable.batcher.drained()
        await asyncio.to_thread(pool.close)

    asyncio.run(scenario())


def test_an_error_names_only_a_few_of_hundreds_of_inputs() -> None:
    weights = [TensorSpec(f"w{i:03}", "FP32", (1,)) for i in range(500)]
    signature = Signature([TensorSpec("x", "FP32", (-1, 3))], [], True, optional=weights)
    with pytest.raises(BadRequest, match="w019 and 480 more") as error:
        signature.group({"y": ("FP32", (1, 3))})
    assert len(str(error.value)) < 300
    alone = signature.group({"x": ("FP32", (4, 3)), "w007": ("FP32", (1,))})
    assert (alone.rows, alone.optional) == (0, True)
    assert signature.group({"x": ("FP32", (4, 3))}).rows == 4
