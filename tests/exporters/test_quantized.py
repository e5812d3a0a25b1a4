"""Models that ONNX Runtime's quantizer writes, in both its formats, against ONNX Runtime itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

import lathe
from loadtest.onnx_runtime_quantizer import calibration_reader
from tests.onnx_runtime import plain_session
from tests.random_numbers import RNG

BATCHES = np.random.default_rng(3).normal(0, 1, (3, 4, 3, 8, 8)).astype(np.float32)


def weight(*shape: int) -> Any:
    return (RNG.normal(0, 1, shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convolutions with a residual, pooling, and two products."""
    arrays = {"w": weight(8, 3, 3, 3), "v": weight(8, 8, 3, 3), "m": weight(8, 16), "k": weight(16, 5), "b": weight(16)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["c"], pads=[1] * 4),
        helper.make_node("Add", ["r", "c"], ["s"]),
        helper.make_node("MaxPool", ["s"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["p"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "m", "b"], ["h"]),
        helper.make_node("Sigmoid", ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "k"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    path = tmp_path_factory.mktemp("float") / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def check(path: Path, quantum: float) -> None:
    """Lathe and ONNX Runtime differ by at most `quantum` of the largest output; so do Lathe's two ways to run."""
    data, feeds = path.read_bytes(), {"x": BATCHES[0]}
    (theirs,) = plain_session(data).run(None, feeds)
    (interpreted,) = lathe.interpret(lathe.load(data), feeds).values()
    with lathe.compile(data, threads=1, tune="off") as session:
        (compiled,) = session.run(feeds).values()
    for ours in (interpreted, compiled):
        assert np.abs(ours - theirs).max() <= quantum * np.abs(theirs).max()


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", [QuantFormat.QDQ, QuantFormat.QOperator])
@pytest.mark.parametrize("activation", [QuantType.QUInt8, QuantType.QInt8])
@pytest.mark.parametrize("per_channel", [False, True])
def test_static_quantization(
    form: QuantFormat, activation: QuantType, per_channel: bool, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "quantized.onnx"
    reader = calibration_reader({"x": batch} for batch in BATCHES)
    quantize_static(
        model, path, reader, quant_format=form, activation_type=activation, weight_type=QuantType.QInt8,
        per_channel=per_channel,
    )  # fmt: skip
    operators = {node.op_type for node in onnx.load(path).graph.node}
    assert ("QLinearConv" in operators) == (form is QuantFormat.QOperator)
    check(path, 0.05)


@pytest.mark.parametrize("weights", [QuantType.QUInt8, QuantType.QInt8])
def test_dynamic_quantization(weights: QuantType, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "quantized.onnx"
    quantize_dynamic(model, path, weight_type=weights, op_types_to_quantize=["MatMul", "Gemm"])
    assert "DynamicQuantizeLinear" in {node.op_type for node in onnx.load(path).graph.node}
    check(path, 1e-4)
