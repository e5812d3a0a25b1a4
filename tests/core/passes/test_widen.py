"""Models of float16 and bfloat16: compiled, near the exact result, and rounded where rounding is visible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

import lathe
from lathe.core.frontends.onnx import load
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Array, Graph, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.passes.precision.widen import Widen, product_dtype
from lathe.core.reference import interpret
from loadtest import zoo
from tests.core.small_models import model
from tests.random_numbers import RNG

F32, F16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
N = symbol("n")
SLOW = pytest.mark.slow


def in_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with float16 for every float32."""
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    constants = [a.t for node in twin.graph.node for a in node.attribute if a.name == "value"]
    for tensor in (*twin.graph.initializer, *constants):
        if tensor.data_type == TensorProto.FLOAT:
            halves = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(halves, tensor.name))
    for value in (*twin.graph.input, *twin.graph.output, *twin.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return twin


def answer(model: onnx.ModelProto, x: Array) -> Array:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0]).astype(np.float32)


@pytest.mark.parametrize(
    "name", ["mlp", "transformer", *(pytest.param(n, marks=SLOW) for n in ("resnet", "mobilenet"))]
)
def test_float16_models_are_as_exact_as_in_onnx_runtime(name: str) -> None:
    exact = zoo.model(name)
    model, x = in_float16(exact), zoo.sample(name, 3)
    x = x if x.dtype.kind == "i" else x.astype(np.float16)
    session = lathe.compile(model.SerializeToString(), threads=1, max_batch=4, tune="off")
    assert " 0 on the reference" in session.explain() and "products of float16" in session.explain()
    [y] = session.run({"x": x}).values()
    want = answer(exact, x if x.dtype.kind == "i" else x.astype(np.float32))
    assert y.dtype == np.float16
    assert np.abs(y - want).max() < max(2 * np.abs(answer(model, x) - want).max(), 1e-3 * np.abs(want).max())


def network(write: Callable[[Builder, Value], Value], dtype: DType = F16, width: int = 8) -> Graph:
    """`write` between the graph's input [n, width] and its output."""
    b = Builder(Graph("net"))
    x = b.input("x", TensorType(dtype, (N, width)))
    b.graph.outputs = [write(b, x)]
    return b.graph


def weights(b: Builder, *shape: int, dtype: DType = F16) -> Value:
    return b.constant((RNG.standard_normal(shape) * 0.3).astype(dtype.numpy))


def operators(graph: Graph) -> list[str]:
    copy = graph.clone()
    Widen().run(copy)
    return [f"{node.op}:{node.output.dtype}" for node in copy.nodes]


def run(graph: Graph, x: Array, **options: Any) -> tuple[Array, str]:
    session = lathe.compile(graph, threads=1, tune="off", **options)
    [y] = session.run({"x": x}).values()
    return y, session.explain()


def test_chains_are_computed_in_float32_and_rounded_once() -> None:
    graph = network(lambda b, x: b("Tanh", b("Mul", b("Exp", x), x)))
    assert operators(graph) == ["Cast:float32", "Exp:float32", "Mul:float32", "Tanh:float32", "Cast:float16"]
    x = RNG.standard_normal((5, 8)).astype(np.float16)
    y, explained = run(graph, x)
    wide = x.astype(np.float64)
    np.testing.assert_array_equal(y, np.tanh(np.exp(wide) * wide).astype(np.float16))
    assert " 0 on the reference" in explained


def test_moved_values_stay_narrow() -> None:
    """A table of float16 is not made twice as large."""
    b = Builder(Graph("net"))
    rows = b.input("x", TensorType(DType.INT64, (N,)))
    b.graph.outputs = [b("Relu", b("Gather", weights(b, 50, 4), rows))]
    assert operators(b.graph) == ["Gather:float16", "Cast:float32", "Relu:float32", "Cast:float16"]
    y, explained = run(b.graph, np.array([3, 49, 0]))
    table = next(iter(b.graph.constants.values()))
    np.testing.assert_array_equal(y, np.maximum(table[[3, 49, 0]], 0))
    assert " 0 on the reference" in explained


def test_comparisons_see_rounded_numbers() -> None:
    """2049 is no float16: a sum that rounds to 2048 is not above it, and 65504 * 2 is infinite."""
    graph = network(lambda b, x: b("Greater", b("Add", x, b.constant(np.float16(1))), b.constant(np.float16(2048))))
    x = np.full((1, 8), 2048, np.float16)
    y, _ = run(graph, x)
    assert not y.any() and np.array_equal(y, next(iter(interpret(graph, {"x": x}).values())))
    infinite, _ = run(network(lambda b, x: b("IsInf", b("Add", x, x))), np.full((1, 8), 65504, np.float16))
    assert infinite.all()


