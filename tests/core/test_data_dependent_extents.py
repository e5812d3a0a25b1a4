"""Data-dependent extents: the compiler assumes nothing about them, since they are unknown before the run."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError
from tests.core.small_models import assert_like_onnx_runtime, model, normal, untyped

# %part has as many elements as `end` says.
BODIES = {
    "part[-1:]": "y = Slice (part, minus, far, zero)",
    "part[2:]": "y = Slice (part, two, far, zero)",
    "part[:-2]": "y = Slice (part, zero, minus_two, zero)",
    "part padded by -1": "y = Pad (part, cut)",
    "as many as part, less 2": "s = Shape (part)  t = Sub (s, two)  most = Max (t, zero)  y = ConstantOfShape (most)",
    "half of one less": "s = Shape (part)  less = Sub (s, one)  y = Div (less, minus_two)",
}
CONSTANTS = """int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] minus = {-1},
    int64[1] minus_two = {-2}, int64[1] far = {9223372036854775807}, int64[2] cut = {-1, 0}"""


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_data_dependent_extents_agree_with_onnx_runtime(body: str) -> None:
    data = model(
        "int64[K] x, int64[1] end => int64[] z", f"part = Slice (x, zero, end)  {body}  z = Identity (y)", CONSTANTS
    )
    if "ConstantOfShape" in body:
        data = model("int64[K] x, int64[1] end => float[] y", f"part = Slice (x, zero, end)  {body}", CONSTANTS)
    ends = (3, 4, 1) if "Pad" in body else (3, 0, 1, 2, 5)
    assert_like_onnx_runtime(data, *({"x": np.arange(5, 10), "end": np.int64([end])} for end in ends))


def test_in_a_nested_graph_that_reads_the_extent_alone() -> None:
    data = model(
        "float[N,1] x, int64 last => float[] y",
        "counted = Range (first, last, step)  y = Scan <num_scan_inputs = 1,"
        " body = each (float[1] row) => (float[?] more) { extent = Shape (counted)"
        " rest = Slice (table, extent, far, zero)  total = ReduceSum (rest)  more = Add (row, total) }> (x)",
        CONSTANTS + ", int64 first = {1}, int64 step = {2}, float[6] table = {1, 2, 4, 8, 16, 32}",
    )
    x = np.float32([[1], [2]])
    assert_like_onnx_runtime(data, *({"x": x, "last": np.array(last)} for last in (5, 2, 1, 9)))


def test_a_branch_views_a_value_renamed_by_the_layout_pass() -> None:
    """The unknown width of a convolution is a symbol named after its node; no attribute of a branch may contain it."""
    constants = "int64[2] ends = {0, 1}, float[3,2,1,3] w = {" + ", ".join(str(k % 5 - 2) for k in range(18)) + "}"
    body = """
        k = Compress <axis = 3> (x, keep) h = Conv(k, w) r = Relu(h)
        y = If(flag) <
            then_branch = g1 () => (float a) { u = Unsqueeze(r, ends) a = Squeeze(u, ends) },
            else_branch = g2 () => (float b) { v = Unsqueeze(r, ends) m = Neg(v) b = Squeeze(m, ends) }>"""
    data = untyped(model("float[N,2,1,9] x, bool[9] keep, bool flag => float y", body, constants))
    keep = np.arange(9) % 4 != 1
    runs = [{"x": normal(2, 2, 1, 9), "keep": keep, "flag": np.array(flag)} for flag in (True, False)]
    assert_like_onnx_runtime(data, *runs)


def test_of_two_branches_the_one_that_fits_is_compiled() -> None:
    """For example a model for two sample rates, where the window size fits only one branch."""
    constants = "int64 rate = {16}, float[4,2] w = {1, 2, 3, 4, 5, 6, 7, 8}, float[3,2] v = {1, 2, 3, 4, 5, 6}"
    body = """
        wide = Equal(hertz, rate)
        y = If(wide) <
            then_branch = g1 () => (float a) { a = MatMul(x, w) },
            else_branch = g2 () => (float b) { b = MatMul(x, v) }>"""
    data = model("float[N,K] x, int64 hertz => float[N,2] y", body, constants)
    runs = [{"x": normal(n, size), "hertz": np.array(hertz)} for n, size, hertz in ((2, 4, 16), (1, 3, 8), (3, 4, 16))]
    assert_like_onnx_runtime(data, *runs)
    with lathe.compile(data, threads=1, tune="off", new_shapes="wait") as session:
        session.run(runs[0])
        assert "FALLBACK" not in session.explain()
        with pytest.raises(FeedError, match="whose else_branch does not fit these shapes"):
            session.run({**runs[0], "hertz": np.array(8)})
