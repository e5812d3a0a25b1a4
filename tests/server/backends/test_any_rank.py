"""Models whose inputs or outputs have no declared rank, over HTTP and gRPC: they accept and describe any rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from numpy.typing import NDArray
from onnx import TensorProto, helper

from lathe.server.backends.graph import GraphModel
from lathe.server.batching.signature import Signature
from lathe.server.errors import BadRequest
from lathe.server.repository.builder import warm_up
from lathe.server.repository.manifest import FileEntry, Manifest
from lathe.server.repository.manifest import Signature as Kept
from lathe.server.types import TensorSpec
from tests.server.api.grpc.wire import grpc_serving, tensor
from tests.server.backends.test_graph_backend import load
from tests.server.fakes import FakeModel
from tests.server.running import Running

SHAPES = [(), (3,), (2, 3), (1, 2, 1, 2)]


def exponential() -> bytes:
    """y = tanh(x), both without a rank."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    return _model([helper.make_node("Tanh", ["x"], ["y"])], [x], [y])


def reshaped() -> bytes:
    """y = x in the shape of the feed: only the output has no rank."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, ["rank"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    return _model([helper.make_node("Reshape", ["x", "shape"], ["y"])], [x, shape], [y])


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> bytes:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())


@contextmanager
def served(model: bytes, folder: Path) -> Iterator[tuple[Running, str]]:
    compiled = load(model, folder)
    warm_up(compiled)
    with grpc_serving({"m": _fake(compiled)}) as (running, address):
        yield running, address


def _fake(model: GraphModel) -> FakeModel:
    return FakeModel(model.execute, model.inputs, model.outputs, batchable=model.batchable, max_batch=model.max_batch)


Ask = Callable[[dict[str, NDArray[Any]]], NDArray[Any]]


def over_http(running: Running) -> Ask:
    def ask(feeds: dict[str, NDArray[Any]]) -> NDArray[Any]:
        with triton_http.InferenceServerClient(running.address) as client:
            given = [triton_http.InferInput(name, list(a.shape), _kind(a)) for name, a in feeds.items()]
            for item, array in zip(given, feeds.values(), strict=True):
                item.set_data_from_numpy(array)
            return np.asarray(client.infer("m", given).as_numpy("y"))

    return ask


def over_grpc(address: str) -> Ask:
    def ask(feeds: dict[str, NDArray[Any]]) -> NDArray[Any]:
        with triton_grpc.InferenceServerClient(address) as client:
            given = [tensor(name, array, _kind(array)) for name, array in feeds.items()]
            return np.asarray(client.infer("m", given).as_numpy("y"))

    return ask


def _kind(array: NDArray[Any]) -> str:
    return {"f": "FP32", "i": "INT64"}[array.dtype.kind]


def test_an_input_without_a_rank_accepts_any_rank(tmp_path: Path) -> None:
    with served(exponential(), tmp_path) as (running, address):
        for ask in (over_http(running), over_grpc(address)):
            for shape in SHAPES:
                x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
                got = ask({"x": x})
                assert got.shape == shape
                np.testing.assert_allclose(got, np.tanh(x), 1e-5)
        wrong = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [1]}]}
        assert running.infer("m", wrong).status == 400
        raw = {"inference-header-content-length": "0"}
        assert running.ask("POST", "/v2/models/m/infer", b"0123", raw).status == 400


@pytest.mark.slow
def test_an_output_without_a_rank_may_have_any_rank(tmp_path: Path) -> None:
    with served(reshaped(), tmp_path) as (running, address):
        for ask in (over_http(running), over_grpc(address)):
            for shape in ((2, 4), (8,), (2, 2, 2), (1, 1, 2, 4)):
                x = np.arange(8, dtype=np.float32).reshape(2, 4)
                got = ask({"x": x, "shape": np.array(shape, np.int64)})
                assert got.shape == shape
                np.testing.assert_array_equal(got.ravel(), x.ravel())


def test_metadata_show_one_dynamic_dimension_and_the_configuration_explains(tmp_path: Path) -> None:
    with served(exponential(), tmp_path) as (running, address):
        described = running.ask("GET", "/v2/models/m").json
        assert [described[side][0]["shape"] for side in ("inputs", "outputs")] == [[-1], [-1]]
        config = running.ask("GET", "/v2/models/m/config").json
        assert config["input"][0]["dims"] == [-1]
        assert config["parameters"]["any_rank"] == {"string_value": "x, y"}
        with triton_grpc.InferenceServerClient(address) as client:
            assert list(client.get_model_metadata("m").inputs[0].shape) == [-1]
            assert client.get_model_config("m").config.parameters["any_rank"].string_value == "x, y"


def test_a_manifest_keeps_which_tensors_may_have_any_rank() -> None:
    """To callers, a vector is different from a tensor that may have any rank."""
    spec, vector = TensorSpec("x", "FP32", (-1,), any_rank=True), TensorSpec("x", "FP32", (-1,))
    for given in (spec, vector):
        manifest = Manifest({"model.onnx": FileEntry("0" * 64, 1)}, signature=Kept.of((given,), (given,)))
        assert Manifest.from_json(manifest.to_json()).signature == manifest.signature
    assert Kept.of((spec,), ()) != Kept.of((vector,), ())
    assert Kept.of((spec,), (vector,)).describe() == "x: FP32[*] -> x: FP32[-1]"


def test_work_is_counted_in_elements() -> None:
    signature = Signature([TensorSpec("x", "FP32", (-1,), any_rank=True)], [], batchable=False)
    assert [signature.group({"x": ("FP32", shape)}).work for shape in SHAPES] == [1, 3, 6, 4]
    with pytest.raises(BadRequest, match="datatype"):
        signature.group({"x": ("INT64", ())})
