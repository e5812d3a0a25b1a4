"""Models that slice along the batch, with batches smaller and larger than the slice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lathe
from lathe.core.compiler.compile import compile_to
from lathe.core.compiler.options import make_options
from lathe.core.errors import FeedError
from lathe.core.ir.dim import Dim, evaluate, symbol
from lathe.core.ops.tensor.slicing import slice_length
from tests.core.small_models import assert_like_onnx_runtime, model, normal, untyped

N = symbol("n")
NUMBERS = ", ".join(f"int64[1] c{i} = {{{i}}}" for i in range(9))
CONSTANTS = f"{NUMBERS}, int64[1] m1 = {{-1}}, int64[1] m3 = {{-3}}, int64[1] far = {{9223372036854775807}}"
TABLE = f"{CONSTANTS}, float[5,4] table = {{{', '.join(str(i / 4) for i in range(20))}}}"
ROWS = "s = Shape <start = 0, end = 1> (x)"

# The rows that are taken of x [n, 4], or of a table of five rows.
SLICES = {
    "x[2:]": "y = Slice(x, c2, far, c0)",
    "x[:-1]": "y = Slice(x, c0, m1, c0)",
    "x[3:-1]": "y = Slice(x, c3, m1, c0)",
    "x[-3:]": "y = Slice(x, m3, far, c0)",
    "x[1:n+1]": f"{ROWS} e = Add(s, c1) y = Slice(x, c1, e, c0)",
    "x[0:2n]": f"{ROWS} e = Mul(s, c2) y = Slice(x, c0, e, c0)",
    "x[n:2n]": f"{ROWS} e = Mul(s, c2) y = Slice(x, s, e, c0)",
    "x[1:-1:2]": "y = Slice(x, c1, m1, c0, c2)",
    "x[-n:]": f"{ROWS} e = Neg(s) y = Slice(x, e, far, c0)",
    "table[0:n]": f"{ROWS} y = Slice(table, c0, s, c0)",
    "table[n:]": f"{ROWS} y = Slice(table, s, far, c0)",
    "x[2:] and a step behind": "a = Slice(x, c2, far, c0) b = Exp(a) y = ReduceSum(b, c1)",
    "x[1:] - x[:-1]": "a = Slice(x, c1, far, c0) b = Slice(x, c0, m1, c0) y = Sub(a, b)",
    "the shape of x[-3:]": "a = Slice(x, m3, far, c0) t = Shape(a) y = ConstantOfShape(t)",
}


@pytest.mark.parametrize("body", SLICES.values(), ids=SLICES)
def test_bounds_are_clamped(body: str) -> None:
    width = "M, K" if "Sum" in body else "M, 4"
    data = model(f"float[n,4] x => float[{width}] y", body, TABLE)
    assert_like_onnx_runtime(data, *({"x": normal(n, 4)} for n in (5, 1, 2, 3, 4, 0, 7, 41)))


def test_from_an_artifact(tmp_path: Path) -> None:
    """The code's assumptions are stored with it."""
    data = model("float[n,4] x => float[m,4] y", SLICES["x[2:]"], TABLE)
    path = tmp_path / "model.lathe"
    compile_to(path, lathe.load(data), make_options(cache_dir=tmp_path, tune="off"))
    with lathe.load_compiled(path, cache_dir=tmp_path) as session:
        for n in (1, 0, 4, 2):
            assert session.run({"x": normal(n, 4)})["y"].shape == (max(n - 2, 0), 4)


def test_a_part_of_a_batch_is_not_the_batch() -> None:
    """x[1:n+1] has other rows than x: requests do not share a batch."""
    data = model("float[n,4] x => float[m,4] y", SLICES["x[1:n+1]"], TABLE)
    with lathe.compile(data, tune="off") as session:
        assert not session.batching.batchable
        assert session.run({"x": normal(5, 4)})["y"].shape == (4, 4)


