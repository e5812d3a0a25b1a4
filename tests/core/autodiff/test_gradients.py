"""The contract of `lathe.gradients`: names, order, zeros, symbols, sums of paths, second order, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.ir.graph import Graph
from lathe.core.ir.text import parse_graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.terms import Term, Writer
from lathe.core.reference import interpret
from tests.core.autodiff.cases import CASES, real
from tests.core.autodiff.harness import assert_gradients, scalar_head

F64 = DType.FLOAT64


def graph_of(build: Callable[..., Term], *shapes: tuple[Any, ...]) -> Graph:
    """`build` applied to inputs x0, x1 ... of these shapes."""
    graph = Graph("g")
    writer = Writer(graph)
    inputs = [writer.input(f"x{i}", TensorType(F64, shape)) for i, shape in enumerate(shapes)]
    graph.outputs = [build(*inputs).value]
    return graph


def test_names_and_order() -> None:
    graph = graph_of(lambda x, y: x * y, (3,), (3,))
    back = lathe.gradients(graph, of=graph.outputs[0].name, with_respect_to=["x1", "x0"])
    assert [value.name for value in back.outputs[1:]] == ["x1.gradient", "x0.gradient"]
    feeds = {"x0": real(3), "x1": real(3) + 5}
    results = interpret(back, feeds)
    np.testing.assert_array_equal(results["x1.gradient"], feeds["x0"])
    np.testing.assert_array_equal(results["x0.gradient"], feeds["x1"])
    assert len(graph.outputs) == 1, "the graph given was changed"


def test_weights_and_inner_values_have_gradients() -> None:
    graph = Graph("g")
    writer = Writer(graph)
    x, w = writer.input("x", TensorType(F64, (2, 3))), writer.array(real(3), name="w")
    inner = x * w
    graph.outputs = [(inner * inner).value]
    back = lathe.gradients(graph, of=graph.outputs[0].name, with_respect_to=["w", inner.value.name])
    feeds = {"x": real(2, 3)}
    results = list(interpret(back, feeds).values())
    np.testing.assert_allclose(results[1], (2 * feeds["x"] ** 2 * real(3)).sum(0))
    np.testing.assert_allclose(results[2], 2 * feeds["x"] * real(3))


def test_the_gradient_of_an_unused_input_is_zero() -> None:
    graph = graph_of(lambda x, y: x.op("Floor") + x, (2, 2), (3,))
    back = lathe.gradients(graph, of=graph.outputs[0].name, with_respect_to=["x0", "x1"])
    results = interpret(back, {"x0": real(2, 2), "x1": real(3)})
    np.testing.assert_array_equal(results["x0.gradient"], np.ones((2, 2)))
    np.testing.assert_array_equal(results["x1.gradient"], np.zeros(3))


def test_gradients_of_several_paths_add_up() -> None:
    assert_gradients(graph_of(lambda x: x.exp() * x + x.op("Sin") - x / 3, (4,)), {"x0": real(4)})


def test_stopped_gradients_are_constants() -> None:
    graph = graph_of(lambda x: x * x.op("StopGradient"), (3,))
    back = lathe.gradients(graph, of=graph.outputs[0].name, with_respect_to=["x0"])
    x = real(3)
    np.testing.assert_array_equal(interpret(back, {"x0": x})["x0.gradient"], x)
    session = lathe.compile(graph_of(lambda x: x.op("StopGradient") + 1, (3,)), threads=1)
    np.testing.assert_array_equal(next(iter(session.run({"x0": x}).values())), x + 1)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_symbolic_batch(rows: int) -> None:
    n = symbol("n")

    def build(x: Term, w: Term, b: Term) -> Term:
        return (x @ w + b).op("Tanh").mean([0], keepdims=False)

    assert_gradients(graph_of(build, (n, 3), (3, 2), (2,)), {"x0": real(rows, 3), "x1": real(3, 2), "x2": real(2)})


def test_symbolic_shapes_move() -> None:
    n = symbol("n")

    def build(x: Term) -> Term:
        y = x.transpose(1, 0, 2).reshape((3, n * 4))
        return y.op("Concat", y * 2, axis=1).slice(1, 1, n * 8) * y.sum([1])

    assert_gradients(graph_of(build, (n, 3, 4)), {"x0": real(2, 3, 4)})


_TWICE = {
    "MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "ConvWeightGradient", "Softmax", "LogSoftmax", "ReduceMean",
    "ReduceSum", "LayerNormalization",
}  # fmt: skip
ELEMENTWISE_AND_PRODUCTS = [case for case in CASES if registry.get(case.op).is_elementwise or case.op in _TWICE]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", ELEMENTWISE_AND_PRODUCTS, ids=lambda case: case.label)
def test_second_order(case: Any) -> None:
    """The gradient of the sum of a gradient's squares, against central differences of the first gradient."""
    graph, feeds = case.graph()
    head, output = scalar_head(graph)
    name = next(iter(feeds))
    back = lathe.gradients(head, of=output, with_respect_to=[name])
    back.outputs = back.outputs[1:]
    assert_gradients(back, feeds, tolerance=2e-5)


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(25))
def test_random_compositions(seed: int) -> None:
    """Chains and joins of smooth operators over matrices that change their shape on the way."""
    rng = np.random.default_rng(seed)
    graph = Graph("random")
    writer = Writer(graph)
    terms = [writer.input(f"x{i}", TensorType(F64, (3, 4))) for i in range(3)]
    for _ in range(12):
        terms.append(_grown(rng, terms))
    graph.outputs = [terms[-1].value, terms[-2].value]
    feeds = {f"x{i}": rng.uniform(-1, 1, (3, 4)) for i in range(3)}
    back = assert_gradients(graph, feeds, tolerance=2e-5)
    verify(back)


