"""bfloat16 and float16: which values are narrowed, and the error of whole models."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import lathe
from lathe.core.errors import UnsupportedError
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.text import print_graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ir.verify import verify
from lathe.core.passes.pipeline import Options, optimize
from lathe.core.passes.precision.low_precision import ConvertToNarrow
from lathe.core.passes.rewrite.polynomial_degree import polynomial_degree
from lathe.core.reference import interpret
from loadtest import zoo
from tests.core.kernels.harness import scalar_body
from tests.core.passes.case_files import feeds, operators
from tests.random_numbers import RNG

F32, BF16, F16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16


def network(write: Callable[[Builder, Value], Value], width: int = 8) -> Graph:
    """`write` between the graph's input [n, width] and its output."""
    b = Builder(Graph("net"))
    x = b.input("x", TensorType(F32, (symbol("n"), width)))
    b.graph.outputs = [write(b, x)]
    return b.graph


def weight(b: Builder, *shape: int) -> Value:
    return b.constant(RNG.standard_normal(shape).astype(np.float32))


def product(b: Builder, x: Value, **attrs: Any) -> Value:
    return b("FusedMatMul", x, weight(b, x.shape[-1], 8), **attrs)  # type: ignore[arg-type]


def narrowed(graph: Graph, dtype: DType = BF16) -> dict[str, list[str]]:
    """By operator the element types of its nodes' outputs after the pass; checks that results stay close."""
    copy = graph.clone()
    ConvertToNarrow(dtype).run(copy)
    verify(copy, "the pass")
    given = feeds(graph)
    for name, exact in interpret(graph, given).items():
        assert np.abs(interpret(copy, given)[name] - exact).max() < 0.03 * np.abs(exact).max()
    found: dict[str, list[str]] = {}
    for node in copy.nodes:
        found.setdefault(node.op, []).append(str(node.output.dtype))
    return found


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_values_between_products_are_narrow_and_the_ends_float32(dtype: DType) -> None:
    found = narrowed(network(lambda b, x: product(b, b("Relu", product(b, x)))), dtype)
    assert found["FusedElementwise"] == [str(dtype)] and found["Cast"] == [str(dtype)]  # the cast of the input
    assert found["FusedMatMul"] == [str(dtype), "float32"]


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda b, x: b("Mul", x, b("Sigmoid", x)), 1),
        (lambda b, x: b("Mul", x, x), 2),
        (lambda b, x: b("Div", x, b.constant(np.array(0.5, np.float32))), 1),
        (lambda b, x: b("Div", x, b("Sigmoid", x)), inf),  # the divisor can be arbitrarily near to 0
        (lambda b, x: b("Reciprocal", b("Sigmoid", x)), inf),
        (lambda b, x: b("Exp", b("Tanh", x)), 0),
    ],
)
def test_growth_of_epilogues(write: Callable[[Builder, Value], Value], expected: float) -> None:
    body = scalar_body(1, write)
    assert polynomial_degree(body, {body.inputs[0]: 1.0}) == expected


def test_float16_keeps_unbounded_values_in_float32() -> None:
    """Squares of activations overflow it, and normalization brings them back."""

    def write(b: Builder, x: Value) -> Value:
        y = product(b, x)
        squares = b("Reshape", b("Mul", y, y), b.constant(np.array([-1, 8])))
        return product(b, b("LayerNormalization", squares, weight(b, 8), weight(b, 8)))

    graph = network(write)
    assert narrowed(graph, F16)["Reshape"] == ["float32"] and narrowed(graph, BF16)["Reshape"] == ["bfloat16"]
    x = {"x": np.full((2, 8), 500, np.float32)}
    (got,), (want,) = lathe.compile(graph, precision="float16").run(x).values(), interpret(graph, x).values()
    assert np.abs(got - want).max() < 0.01 * np.abs(want).max()


def test_a_reader_that_needs_float32_gets_a_conversion() -> None:
    def write(b: Builder, x: Value) -> Value:
        y = product(b, x)
        return b("Add", b("Softmax", y, axis=-1), product(b, y))

    found = narrowed(network(write))
    assert found["FusedMatMul"][0] == "bfloat16" and found["Cast"] == ["bfloat16", "float32"]
    assert found["Softmax"] == ["float32"]


def test_values_that_no_product_reads_stay_float32() -> None:
    found = narrowed(network(lambda b, x: b("Softmax", product(b, x), axis=-1)))
    assert found == {"Cast": ["bfloat16"], "FusedMatMul": ["float32"], "Softmax": ["float32"]}


