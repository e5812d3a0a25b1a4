"""Models whose sizes agree only for some batch sizes: other batches are refused without out-of-bounds accesses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError, LatheError
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import DType, TensorType
from tests.core.runtime.graphs import N

Make = Callable[[Builder, Value, Value], Value]


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


# name -> shapes of x and y, a function that builds the output, a valid batch size, an invalid one
CASES: dict[str, tuple[tuple[object, ...], tuple[object, ...], Make, int, int]] = {
    "elementwise": ((N, 4), (3, 4), lambda b, x, y: b("Add", x, y), 1, 2),
    "fused": ((N, 4), (3, 4), lambda b, x, y: b("Relu", b("Mul", b("Add", b("Exp", x), y), y)), 1, 2),
    "where": ((N, 4), (3, 4), lambda b, x, y: b("Where", b("Greater", y, x), x, y), 3, 2),
    "concat": ((N, 4), (3, 4), lambda b, x, y: b("Concat", x, y, axis=1), 3, 2),
    "split": ((N, 4), (1,), lambda b, x, y: b.emit("Split", x, outputs=2, axis=0, split=(2, 3))[1], 5, 1),
    "expand": ((N, 4), (1,), lambda b, x, y: b("Expand", x, shape=(3, 4)), 1, 2),
    "product": ((N, 3, 4), (5, 4, 2), lambda b, x, y: b("MatMul", x, y), 1, 2),
    "attention": (
        (N, 4, 8), (3, 4, 8),
        lambda b, x, y: b("MatMul", b("Softmax", b("MatMul", x, b("Transpose", y, perm=(0, 2, 1)))), y), 1, 2,
    ),
    "bias": ((N,), (2, 4), lambda b, x, y: b("Gemm", y, b.constant(weight(4, 3)), x), 3, 2),
    "added bias": ((N,), (2, 4), lambda b, x, y: b("Add", b("MatMul", y, b.constant(weight(4, 4))), x), 1, 2),
    "channels": ((N,), (2, 4, 3, 3), lambda b, x, y: b("Mul", y, b("Unsqueeze", x, axes=(1, 2))), 4, 2),
    "residual": (
        (N, 3, 4, 4), (2, 3, 4, 4),
        lambda b, x, y: b("Add", b("Conv", x, b.constant(weight(3, 3, 3, 3)), pads=(1, 1, 1, 1)), y), 1, 3,
    ),
    "cut padding": ((N, 4), (1,), lambda b, x, y: b("Pad", x, pads=(1, 0, -3, 0)), 5, 1),
    "resized batch": ((N, 1, 2, 2), (1,), lambda b, x, y: b("Resize", x, sizes=(1, 1, 4, 2)), 1, 0),
}  # fmt: skip


def built(name: str) -> tuple[Graph, int, int]:
    x_shape, y_shape, make, fits, clashes = CASES[name]
    graph = Graph(name.replace(" ", "_"))
    b = Builder(graph)
    x, y = (b.input(n, TensorType(DType.FLOAT32, s)) for n, s in (("x", x_shape), ("y", y_shape)))  # type: ignore[arg-type]
    graph.outputs = [make(b, x, y)]
    return graph, fits, clashes


def feeds(graph: Graph, rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {v.name: rng.standard_normal(v.tensor.evaluate({"batch": rows})).astype(np.float32) for v in graph.inputs}


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_only_batch_sizes_that_fit_run(name: str, optimize: bool) -> None:
    graph, fits, clashes = built(name)
    with lathe.compile(graph, threads=1, optimize=optimize) as session:
        with pytest.raises(LatheError):
            session.run(feeds(graph, clashes))
        given = feeds(graph, fits)
        (got,), (want,) = session.run(given).values(), lathe.interpret(graph, given).values()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda b, x: b("MatMul", x, b.constant(weight(0, 4))),
        lambda b, x: b("Softmax", x, axis=1),
        lambda b, x: b("ReduceSum", x, axes=(1,)),
    ],
)
def test_operands_that_are_always_empty_run_on_the_reference(make: Callable[[Builder, Value], Value]) -> None:
    graph = Graph("empty")
    b = Builder(graph)
    graph.outputs = [make(b, b.input("x", TensorType(DType.FLOAT32, (N, 0))))]
    with lathe.compile(graph, threads=1) as session:
        (got,), (want,) = session.run(feeds(graph, 2)).values(), lathe.interpret(graph, feeds(graph, 2)).values()
        np.testing.assert_array_equal(got, want)


def test_a_declared_shape_is_used_and_checked() -> None:
    """The model declares a data-dependent shape; later nodes are compiled for it."""
    b = Builder(Graph("declared"))
    x, shape = b.input("x", TensorType(DType.FLOAT32, (6,))), b.input("shape", TensorType(DType.INT64, (symbol("m"),)))
    y = b("Reshape", x, shape, name="y")
    assert y.tensor.shape is None
    y.type = TensorType(DType.FLOAT32, (2, 3))
    b.graph.outputs = [b("Relu", y, name="z")]
    data = np.arange(-3, 3, dtype=np.float32)
    with lathe.compile(b.graph, threads=1) as session:
        assert session.outputs["z"] == TensorType(DType.FLOAT32, (2, 3))
        assert " 1 on the reference" in session.explain()
        got = session.run({"x": data, "shape": np.array([2, 3])})["z"]
        np.testing.assert_array_equal(got, np.maximum(data, 0).reshape(2, 3))
        with pytest.raises(
            FeedError, match=r"node 'y' \(Reshape\): its output 'y' has shape \[3, 2\], expected float32\[2,3\]"
        ):
            session.run({"x": data, "shape": np.array([3, 2])})
