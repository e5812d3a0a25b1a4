"""Shapes computed by the model are known when it is compiled, symbols and all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import Dim, evaluate, floor_div, maximum, symbol
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.assumed_extents import assumptions
from lathe.core.ops.opdef.inference import infer_graph
from tests.core.small_models import assert_like_onnx_runtime, model, normal

N, S = symbol("n"), symbol("s")


class World:
    """A graph with one input, to build shape computations in."""

    def __init__(self, *shape: Dim) -> None:
        self.graph = Graph()
        self.build = Builder(self.graph)
        self.x = self.build.input("x", TensorType(DType.FLOAT32, shape))

    def c(self, *items: Any) -> Value:
        return self.build.constant(np.array(items, np.int64))

    def scalar(self, item: int) -> Value:
        return self.build.constant(np.array(item))

    def known(self, value: Value) -> Any:
        array = infer_graph(self.graph).get(value)
        return None if array is None else array.tolist()


def test_heads_are_split_for_attention_and_merged_again() -> None:
    """As exporters write it: Shape, Gather, Concat into Reshape; batch and length stay symbols."""
    w = World(N, S, 384)
    shape = w.build("Shape", w.x)
    batch, length = (w.build("Unsqueeze", w.build("Gather", shape, w.scalar(i)), w.c(0)) for i in (0, 1))
    split = w.build("Concat", batch, length, w.c(12), w.c(32), axis=0)
    heads = w.build("Transpose", w.build("Reshape", w.x, split), perm=(0, 2, 1, 3))
    assert heads.shape == (N, 12, S, 32)
    width = w.build("ReduceProd", w.build("Slice", w.build("Shape", heads), w.c(1), w.c(2)), keepdims=1)
    joined = w.build("Concat", w.build("Shape", w.x, end=2), w.build("Mul", width, w.c(32)), axis=0)
    assert w.known(joined) == [N, S, 384]
    assert w.build("Reshape", heads, joined).shape == (N, S, 384)


def test_expand_with_minus_one_where_equal() -> None:
    """PyTorch's expand(-1, n): Where(Equal(shape, -1), 1, shape). A dimension is never -1."""
    w = World(N, 3)
    wanted = w.build("Concat", w.build("Shape", w.x, end=1), w.c(-1), axis=0)
    ones = w.build("ConstantOfShape", w.c(2), value=np.ones(1, np.int64))
    equal = w.build("Equal", wanted, w.build("Mul", ones, w.c(-1)))
    assert w.known(equal) == [False, True]
    shape = w.build("Where", equal, ones, wanted)
    assert w.build("Expand", w.build.constant(np.zeros((1, 3), np.float32)), shape).shape == (N, 3)


def test_a_value_that_depends_on_a_symbol_is_not_known() -> None:
    w = World(N, 3)
    shape = w.build("Shape", w.x)
    for value in (
        w.build("Equal", shape, w.c(2, 3)),
        w.build("Equal", w.c(2, 3), shape),
        w.build("Greater", shape, w.c(1)),
        w.build("Sqrt", w.build("Cast", shape, to=DType.FLOAT32)),
        w.build("Cast", shape, to=DType.FLOAT64),
    ):
        assert w.known(value) is None


@pytest.mark.parametrize("s", [0, 3, 5, 63, 64, 65, 500])
def test_a_bound_is_right_on_both_of_its_sides(s: int) -> None:
    w = World(N, S)
    length = w.build("Shape", w.x, start=1)
    (least,), (most,) = (
        w.known(w.build("Min", length, w.c(64))),
        w.known(w.build("Max", w.build("Sub", length, w.c(5)), w.c(0))),
    )
    assert (evaluate(least, {"s": s}), evaluate(most, {"s": s})) == (min(s, 64), max(s - 5, 0))


def test_a_clamped_extent_that_must_equal_the_whole_is_the_whole() -> None:
    """If min(s, 64) must equal s, no run with s > 64 succeeds. min(s, 1) may broadcast instead."""
    w = World(N, S, 4)
    rows, length = (w.build("Shape", w.x, start=i, end=i + 1) for i in (0, 1))
    least, one = (w.build("Min", length, w.c(limit)) for limit in (64, 1))
    assert w.build("Reshape", w.x, w.build("Concat", rows, least, w.c(2), w.c(2), axis=0)).shape == (N, S, 2, 2)
    cut = [w.build("Slice", w.x, w.c(0), end, w.c(1)) for end in (least, one)]
    assert cut[0].shape == (N, S + 64 - maximum(64, S), 4)
    sums = [w.build("Add", w.x, each) for each in cut]
    assert sums[0].shape == (N, S, 4) and sums[1].shape not in ((N, S, 4), None)
    w.graph.outputs = sums[:1]
    assert 64 - S in assumptions(w.graph, infer_graph(w.graph), {"n", "s"})
    w.graph.outputs = sums[1:]
    assert 64 - S not in assumptions(w.graph, infer_graph(w.graph), {"n", "s"})


