"""Dynamic quantization: the operators and results of ONNX Runtime's `quantize_dynamic`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType
from onnxruntime.quantization import quantize_dynamic as theirs

import lathe
from lathe.core.compress.dynamic import DynamicQuantization, quantize_dynamic
from lathe.core.errors import UnsupportedError
from lathe.core.reference import interpret
from tests.core.compress.test_static import RESIDUAL, ort_run, run
from tests.core.small_models import model
from tests.random_numbers import RNG

F = np.float32
ALL = DynamicQuantization(least_elements=1)


def products(transposed: bool) -> bytes:
    """A MatMul with a bias, a ReLU and a Gemm."""
    proto = onnx.load_model_from_string(
        model(
            "float[n,s,48] x => float[m,24] y",
            "h = MatMul(x, w) i = Add(h, b) j = Relu(i) k = Reshape(j, shape)"
            f" y = Gemm<transB = {int(transposed)}>(k, v, c)",
            "int64[2] shape = {-1, 64}",
        )
    )
    shapes = {"w": (48, 64), "b": (64,), "v": (24, 64) if transposed else (64, 24), "c": (24,)}
    arrays = [onnx.numpy_helper.from_array(RNG.standard_normal(shape).astype(F), n) for n, shape in shapes.items()]
    proto.graph.initializer.extend(arrays)
    return bytes(proto.SerializeToString())


@pytest.mark.sample(3)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_the_results_are_those_of_onnx_runtimes_quantizer(per_channel: bool, transposed: bool, tmp_path: Path) -> None:
    """Of the same operators: ONNX Runtime writes a Gemm as a product and a sum, too."""
    data, x = products(transposed), RNG.standard_normal((5, 7, 48)).astype(F)
    (tmp_path / "exact.onnx").write_bytes(data)
    theirs(tmp_path / "exact.onnx", tmp_path / "dynamic.onnx", per_channel=per_channel, weight_type=QuantType.QInt8)
    other = onnx.load(tmp_path / "dynamic.onnx")
    small = lathe.export(quantize_dynamic(lathe.load(data), DynamicQuantization(per_channel, least_elements=1)))
    onnx.checker.check_model(onnx.load_model_from_string(small), full_check=True)
    mine = onnx.load_model_from_string(small)
    counts = [Counter(node.op_type for node in proto.graph.node) for proto in (mine, other)]
    assert all(count["DynamicQuantizeLinear"] == count["MatMulInteger"] == 2 for count in counts)
    expected, largest = ort_run(other.SerializeToString(), {"x": x}), np.abs(ort_run(data, {"x": x})).max()
    assert np.abs(ort_run(small, {"x": x}) - expected).max() < 1e-4 * largest
    assert np.abs(run(small, {"x": x}) - expected).max() < 1e-4 * largest
    assert np.abs(expected - ort_run(data, {"x": x})).max() < 0.03 * largest


@pytest.mark.sample(2)
@pytest.mark.parametrize("per_channel", [False, True])
def test_convolutions_multiply_bytes(per_channel: bool) -> None:
    """The graph, its references, the file in ONNX Runtime, and the file in Lathe agree."""
    rows = RNG.standard_normal((9, 3, 8, 8)).astype(F)
    graph = quantize_dynamic(lathe.load(RESIDUAL), DynamicQuantization(per_channel, least_elements=1))
    counts = Counter(node.op for node in graph.nodes)
    assert (counts["ConvInteger"], counts["MatMulInteger"], counts["DynamicQuantizeLinear"]) == (2, 2, 4)
    data, exact = lathe.export(graph), ort_run(RESIDUAL, {"x": rows})
    expected = ort_run(data, {"x": rows})
    (referred,) = interpret(graph, {"x": rows}).values()
    for got in (run(graph, {"x": rows}), run(data, {"x": rows}), referred):
        assert np.abs(got - expected).max() < 1e-4 * np.abs(exact).max()
    assert np.abs(expected - exact).max() < 0.05 * np.abs(exact).max()
    with lathe.compile(graph, tune="off", threads=1) as session:
        said = session.explain()
    assert "4 products of bytes" in said
    assert "0 on the reference" in said


@pytest.mark.parametrize("numbers", [[0, 0, 0], [1, 2, 4], [-1, -2, -4], [-1, 0, 3], [1e-30, -1e-30, 0]], ids=str)
def test_the_operator_covers_its_numbers_and_zero(numbers: list[float]) -> None:
    """Against ONNX's reference; of tiny numbers, the sum of the parts is what is compared."""
    x = np.array(numbers, F)
    data = model("float[3] x => uint8[3] y, float s, uint8 z", "y, s, z = DynamicQuantizeLinear(x)")
    y, scale, zero = onnx.reference.ReferenceEvaluator(onnx.load_model_from_string(data)).run(None, {"x": x})
    graph = quantize_dynamic(lathe.load(model("float[n,3] x => float[n,1] y", "y = MatMul(x, w)",
                                              "float[3,1] w = {1, 1, 1}")), ALL)  # fmt: skip
    graph.outputs = graph.nodes[0].outputs
    graph.remove_dead()
    found = list(interpret(graph, {"x": x[None]}).values())
    assert np.array_equal(found[0][0], y)
    assert found[1] == pytest.approx(scale, rel=1e-6)
    assert found[2] == zero


def test_small_products_and_skipped_nodes_stay_float32() -> None:
    graph = lathe.load(products(False))
    for place, node in enumerate(graph.nodes):
        node.name = f"node{place}"
    small = quantize_dynamic(graph, DynamicQuantization(least_elements=2000))
    assert Counter(node.op for node in small.nodes)["MatMulInteger"] == 1
    small = quantize_dynamic(graph, DynamicQuantization(skip=frozenset({"node0"})))
    assert Counter(node.op for node in small.nodes)["MatMulInteger"] == 1
    assert any(node.name == "node0" and node.op == "MatMul" for node in small.nodes)


def test_wrong_choices_are_refused() -> None:
    graph = lathe.load(products(False))
    with pytest.raises(UnsupportedError, match="rounding: expected one of nearest, stochastic, floor, ceil, got 'ada"):
        DynamicQuantization(rounding="adaround")
    with pytest.raises(UnsupportedError, match="skip: expected names of nodes, got none"):
        quantize_dynamic(graph, DynamicQuantization(skip=frozenset({"none"})))
    with pytest.raises(UnsupportedError, match="with constant weights of 9999 or more, got none"):
        quantize_dynamic(graph, DynamicQuantization(least_elements=9999))