REFUSED = {
    "Split": f"{ROWS} r = Sub(c8, s) z = Concat <axis = 0> (s, r) a, y = Split <axis = 1> (w, z)",
    "Pad": "p = Constant <value_ints = [-2, 0, 0, 0]> () y = Pad(x, p)",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("op", REFUSED)
def test_the_error_of_an_impossible_batch_names_the_node(op: str) -> None:
    """A Split into parts of n and 8 - n, and a Pad by -2."""
    data = model("float[n,4] x, float[2,8] w => float[k,m] y", REFUSED[op], CONSTANTS)
    fits, refused = (3, 9) if op == "Split" else (3, 1)
    with lathe.compile(data, tune="off") as session:
        session.run({"x": normal(fits, 4), "w": normal(2, 8)})
        with pytest.raises(FeedError, match=rf"a batch of {refused} does not fit.*\({op}\)"):
            session.run({"x": normal(refused, 4), "w": normal(2, 8)})
        session.run({"x": normal(fits, 4), "w": normal(2, 8)})


BOUNDS: list[tuple[Dim, Dim]] = [
    (0, N), (1, N + 1), (0, N * 2), (N, N * 2), (2, 2**31), (-3, 2**31), (0, -1), (-(2**63), N),
]  # fmt: skip


@pytest.mark.parametrize(("start", "end"), BOUNDS)
def test_lengths(start: Dim, end: Dim) -> None:
    """If no assumption is broken, a slice has Python's length."""
    cut = slice_length(N, start, end, 1)
    assert cut is not None
    for n in range(4, 9):
        a, b = (evaluate(bound, {"n": n}) for bound in (start, end))
        assert evaluate(cut.length, {"n": n}) == len(np.arange(n)[a:b])


def test_a_part_of_negative_length_is_refused_when_it_is_reached() -> None:
    """Five columns do not split into four parts of two; only one of the branches splits."""
    split = "then_branch = g () => (float[n,k] r) { a, b, c, r = Split <axis = 1, num_outputs = 4> (x) }"
    other = "else_branch = h () => (float[n,j] r) { r = Neg(x) }"
    data = untyped(model("float[n,5] x, bool t => float[n,m] y", f"y = If(t) <{split}, {other}>"))
    with lathe.compile(data, tune="off") as session:
        x = normal(2, 5)
        np.testing.assert_array_equal(session.run({"x": x, "t": np.array(False)})["y"], -x)
        with pytest.raises(FeedError, match=r"\(Split\): an extent of 5 does not split into \[2, ?2, ?2, ?-1\]"):
            session.run({"x": x, "t": np.array(True)})


def test_an_unused_node_assumes_nothing() -> None:
    """The unused node slices the first N of 4 columns, for N rows."""
    graph = model(
        "float[N,4] x => float[N,4] y",
        "rows = Shape <end = 1> (x)  unread = Slice (x, zero, rows, one)  y = Relu (x)",
        "int64[1] zero = {0}, int64[1] one = {1}",
    )
    with lathe.compile(graph, tune="off") as session:
        assert session.batching.batchable
        assert session.batching.supposed == ()


NUMBERS = "int64[1] zero = {0}, int64[1] one = {1}, int64[1] four = {4}"
AFTER_PASSES = {
    "a range whose start is folded": (
        "float[N,4] x => int64[] y",
        "rows = Shape <end = 1> (x)  t = Greater (four, zero)  start = Where (t, one, zero)  s = Squeeze (start)"
        "  e = Squeeze (rows)  o = Squeeze (one)  y = Range (s, e, o)",
    ),
    "a slice in a scan": (
        "float[N,4] x, int64[4] v => int64[] y",
        "columns = Transpose (x)  y = Scan <num_scan_inputs = 1, body = each (float[N] column) => (int64[?] cut)"
        " { rows = Shape <end = 1> (x)  more = Add (rows, one)  cut = Slice (v, zero, more, zero) }> (columns)",
    ),
}


@pytest.mark.parametrize("name", AFTER_PASSES)
def test_facts_found_by_passes_are_assumed_too(name: str) -> None:
    """Rows that the code for all batches does not fit get code of their own."""
    signature, body = AFTER_PASSES[name]
    data = model(signature, body, NUMBERS)
    feeds = {"x": normal(0, 4), "v": np.arange(4)}
    feeds = feeds if "v" in signature else {"x": feeds["x"]}
    assert_like_onnx_runtime(data, *({**feeds, "x": normal(n, 4)} for n in (5, 0, 1, 7, 2)))


def test_artifacts_of_batch_limited_code_contain_the_graph(tmp_path: Path) -> None:
    data = model(*AFTER_PASSES["a range whose start is folded"], NUMBERS)
    compile_to(tmp_path / "model.lathe", lathe.load(data), make_options(cache_dir=tmp_path, tune="off"))
    with lathe.load_compiled(tmp_path / "model.lathe", cache_dir=tmp_path) as session:
        assert [len(session.run({"x": normal(n, 4)})["y"]) for n in (5, 0, 3, 0)] == [4, 0, 2, 0]


def test_a_branch_for_another_rank_assumes_nothing() -> None:
    """The rank of %x shows once K has a value; the branch for rank 3 fits no other."""
    data = model(
        "float[N,2] x, int64[K] extents => float[] y",
        "z = Reshape (x, extents)  shape = Shape (z)  rank = Size (shape)  t = Equal (rank, three)"
        "  y = If (t) <then_branch = a () => (float[?,?] p) { s = Reshape (shape, vector)  p = Reshape (z, s) },"
        "  else_branch = b () => (float[?] q) { q = Identity (z) }>",
        "int64 three = {3}, int64[1] vector = {3}",
    )
    assert_like_onnx_runtime(data, *({"x": normal(4, 2), "extents": np.int64(to)} for to in ([4, 2], [2, 2, 2], [8])))