def test_the_maximum_of_two_sizes() -> None:
    w = World(N, S)
    rows, length = (w.build("Shape", w.x, start=i, end=i + 1) for i in (0, 1))
    assert w.known(w.build("Max", rows, length)) == [maximum(N, S)]
    assert w.known(w.build("Max", rows, w.build("Add", rows, length))) == [N + S]


def test_symbols_divide_and_ranges_count() -> None:
    w = World(4 * N, S)
    rows, length = (w.build("Gather", w.build("Shape", w.x), w.c(i)) for i in (0, 1))
    assert w.known(w.build("Div", rows, w.c(2))) == [2 * N]
    assert w.known(w.build("Div", length, w.c(2))) == [floor_div(S, 2)]
    scalar = w.build("Squeeze", length)
    assert w.build("Range", w.scalar(0), scalar, w.scalar(1)).shape == (S,)
    assert w.known(w.build("Size", w.x)) == 4 * N * S


def test_a_shape_may_be_split() -> None:
    w = World(N, S, 6)
    parts = w.build.emit("Split", w.build("Shape", w.x), outputs=3, axis=0)
    assert [w.known(part) for part in parts] == [[N], [S], [6]]


def test_numbers_without_symbols_are_plain_integers() -> None:
    w = World(N, 6)
    width = w.build("Gather", w.build("Shape", w.x), w.c(1))
    known = infer_graph(w.graph)[width]
    assert known.dtype == np.int64
    assert w.known(w.build("Sqrt", w.build("Cast", width, to=DType.FLOAT32))) == pytest.approx([6**0.5])


@pytest.mark.parametrize(
    ("starts", "ends", "steps", "expected"),
    [
        (0, 2**63 - 1, 1, N),
        (1, 2**63 - 1, 1, N - 1),
        (0, -1, 1, N - 1),
        (-2, 2**63 - 1, 1, 2),
        (0, N, 1, N),
        (0, 2**63 - 1, 2, floor_div(N + 1, 2)),
        (0, 10**9, 1, N),  # as tf2onnx writes it
        (1, 10**9, 1, N - 1),
    ],
)
def test_slices_of_a_symbolic_extent(starts: Any, ends: Any, steps: int, expected: Dim) -> None:
    w = World(N, 4)
    y = w.build("Slice", w.x, starts=(starts,), ends=(ends,), axes=(0,), steps=(steps,))
    assert y.shape == (expected, 4)


def test_a_length_that_may_be_clamped_gets_a_symbol_of_its_own() -> None:
    w = World(N, 4)
    y = w.build("Slice", w.x, starts=(0,), ends=(5,), axes=(0,))
    assert "n" not in y.tensor.symbols
    assert y.tensor.symbols


def test_the_first_element_of_a_symbolic_extent_is_supposed_to_exist() -> None:
    w = World(N, 4)
    y = w.build("Slice", w.x, starts=(0,), ends=(1,), axes=(0,))
    w.graph.outputs = [y]
    assert y.shape == (1, 4)
    assert assumptions(w.graph, infer_graph(w.graph), ["n"]) == (N - 1,)


def test_bounds_of_a_slice_count_from_the_end() -> None:
    """As in Flaubert's ids[:, -length:], and where a model cuts its past."""
    w = World(N, S + 3)
    size = w.build("Sub", w.build("Shape", w.x, start=1), w.c(3))
    last = w.build("Neg", size)
    one = w.c(1)
    tail = w.build("Slice", w.x, last, w.c(2**31), one, one)
    most = w.build("Slice", w.x, w.c(0), last, one, one)
    whole = w.build("Slice", w.x, w.build("Neg", w.build("Shape", w.x, start=1)), w.c(2**31), one, one)
    assert [value.shape for value in (tail, most, whole)] == [(N, S), (N, 3), (N, S + 3)]
    w.graph.outputs = [tail, most, whole]
    assert assumptions(w.graph, infer_graph(w.graph), ["s"]) == (S - 1,)


def test_splits_and_pads_of_a_symbolic_extent() -> None:
    w = World(4 * N, S)
    halves = w.build.emit("Split", w.x, outputs=2, axis=0)
    assert [y.shape for y in halves] == [(2 * N, S)] * 2
    assert w.build("Pad", w.x, pads=(0, 1, 0, 2)).shape == (4 * N, S + 3)
    assert w.build("Flatten", w.x, axis=0).shape == (1, 4 * N * S)
    assert w.build("Reshape", w.x, shape=(-1, 2, S)).shape == (2 * N, 2, S)
    assert w.build("Tile", w.x, repeats=(1, 3)).shape == (4 * N, 3 * S)


def test_shapes_that_only_data_gives_keep_their_rank() -> None:
    w = World(N, 4)
    shape = w.build.input("shape", TensorType(DType.INT64, (3,)))
    assert w.build("Reshape", w.x, shape).tensor.rank == 3
    assert w.build("ConstantOfShape", shape).tensor.rank == 3
    assert w.build("Expand", w.x, shape).tensor.rank == 3


