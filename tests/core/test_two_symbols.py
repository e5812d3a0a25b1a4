"""Two symbols for extents that must be equal, or one of them 1: otherwise the model refuses the run."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError
from tests.core.small_models import assert_like_onnx_runtime, model, normal

GEMM = model("float[N,8] a, float[8,3] b, float[M,3] c => float[N,3] y", "y = Gemm <beta = 0.5> (a, b, c)")


def feeds(rows: int, others: int) -> dict[str, object]:
    return {"a": normal(rows, 8), "b": normal(8, 3), "c": normal(others, 3)}


def test_gemm_with_a_matrix_of_another_symbol() -> None:
    assert_like_onnx_runtime(GEMM, feeds(5, 5), feeds(1, 1), feeds(4, 1), feeds(2, 2))


@pytest.mark.parametrize("others", [5, 2])
@pytest.mark.parametrize("rows", [1, 4])
def test_gemm_with_a_matrix_that_does_not_fit(rows: int, others: int) -> None:
    with lathe.compile(GEMM, tune="off", new_shapes="wait") as session, pytest.raises(FeedError, match="Gemm"):
        session.run(feeds(rows, others))


BROADCASTS = {
    "Add": model("float[N,A,4] x, float[N,B,4] z => float[] y", "y = Add (x, z)"),
    "Where": model("bool[N,A,1] x, float[N,B,4] z => float[] y", "y = Where (x, z, z)"),
    "MatMul": model("float[N,A,2,4] x, float[N,B,4,2] z => float[] y", "y = MatMul (x, z)"),
    "Einsum": model("float[N,A,4] x, float[N,B,4] z => float[] y", "y = Einsum <equation = \"nak,nak->nak\"> (x, z)"),
    "Einsum with an ellipsis": model("float[N,A,4] x, float[N,B,4] z => float[] y",
                                     "y = Einsum <equation = \"...k,...k->...\"> (x, z)"),
    "Expand": model("float[N,A,4] x, float[N,B,4] z => float[] y", "s = Shape (z)  y = Expand (x, s)"),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", BROADCASTS)
def test_either_of_two_symbols_may_be_1(name: str) -> None:
    assert_like_onnx_runtime(
        BROADCASTS[name], *(_broadcast_feeds(name, a, b) for a, b in ((3, 3), (1, 3), (3, 1), (1, 1)))
    )


def _broadcast_feeds(name: str, a: int, b: int) -> dict[str, object]:
    if name == "MatMul":
        return {"x": normal(2, a, 2, 4), "z": normal(2, b, 4, 2)}
    return {"x": normal(2, a, 1) > 0 if name == "Where" else normal(2, a, 4), "z": normal(2, b, 4)}


def test_either_of_two_extents_that_only_a_run_shows_may_be_1() -> None:
    """Passes must not remove the Expand, although its input and its target have one symbol each."""
    split = model(
        "int64[2] sizes, float[N,4,K] x => float[] y",
        "p, q = Split <axis = 1> (x, sizes)  first = Slice (q, a, b, b)  s = Shape (q)  y = Expand (first, s)",
        "int64[1] a = {0}, int64[1] b = {1}",
    )
    assert_like_onnx_runtime(split, {"sizes": np.int64([2, 2]), "x": normal(2, 4, 3)})


def test_the_batch_after_the_other_symbol_has_a_value() -> None:
    """x[max(M,2):N] has N - 3 rows if M is 3, or none if that is negative; later counts of the rows agree."""
    cut = model(
        "float[N,M] x => float[] y, int64[1] rows",
        "m = Shape <start = 1> (x)  first = Max (m, two)  n = Shape <end = 1> (x)  y = Slice (x, first, n, zero)"
        "  rows = Shape <end = 1> (y)",
        "int64[1] two = {2}, int64[1] zero = {0}",
    )
    shapes = ((5, 3), (2, 3), (3, 3), (1, 1), (4, 1), (0, 3), (2, 4))
    assert_like_onnx_runtime(cut, *({"x": normal(*shape)} for shape in shapes))
