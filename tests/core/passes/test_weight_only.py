"""Large weights stay quantized in memory, in every form of ONNX. The oracle is ONNX Runtime without optimizations."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import lathe
from tests.core.frontends.test_contrib import contributed

K, N = 256, 272
_TYPES = {
    "int4": (TensorProto.INT4, -8, 8), "uint4": (TensorProto.UINT4, 0, 16),
    "int8": (TensorProto.INT8, -128, 128), "uint8": (TensorProto.UINT8, 0, 256),
}  # fmt: skip


def weights(dtype: str, scales: str, transposed: bool, zero: bool, depth: int = K) -> tuple[list[Any], list[Any]]:
    """Initializers, and a DequantizeLinear whose output is w: [K, N], or [N, K]. `scales`: block N, channel, tensor."""
    random = np.random.default_rng(1)
    code, low, high = _TYPES[dtype]
    shape = (N, depth) if transposed else (depth, N)
    attrs: dict[str, int] = {}
    spread: tuple[int, ...] = ()
    if scales.startswith("block"):
        block = int(scales.removeprefix("block "))
        blocks = -(-depth // block)
        spread, attrs = (N, blocks) if transposed else (blocks, N), {"axis": int(transposed), "block_size": block}
    elif scales == "channel":
        spread, attrs = (N,), {"axis": 0 if transposed else 1}
    given = [
        helper.make_tensor("q", code, shape, random.integers(low, high, shape).ravel().tolist()),
        numpy_helper.from_array(random.uniform(0.01, 0.1, spread).astype(np.float32).reshape(spread), "s"),
    ]
    names = ["q", "s"]
    if zero:
        points = np.atleast_1d(random.integers(low, high, spread)).ravel().tolist()
        given.append(helper.make_tensor("z", code, spread, points))
        names.append("z")
    return given, [helper.make_node("DequantizeLinear", names, ["w"], **attrs)]


def model(initializers: list[Any], nodes: list[Any], dims: list[Any]) -> bytes:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializers,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def agrees(data: bytes, *shapes: tuple[int, ...], tolerance: float = 1e-4) -> None:
    options = ort.SessionOptions()  # its fused products would round A to 8 bits
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    theirs = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    with lathe.compile(data, threads=1, tune="off") as session:
        assert "weight_only: 1 rewrites" in session.explain()
        for shape in shapes:
            x = np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)
            expected, got = theirs.run(None, {"x": x})[0], session.run({"x": x})["y"]
            np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.sample(12)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("scales", ["block 32", "block 128", "channel", "tensor"])
@pytest.mark.parametrize("dtype", _TYPES)
@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_a_product_reads_codes(op: str, dtype: str, scales: str, zero: bool, transposed: bool) -> None:
    given, nodes = weights(dtype, scales, transposed, zero)
    if op == "Gemm":
        given.append(numpy_helper.from_array(np.linspace(-1, 1, N, dtype=np.float32), "b"))
        nodes.append(helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=int(transposed)))
        shapes: list[tuple[int, ...]] = [(1, K), (5, K)]
    else:
        if transposed:
            nodes.append(helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]))
        nodes.append(helper.make_node("MatMul", ["x", "t" if transposed else "w"], ["y"]))
        shapes = [(1, 3, K), (5, 3, K)]
    agrees(model(given, nodes, ["n", *shapes[0][1:]]), *shapes)


def test_a_depth_that_is_no_multiple_of_the_block() -> None:
    given, nodes = weights("uint4", "block 32", False, True, depth=250)
    nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"]))
    agrees(model(given, nodes, ["n", 250]), (1, 250), (4, 250))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [False, True])
def test_matmul_nbits_of_onnx_runtime(bits: int, zero: bool) -> None:
    random = np.random.default_rng(bits)
    blocks, size = K // 32, 32 * bits // 8
    given = [
        numpy_helper.from_array(random.integers(0, 256, (N, blocks, size)).astype(np.uint8), "q"),
        numpy_helper.from_array(random.uniform(0.01, 0.1, N * blocks).astype(np.float32), "s"),
    ]
    names = ["x", "q", "s"]
    if zero:
        points = random.integers(0, 256, N * blocks * bits // 8).astype(np.uint8)
        given.append(numpy_helper.from_array(points, "z"))
        names.append("z")
    node = contributed("MatMulNBits", names, ["y"], K=K, N=N, bits=bits, block_size=32)
    agrees(model(given, [node], ["n", K]), (1, K), (7, K))


def test_small_weights_and_quantized_rows_stay_as_they_are() -> None:
    random = np.random.default_rng(0)
    small = numpy_helper.from_array(random.integers(-8, 8, (32, 64)).astype(np.int8), "q")
    scale = numpy_helper.from_array(np.float32(0.1), "s")
    nodes = [helper.make_node("DequantizeLinear", ["q", "s"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    with lathe.compile(model([small, scale], nodes, ["n", 32]), threads=1, tune="off") as session:
        assert "weight_only" not in session.explain()
    given, nodes = weights("int8", "channel", False, False)
    point = numpy_helper.from_array(np.uint8(128), "p")
    nodes += [
        helper.make_node("QuantizeLinear", ["x", "t", "p"], ["i"]),
        helper.make_node("DequantizeLinear", ["i", "t", "p"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"]),
    ]
    given += [point, numpy_helper.from_array(np.float32(0.05), "t")]
    with lathe.compile(model(given, nodes, ["n", K]), threads=1, tune="off") as session:
        assert "weight_only" not in session.explain()


def test_the_compiled_weights_take_four_bits() -> None:
    given, nodes = weights("int4", "block 32", False, False)
    nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"]))
    with lathe.compile(model(given, nodes, ["n", K]), threads=1, tune="off") as session:
        kilobytes = float(session.explain().split("weights ")[1].split(" KiB")[0])
    assert kilobytes <= (K * N / 2 + 4 * K * N / 32) * 1.15 / 1024  # panels are padded to whole vectors


def test_an_exported_graph_computes_the_same() -> None:
    from lathe.core.passes.pipeline import optimize

    given, nodes = weights("uint4", "block 32", False, True)
    nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"]))
    graph = lathe.load(model(given, nodes, ["n", K]))
    optimized, _ = optimize(graph)
    assert [node.op for node in optimized.nodes] == ["DequantizedMatMul"]
    data = lathe.export(optimized)
    onnx.checker.check_model(data)
    x = np.random.default_rng(0).standard_normal((3, K)).astype(np.float32)
    expected = lathe.interpret(graph, {"x": x})["y"]
    got = ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