@pytest.mark.sample(5)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 6])
@pytest.mark.parametrize(("less", "divisor", "more"), [(3, 2, 3), (0, -2, 9), (1, 3, 1), (0, 2, 0), (5, 4, 2)])
def test_quotients_of_counts_are_truncated(less: int, divisor: int, more: int, n: int) -> None:
    """The length is (n - less) / divisor + more; the quotient is rounded towards zero, also if it is negative."""
    w = World(N, 3)
    rows = w.build("Sub", w.build("Shape", w.x, end=1), w.c(less))
    length = w.build("Add", w.build("Div", rows, w.c(divisor)), w.c(more))
    w.graph.outputs = [w.build("ConstantOfShape", length), length]
    expected = int((n - less) / divisor) + more
    for optimize in (False, True):
        session = lathe.compile(w.graph.clone(), optimize=optimize, threads=1, tune="off")
        filled, counted = session.run({"x": np.zeros((n, 3), np.float32)}).values()
        assert (filled.shape, counted.tolist()) == ((expected,), [expected])


def test_a_count_divided_by_zero_is_not_known() -> None:
    w = World(N, 3)
    shape = w.build("Shape", w.x, end=1)
    assert w.known(w.build("Div", shape, w.c(0))) is None
    assert w.known(w.build("Mod", shape, w.c(0))) is None


@pytest.mark.sample(5)
@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("op", ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Max", "Min"])
def test_an_extent_may_be_zero(op: str, n: int) -> None:
    """No comparison of an extent with 0 or 1 takes it for 1 or more."""
    w = World(N, 3)
    shape = w.build("Shape", w.x, end=1)
    other = w.c(0, 1)
    w.graph.outputs = [w.build(op, shape, other), w.build(op, other, shape)]
    feeds = {"x": np.zeros((n, 3), np.float32)}
    numpy = {"Max": np.maximum, "Min": np.minimum, "LessOrEqual": np.less_equal, "GreaterOrEqual": np.greater_equal}
    ufunc = numpy.get(op) or getattr(np, op.lower())
    for optimize in (False, True):
        actual = lathe.compile(w.graph.clone(), optimize=optimize, threads=1, tune="off").run(feeds).values()
        for array, pair in zip(actual, (([n], [0, 1]), ([0, 1], [n])), strict=True):
            np.testing.assert_array_equal(array, ufunc(*pair))


def test_a_value_computed_from_numbers_alone_is_known() -> None:
    """An operator that cannot compute with symbols computes with the extents that are numbers."""
    w = World(N, 3, 4)
    extents = w.build("Slice", w.build("Shape", w.x), w.c(1), w.c(3))
    sums = w.build("CumSum", extents, w.scalar(0))
    assert w.known(sums) == [3, 7]
    assert w.known(w.build("CumSum", w.build("Shape", w.x), w.scalar(0))) is None
    assert w.known(w.build("Transpose", w.build("Reshape", w.build("Shape", w.x), shape=(3, 1)))) == [[N, 3, 4]]


_PADDED = """
    s{0} = Shape({0}) h{0} = Gather(s{0}, one) r{0} = Mod(h{0}, c4) d{0} = Sub(c4, r{0}) m{0} = Mod(d{0}, c4)
    u{0} = Unsqueeze(m{0}, front) w{0} = Concat <axis = 0> (front, front, front, u{0}, front, front)
    p{0} = Reshape(w{0}, pairs) q{0} = Slice(p{0}, last, least, front, last) t{0} = Transpose <perm = [1, 0]> (q{0})
    v{0} = Reshape(t{0}, last) y{0} = Pad({0}, v{0}) {1} = Relu(y{0})
"""  # as PyTorch's older exporter writes a padding of the height to a multiple of 4


@pytest.mark.parametrize("height", ["6", "H"])
def test_paddings_that_a_model_computes_one_after_the_other(height: str) -> None:
    """Each needs to be known for the next one's extents to be."""
    constants = """int64 one = {1}, int64 c4 = {4}, int64[1] front = {0}, int64[2] pairs = {-1, 2},
        int64[1] last = {-1}, int64[1] least = {-9223372036854775807}, int64[1] second = {1}"""
    body = _PADDED.format("x", "z") + "a = Slice(z, front, last, second)" + _PADDED.format("a", "y")
    data = model(f"float[N,{height},9] x => float[N,R,S] y", body, constants)
    runs = [{"x": normal(n, 6, 9)} for n in (1, 3)]
    with lathe.compile(data, threads=1, tune="off") as session:
        assert session.batching.batchable, session.batching.reason
        session.run(runs[0])
        assert "FALLBACK" not in session.explain()
    assert_like_onnx_runtime(data, *runs, *([{"x": normal(2, 9, 9)}] if height == "H" else []))