def test_products_of_two_activations_stay_float32() -> None:
    def write(b: Builder, x: Value) -> Value:
        y = product(b, x)
        scores = b("FusedMatMul", y, b("Relu", y), perm_b=(1, 0))
        return b("FusedMatMul", b("Softmax", scores, axis=-1), product(b, y))

    graph = network(write)
    assert narrowed(graph)["FusedMatMul"] == ["bfloat16", "float32", "float32", "float32"]
    x = {"x": RNG.standard_normal((5, 8)).astype(np.float32)}
    session = lathe.compile(graph, threads=1, precision="bfloat16")
    (got,), (want,) = session.run(x).values(), interpret(graph, x).values()
    assert "no compiled kernel for FusedMatMul of bfloat16" not in session.explain()
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_normalization_between_products_passes_bfloat16_on() -> None:
    def write(b: Builder, x: Value) -> Value:
        return product(b, b("LayerNormalization", product(b, x), weight(b, 8), weight(b, 8)))

    found = narrowed(network(write))
    assert found["LayerNormalization"] == ["bfloat16"] and found["FusedMatMul"] == ["bfloat16", "float32"]


@pytest.mark.parametrize("width", [7, 9])
def test_odd_depths_stay_float32(width: int) -> None:
    assert narrowed(network(product, width)) == {"FusedMatMul": ["float32"]}


def test_graphs_without_products_stay_as_they_are() -> None:
    graph = network(lambda b, x: b("Exp", b("Add", x, x)))
    text = print_graph(graph)
    assert ConvertToNarrow(BF16).run(graph).changed == 0 and print_graph(graph) == text


def test_running_again_changes_nothing() -> None:
    graph, _ = optimize(network(lambda b, x: product(b, b("Relu", product(b, x)))), Options(precision="bfloat16"))
    text = print_graph(graph)
    ConvertToNarrow(BF16).run(graph)
    assert print_graph(graph) == text


SLOW = pytest.mark.slow


@pytest.mark.sample(3)
@pytest.mark.parametrize(("precision", "error"), [("bfloat16", 0.02), ("float16", 0.003)])
@pytest.mark.parametrize(
    "name", ["mlp", "transformer", *(pytest.param(n, marks=SLOW) for n in ("resnet", "mobilenet"))]
)
def test_models_stay_near_float32(name: str, precision: Any, error: float) -> None:
    model = zoo.model(name).SerializeToString()
    session = lathe.compile(model, threads=1, max_batch=4, precision=precision)
    assert " 0 on the reference" in session.explain() and precision in session.explain()
    x = {"x": zoo.sample(name, 3)}
    exact = np.asarray(ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, x)[0])
    got = session.run(x)["y"]
    assert got.dtype == exact.dtype
    assert np.abs(got - exact).max() < error * np.abs(exact).max()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_kernels_agree_with_the_rewritten_graph(precision: Any) -> None:
    def write(b: Builder, x: Value) -> Value:
        hidden = b("Relu", b("Add", product(b, x), weight(b, 8)))
        normal = b("LayerNormalization", b("Add", hidden, product(b, hidden)), weight(b, 8), weight(b, 8))
        return b("Softmax", product(b, b("Gelu", product(b, normal))), axis=-1)

    graph = network(write)
    rewritten, _ = optimize(graph, Options(precision=precision))
    assert operators(rewritten)["FusedMatMul"] == 4
    x = {"x": RNG.standard_normal((7, 8)).astype(np.float32)}
    got = lathe.compile(graph, precision=precision).run(x)
    for name, want in interpret(rewritten, x).items():
        np.testing.assert_allclose(got[name], want, rtol=0.02, atol=0.005)


def test_unknown_precisions_are_refused() -> None:
    expected = "precision 'float8' is not supported, expected float32, tf32, bfloat16, float16 or int8-activations"
    with pytest.raises(UnsupportedError, match=expected):
        lathe.compile(network(product), precision="float8")  # type: ignore[arg-type]


def test_graph_inputs_are_converted_before_nodes_that_only_move_elements() -> None:
    """On GPUs the pass narrows the transposed input that a product reads; it keeps the other one in float32."""
    b = Builder(Graph("net"))
    x = b.input("x", TensorType(F32, (symbol("n"), 6, 8)))
    moved, other = b("Transpose", x, perm=(0, 2, 1)), b("Transpose", b("Reshape", x, allowzero=1, shape=(-1, 8, 6)))
    b.graph.outputs = [product(b, moved), b("Relu", other)]
    for casts_inputs, expected in ((False, ["float32", "float32"]), (True, ["bfloat16", "float32"])):
        copy = b.graph.clone()
        ConvertToNarrow(BF16, casts_inputs).run(copy)
        verify(copy, "the pass")
        assert [str(node.output.dtype) for node in copy.nodes if node.op == "Transpose"] == expected