def test_explicit_conversions_round() -> None:
    def write(b: Builder, x: Value) -> Value:
        return b("Cast", b("Cast", x, to=F16.onnx_code), to=F32.onnx_code)

    x = RNG.standard_normal((3, 8)).astype(np.float32)
    y, _ = run(network(write, F32), x)
    np.testing.assert_array_equal(y, x.astype(np.float16).astype(np.float32))


def test_bodies_of_branches_are_compiled_too() -> None:
    def write(b: Builder, x: Value) -> Value:
        branches = []
        for op in ("Sigmoid", "Softplus"):
            inner = Builder(Graph(op))
            inner.graph.outputs = [inner(op, x, name=f"{op}.y")]
            branches.append(inner.graph)
        above = b("Greater", b("ReduceMax", x, keepdims=0), b.constant(np.float16(0)))
        return b("If", above, then_branch=branches[0], else_branch=branches[1])

    graph = network(write)
    for sign in (1, -1):
        x = (sign * np.abs(RNG.standard_normal((3, 8)))).astype(np.float16)
        y, explained = run(graph, x)
        want = next(iter(interpret(graph, {"x": x}).values()))
        np.testing.assert_allclose(y.astype(np.float32), want.astype(np.float32), 2e-3)
        assert " 0 on the reference" in explained


@pytest.mark.parametrize(("dtype", "error"), [(F16, 2e-3), (BF16, 2e-2)])
def test_products_stay_narrow_in_all_narrow_models(dtype: DType, error: float) -> None:
    graph = network(lambda b, x: b("Gemm", b("Relu", b("MatMul", x, weights(b, 8, 8, dtype=dtype))),
                                   weights(b, 8, 8, dtype=dtype), weights(b, 8, dtype=dtype)), dtype)  # fmt: skip
    assert product_dtype(graph) is dtype
    x = RNG.standard_normal((9, 8)).astype(dtype.numpy)
    y, explained = run(graph, x)
    want = next(iter(interpret(graph, {"x": x}).values())).astype(np.float32)
    assert f"2 products of {dtype}" in explained and y.dtype == dtype.numpy
    assert np.abs(y.astype(np.float32) - want).max() < error * np.abs(want).max()


def test_products_of_a_mixed_model_are_float32_unless_asked() -> None:
    def write(b: Builder, x: Value) -> Value:
        y = b("MatMul", b("Cast", b("MatMul", x, weights(b, 8, 8)), to=F32.onnx_code), weights(b, 8, 8, dtype=F32))
        return b("Softmax", y, axis=-1)

    graph = network(write)
    assert product_dtype(graph) is None
    x = RNG.standard_normal((9, 8)).astype(np.float16)
    want = next(iter(interpret(graph, {"x": x}).values()))
    for precision, told in (("float32", False), ("float16", True)):
        y, explained = run(graph, x, precision=precision)
        assert ("products of float16" in explained) is told
        np.testing.assert_allclose(y, want, atol=3e-3)


OTHER_PRODUCTS = {
    "RNN": "v, y = RNN <hidden_size = 4> (z, w, r)",
    "Einsum": 'y = Einsum <equation = "sbi,dji->sbj"> (z, w)',
    "in a branch": "s = Transpose <perm = [0, 2, 1]> (w)  y = If (t) <then_branch = g1 () => (float[S,1,4] a)"
    " { a = MatMul (z, s) }, else_branch = g2 () => (float[S,1,4] b) { e = MatMul (z, s) b = Neg (e) }>",
}


@pytest.mark.parametrize("name", OTHER_PRODUCTS)
def test_a_float16_product_does_not_narrow_others(name: str) -> None:
    """One float16 product in a graph does not make its other products narrow."""
    graph = load(model(
        "float16[N,8] x, float[S,1,8] z, bool t, float[1,4,8] w, float[1,4,4] r => float16[] u, float[] y",
        f"u = MatMul (x, c)  {OTHER_PRODUCTS[name]}", "float16[8,2] c = {" + ",".join(["15360"] * 16) + "}",
    ))  # fmt: skip
    assert product_dtype(graph) is None
