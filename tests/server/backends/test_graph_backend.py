"""Lathe's own engine as a backend of the server: compiled models give the results of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import lathe
from lathe.core.compiler.child_stages import main as child
from lathe.server.backends.graph import GraphBackend, GraphModel
from lathe.server.errors import BadRequest, Unprocessable
from tests.core import small_models
from tests.server.fakes import FakeModel
from tests.server.running import infer_request, rows, serving, tensor_of


def dense(inner: str | int = 4, softmax_axis: int = 1) -> bytes:
    """y = softmax(x @ w + b): independent rows, unless the softmax is over the batch."""
    generator = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(generator.standard_normal((4, 3)).astype(np.float32), "w"),
        numpy_helper.from_array(generator.standard_normal(3).astype(np.float32), "b"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["z"]),
        helper.make_node("Softmax", ["z"], ["y"], axis=softmax_axis),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", inner])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])
    graph = helper.make_graph(nodes, "dense", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def recurrent() -> bytes:
    """y = the states of a GRU over x [steps, 1 sequence, 4]: the leading dimension is time, not a batch."""
    generator = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(generator.standard_normal(shape).astype(np.float32), name)
        for name, shape in (("w", (1, 9, 4)), ("r", (1, 9, 3)))
    ]
    nodes = [
        helper.make_node("GRU", ["x", "w", "r"], ["all"], hidden_size=3),
        helper.make_node("Squeeze", ["all", "axes"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["steps", 1, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["steps", 3])
    axes = numpy_helper.from_array(np.array([1, 2]), "axes")
    graph = helper.make_graph(nodes, "recurrent", [x], [y], [*weights, axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def load(model: bytes, folder: Path) -> GraphModel:
    (folder / "model.onnx").write_bytes(model)
    assert child(["parse", str(folder / "model.onnx"), str(folder / "ir")]) == 0
    assert child(["compile", str(folder / "ir"), str(folder / "artifact"), "--threads", "1", "--max-batch", "8"]) == 0
    return GraphBackend().load(folder / "artifact", 1)


def test_the_remains_of_an_interrupted_compilation_are_removed(tmp_path: Path) -> None:
    """A child process that gets too little processor time is restarted in the same folder."""
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / ".model.lathe.0123456789abcdef").write_bytes(b"half of it")
    load(dense(), tmp_path).close()
    assert [path.name for path in (tmp_path / "artifact").iterdir()] == ["model.lathe"]


def test_a_compiled_model_describes_its_inputs_and_answers(tmp_path: Path) -> None:
    model = load(dense(), tmp_path)
    try:
        assert [spec.describe() for spec in model.inputs] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
        assert (model.batchable, model.max_batch) == (True, 8)
        assert model.memory_bytes > 0
        oracle = onnxruntime.InferenceSession(dense())
        for count in (1, 3, 8):
            x = np.random.default_rng(count).standard_normal((count, 4)).astype(np.float32)
            np.testing.assert_allclose(model.execute({"x": x})["y"], oracle.run(None, {"x": x})[0], atol=1e-6)
        with pytest.raises(BadRequest):
            model.execute({"x": np.zeros((1, 5), np.float32)})
    finally:
        model.close()


def test_data_that_the_model_cannot_process_are_the_clients_error(tmp_path: Path) -> None:
    """An axis and sizes that are known only when the model runs: status 400, and the next request is answered."""
    signature = "float[n,c] x, float[k,d] w, int64 axis => float[n,d] y"
    model = load(small_models.model(signature, "z = CumSum(x, axis) y = MatMul(z, w)"), tmp_path)
    ones = np.ones((2, 3), np.float32)
    with serving({"m": _with_recording(model)}) as running:
        for axis, width, status, said in (
            (5, 3, 400, "axis out of range"),
            (1, 4, 400, "extents 3 and 4"),
            (1, 3, 200, ""),
        ):
            w = np.ones((width, 2), np.float32)
            inputs = [tensor_json("x", "FP32", ones), tensor_json("w", "FP32", w)]
            inputs.append({"name": "axis", "datatype": "INT64", "shape": [], "data": [axis]})
            answer = running.infer("m", {"inputs": inputs})
            assert answer.status == status, answer.body
            assert said in answer.body.decode()


def tensor_json(name: str, datatype: str, array: NDArray[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}


def test_binary_inputs_may_be_unaligned(tmp_path: Path) -> None:
    model = load(dense(), tmp_path)
    x = rows(2)
    try:
        for offset in range(5):
            view = np.ndarray((2, 4), np.float32, b"-" * offset + x.tobytes(), offset)
            np.testing.assert_array_equal(model.execute({"x": view})["y"], model.execute({"x": x})["y"])
    finally:
        model.close()


def test_served_over_http_batches_equal_solo_runs(tmp_path: Path) -> None:
    """Rows answered out of a shared batch equal those of a run alone."""
    model = load(dense(), tmp_path)
    inputs = [rows(1, start=index / 10) for index in range(20)]
    alone = [model.execute({"x": x})["y"] for x in inputs]
    with serving({"dense": _with_recording(model)}) as running, running.connect() as raw:
        raw.send(b"".join(infer_request("dense", x) for x in inputs))
        for expected in alone:
            np.testing.assert_allclose(tensor_of(raw.answer()), expected, atol=1e-5)


def test_a_softmax_over_the_batch_is_never_batched(tmp_path: Path) -> None:
    model = load(dense(softmax_axis=0), tmp_path)
    assert not model.batchable
    recorded = _with_recording(model)
    with serving({"mixer": recorded}) as running, running.connect() as raw:
        raw.send(infer_request("mixer", rows(2)) * 10)
        for _ in range(10):
            np.testing.assert_allclose(tensor_of(raw.answer()).sum(axis=0), 1, rtol=1e-5)
    assert recorded.batches == [2] * 10


def test_a_sequence_first_recurrent_net_is_never_batched(tmp_path: Path) -> None:
    model = load(recurrent(), tmp_path)
    assert not model.batchable and "GRU" in model.batch_reason
    recorded = _with_recording(model)
    x = np.random.default_rng(1).standard_normal((3, 1, 4)).astype(np.float32)
    expected = onnxruntime.InferenceSession(recurrent()).run(None, {"x": x})[0]
    with serving({"recurrent": recorded}) as running, running.connect() as raw:
        raw.send(infer_request("recurrent", x) * 10)
        for _ in range(10):
            np.testing.assert_allclose(tensor_of(raw.answer()), expected, atol=1e-6)
    assert recorded.batches == [3] * 10


def test_a_damaged_artifact_is_refused(tmp_path: Path) -> None:
    load(dense(), tmp_path).close()
    for file in (tmp_path / "artifact").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
        break
    with pytest.raises(Unprocessable, match="cannot be loaded"):
        GraphBackend().load(tmp_path / "artifact", 1)
    with pytest.raises(Unprocessable):
        GraphBackend().load(tmp_path / "nowhere", 1)
    assert lathe.errors.ArtifactError


def _with_recording(model: GraphModel) -> FakeModel:
    """Wraps the compiled model and records its executions."""
    return FakeModel(model.execute, model.inputs, model.outputs, batchable=model.batchable, max_batch=model.max_batch)
