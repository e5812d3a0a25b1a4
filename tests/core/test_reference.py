"""The interpreter: empty batches, and symbols that only results show."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError, ModelError
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import Dim, symbol
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry


def one_input(*shape: object) -> tuple[Graph, Builder, Value]:
    graph = Graph("g")
    b = Builder(graph)
    return graph, b, b.input("x", TensorType(DType.FLOAT32, shape))  # type: ignore[arg-type]


def test_an_empty_batch_runs_through_shape_computations() -> None:
    graph, b, x = one_input(symbol("batch"), 4, 3, 3)
    convolved = b("Conv", x, b.constant(np.ones((4, 2, 2, 2), np.float32)), group=2)
    upsampled = b("ConvTranspose", convolved, b.constant(np.ones((4, 2, 2, 2), np.float32)))
    scale = b.constant(np.ones(2, np.float32))
    normal = b("GroupNormalization", upsampled, scale, scale, num_groups=2)
    graph.outputs = [b("Reshape", normal, shape=(0, 2, -1))]
    feeds = {"x": np.zeros((0, 4, 3, 3), np.float32)}
    assert lathe.interpret(graph, feeds)["reshape"].shape == (0, 2, 9)
    with lathe.compile(graph, threads=1) as session:
        assert session.run(feeds)["reshape"].shape == (0, 2, 9)


@pytest.mark.parametrize("length", [0, 2, 3, 5])
def test_inputs_may_be_shorter_than_a_slice(length: int) -> None:
    """The inferred type of x[:, -3:] is [n, 3], which is right for three elements or more."""
    graph, b, x = one_input(symbol("n"), symbol("m"))
    graph.outputs = [b("Slice", x, starts=(-3,), ends=(2**31,), axes=(1,))]
    data = np.arange(2.0 * length, dtype=np.float32).reshape(2, length)
    np.testing.assert_array_equal(lathe.interpret(graph, {"x": data})["slice"], data[:, -3:])


@pytest.mark.parametrize("values", [[1, 0, 2, 0, 3, 0], [0] * 6])
def test_a_symbol_found_from_a_result_is_known_to_later_nodes(values: list[int]) -> None:
    graph, b, x = one_input(6)
    places = b("Transpose", b("NonZero", x), perm=(1, 0))
    graph.outputs = [b("Reshape", places, shape=(0, -1)), b("Expand", x, shape=(places.shape[0], 6))]
    feeds = {"x": np.array(values, np.float32)}
    reshaped, expanded = lathe.interpret(graph, feeds).values()
    assert (reshaped.shape, expanded.shape) == ((np.count_nonzero(values), 1), (np.count_nonzero(values), 6))
    graph.outputs = graph.outputs[:1]
    with lathe.compile(graph, threads=1) as session:
        assert session.run(feeds)["reshape"].shape == reshaped.shape


def test_a_dimension_that_is_a_multiple_of_a_symbol_gives_the_symbol() -> None:
    graph, b, x = one_input(2 * symbol("half"))
    graph.outputs = [b("Reshape", x, shape=(symbol("half"), 2))]
    assert lathe.interpret(graph, {"x": np.zeros(6, np.float32)})["reshape"].shape == (3, 2)


def test_dimensions_that_disagree_are_refused() -> None:
    graph, b, x = one_input(symbol("batch"))
    y = b.input("y", TensorType(DType.FLOAT32, (symbol("batch"),)))
    graph.outputs = [b("Add", x, y)]
    with pytest.raises(FeedError, match="dimension batch: expected 2 as in 'x', got 3 in 'y'"):
        lathe.interpret(graph, {"x": np.zeros(2, np.float32), "y": np.zeros(3, np.float32)})


def test_extents_that_do_not_fit_name_the_node() -> None:
    graph, build, x = one_input(symbol("n"))
    y = build.input("y", TensorType(DType.FLOAT32, (symbol("m"),)))
    graph.outputs = [build("Add", x, y, name="sum")]
    with pytest.raises(FeedError, match=r"node 'sum' \(Add\): operands could not be broadcast"):
        lathe.interpret(graph, {"x": np.zeros(2, np.float32), "y": np.zeros(3, np.float32)})


def test_ranks_that_numpy_cannot_broadcast_are_refused() -> None:
    graph, build, x = one_input(1)
    shape = build.input("shape", TensorType(DType.INT64, (60,)))
    graph.outputs = [build("Expand", x, shape, name="wide")]
    with pytest.raises(FeedError, match=r"node 'wide' \(Expand\): .*dimensions"):
        lathe.interpret(graph, {"x": np.zeros(1, np.float32), "shape": np.ones(60, np.int64)})


N = symbol("n")


DIMS = [(2 * N,), (N + 3,), (2 * N + 1,), (4 - N,), (3 * N - 2,), (N, 2 * N), (N + 1, 3), (5,)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_session_and_the_interpreter_accept_the_same_extents(dims: tuple[Dim, ...]) -> None:
    graph, build, x = one_input(*dims)
    graph.outputs = [build("Relu", x)]
    accepted = 0
    with lathe.compile(graph, threads=1, new_shapes="wait") as session:
        for shape in itertools.product(range(7), repeat=len(dims)):
            feeds = {"x": np.zeros(shape, np.float32)}
            results: list[object] = []
            for run in (session.run, partial(lathe.interpret, graph)):
                try:
                    results.append(run(feeds)["relu"].shape)
                except FeedError as error:
                    results.append(str(error))
            assert results[0] == results[1]
            accepted += results[0] == shape
    assert 0 < accepted < 7 ** len(dims)


VALUES: dict[DType, Any] = {
    DType.STRING: np.array(["a", "b"], object),
    DType.FLOAT32: np.zeros(2, np.float32),
    DType.INT64: np.zeros(2, np.int64),
    DType.BOOL: np.zeros(2, np.bool_),
    DType.FLOAT16: np.zeros(2, np.float16),
}


@pytest.mark.parametrize("declared", VALUES, ids=str)
@pytest.mark.parametrize("returned", [*VALUES.values(), np.array(["a", "b"])], ids=lambda array: str(array.dtype))
def test_a_reference_returns_what_is_declared(
    monkeypatch: pytest.MonkeyPatch, declared: DType, returned: np.ndarray
) -> None:
    """Text of any form is text, and nothing else is."""
    graph, build, x = one_input(2)
    graph.outputs = [build("Identity", x)]
    graph.outputs[0].type = TensorType(declared, (2,))
    identity = registry.get("Identity")
    monkeypatch.setattr(type(identity), "reference", lambda *_: returned)
    if declared.holds(returned.dtype):
        (result,) = lathe.interpret(graph, {"x": np.zeros(2, np.float32)}).values()
        assert result.dtype == declared.numpy and result.tolist() == returned.tolist()
        return
    with pytest.raises(ModelError, match=f"reference returned {returned.dtype}, declared {declared}"):
        lathe.interpret(graph, {"x": np.zeros(2, np.float32)})