def _grown(rng: Any, terms: list[Term]) -> Term:
    a, b = (terms[int(i)] for i in rng.integers(0, len(terms), 2))
    match int(rng.integers(0, 8)):
        case 0:
            return (a * b).op("Tanh")
        case 1:
            return a.op("Sigmoid") + b
        case 2:
            return (a @ b.transpose(1, 0) @ a).op("Sin")
        case 3:
            return a.op("Softmax", axis=int(rng.integers(0, 2))) * b
        case 4:
            return a - b.mean([1])
        case 5:
            return a.reshape((4, 3)).transpose(1, 0) / (b.square() + 1)
        case 6:
            return a.slice(0, 0, 2).op("Concat", b.slice(0, 2, 3), axis=0)
        case _:
            return a.op("Gelu") - b.op("Max", a * 0.3)


def test_gradients_survive_text_and_compilation() -> None:
    graph = Graph("g")
    writer = Writer(graph)
    x = writer.input("x", TensorType(DType.FLOAT32, (symbol("n"), 4)))
    w = writer.array(real(4, 3).astype(np.float32), name="w")
    graph.outputs = [(x @ w).op("LogSoftmax").value]
    back = lathe.gradients(graph, of=graph.outputs[0].name, with_respect_to=["x", "w"])
    assert str(parse_graph(str(back))) == str(back)
    feeds = {"x": real(6, 4).astype(np.float32)}
    expected, found = interpret(back, feeds), lathe.compile(back, threads=1).run(feeds)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, 1e-5, 1e-6)


def test_errors_name_the_offending_value() -> None:
    graph = graph_of(lambda x: x + 1, (2,))
    with pytest.raises(ModelError, match="has no value 'z'"):
        lathe.gradients(graph, of=graph.outputs[0].name, with_respect_to=["z"])
    mixed = graph_of(lambda x: (x > 0).cast(F64), (2,))
    less = mixed.nodes[0].output.name
    with pytest.raises(ModelError, match="expected a tensor of real numbers"):
        lathe.gradients(mixed, of=less, with_respect_to=["x0"])
    unique = graph_of(lambda x: x.op("Unique"), (4,))
    with pytest.raises(UnsupportedError, match=r"\(Unique\): cannot be differentiated"):
        lathe.gradients(unique, of=unique.outputs[0].name, with_respect_to=["x0"])
