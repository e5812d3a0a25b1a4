"""Two names for extents that must be equal: such a model runs where they are, and refuses to where they are not."""

from __future__ import annotations

import pytest

import core
from core.errors import FeedError
from tests.core.small_models import assert_like_onnx_runtime, model, normal

GEMM = model("float[N,8] a, float[8,3] b, float[M,3] c => float[N,3] y", "y = Gemm <beta = 0.5> (a, b, c)")


def feeds(rows: int, others: int) -> dict[str, object]:
    return {"a": normal(rows, 8), "b": normal(8, 3), "c": normal(others, 3)}


def test_gemm_with_a_matrix_of_another_symbol() -> None:
    assert_like_onnx_runtime(GEMM, feeds(5, 5), feeds(1, 1), feeds(4, 1), feeds(2, 2))


@pytest.mark.parametrize("others", [5, 2])
@pytest.mark.parametrize("rows", [1, 4])
def test_gemm_with_a_matrix_that_does_not_fit(rows: int, others: int) -> None:
    with core.compile(GEMM, tune="off", new_shapes="wait") as session, pytest.raises(FeedError, match="Gemm"):
        session.run(feeds(rows, others))
