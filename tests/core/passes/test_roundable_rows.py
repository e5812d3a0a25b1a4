"""Rows that products with weights of few bits may round to int8: who permits it, and ONNX Runtime's errors beside."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import lathe
from lathe.core.codegen.target import host
from lathe.core.errors import ModelError
from lathe.core.ir.graph import Array
from tests.core.frontends.test_contrib import contributed
from tests.core.passes.test_weight_only import K, N, model, weights

pytestmark = pytest.mark.skipif(not host().has_small_byte_dot, reason="this CPU has no product of bytes")
ROUNDED = "A of 8 bits"


def nbits(level: int, bits: int = 4, zero: bool = True, block: int = 32) -> bytes:
    random = np.random.default_rng(bits)
    blocks, size = K // block, block * bits // 8
    given = [
        numpy_helper.from_array(random.integers(0, 256, (N, blocks, size)).astype(np.uint8), "q"),
        numpy_helper.from_array(random.uniform(0.01, 0.1, N * blocks).astype(np.float32), "s"),
    ]
    names = ["x", "q", "s"]
    if zero:
        points = random.integers(0, 256, N * -(-blocks * bits // 8)).astype(np.uint8)
        given.append(numpy_helper.from_array(points, "z"))
        names.append("z")
    attrs = {"K": K, "N": N, "bits": bits, "block_size": block, "accuracy_level": level}
    return model(given, [contributed("MatMulNBits", names, ["y"], **attrs)], ["n", K])


def error(got: Array, exact: Array) -> float:
    """The root mean square of the error, by that of the exact result."""
    return float(np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("bits", "block"), [(4, 16), (4, 32), (4, 64), (4, 128), (8, 32)])
@pytest.mark.parametrize("zero", [False, True])
def test_accuracy_level_4_is_as_close_to_float32_as_in_onnx_runtime(bits: int, block: int, zero: bool) -> None:
    data = nbits(4, bits, zero, block)
    theirs = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((9, K)).astype(np.float32)
    with lathe.compile(data, threads=1, tune="off") as session:
        assert ROUNDED in session.explain()
        got = session.run({"x": x})["y"]
    with lathe.compile(nbits(1, bits, zero, block), threads=1, tune="off") as session:
        assert ROUNDED not in session.explain()
        exact = session.run({"x": x})["y"].astype(np.float64)
    peer = error(theirs.run(None, {"x": x})[0], exact)
    assert 1e-4 < error(got, exact) < max(1.2 * peer, 0.008)  # if ONNX Runtime does not round: about half a unit in 127


def test_the_precision_permits_it_everywhere() -> None:
    given, nodes = weights("uint4", "block 32", False, True)
    nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"]))
    data = model(given, nodes, ["n", K])
    x = np.random.default_rng(0).standard_normal((5, K)).astype(np.float32)
    with lathe.compile(data, threads=1, tune="off") as session:
        assert ROUNDED not in session.explain()
        exact = session.run({"x": x})["y"].astype(np.float64)
    with lathe.compile(data, precision="int8-activations", threads=1, tune="off") as session:
        assert ROUNDED in session.explain()
        assert 1e-4 < error(session.run({"x": x})["y"], exact) < 0.01


def test_the_reference_of_an_optimized_graph_rounds_like_the_kernel() -> None:
    from lathe.core.passes.pipeline import Options, optimize

    given, nodes = weights("int8", "block 128", False, True)
    nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"]))
    data = model(given, nodes, ["n", K])
    graph, _ = optimize(lathe.load(data), Options(int8_rows=True))
    x = np.random.default_rng(0).standard_normal((5, K)).astype(np.float32)
    expected = lathe.interpret(graph, {"x": x})["y"]
    with lathe.compile(data, precision="int8-activations", threads=1, tune="off") as session:
        got = session.run({"x": x})["y"]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_the_permission_is_kept_in_a_file() -> None:
    graph = lathe.quantize_weights(_float_model(), bits=4, block=32, activations="int8")
    data = lathe.export(graph)
    onnx.checker.check_model(data)
    again = lathe.load(data)
    assert [node.op for node in again.nodes].count("RoundableRows") == 1
    x = np.random.default_rng(0).standard_normal((5, K)).astype(np.float32)
    with lathe.compile(data, threads=1, tune="off") as session:
        assert ROUNDED in session.explain()
        got = session.run({"x": x})["y"]
    exact = lathe.interpret(again, {"x": x})["y"].astype(np.float64)
    theirs = ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    assert error(got, exact) < 0.01 and error(theirs, exact) < 0.01


def test_weights_of_few_bits_leave_activations_alone_by_default() -> None:
    data = lathe.export(lathe.quantize_weights(_float_model(), bits=4, block=32))
    with lathe.compile(data, threads=1, tune="off") as session:
        assert ROUNDED not in session.explain()


def test_an_unknown_type_of_rows_is_refused() -> None:
    proto = onnx.load_from_string(lathe.export(lathe.quantize_weights(_float_model(), activations="int8")))
    marked: Any = next(node for node in proto.graph.node if node.metadata_props)
    marked.metadata_props[0].value = "int3"
    with pytest.raises(ModelError, match=r"metadata 'lathe.rows': expected int8, got 'int3'"):
        lathe.load(proto.SerializeToString())


def _float_model() -> bytes:
    matrix = np.random.default_rng(1).standard_normal((K, N)).astype(np.float32)
    return model([numpy_helper.from_array(matrix, "w")], [helper.make_node("MatMul", ["x", "w"], ["y"])], ["n", K])
