"""Correct but unusual plans. The checker, which is on in all tests, must accept them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.small_models import assert_like_onnx_runtime, model, normal

MODELS = {
    "a constant in another shape": (
        model("float v => int64[] y", "s = Size (v)  t = Greater (s, k)  c = If (t) <then_branch = a () => (int64 p)"
              " { p = Identity (k) }, else_branch = b () => (int64[1] q) { q = Reshape (k, one) }>"
              "  r = Reshape (c, one)  y = Concat <axis = 0> (r, r)", "int64 k = {-1}, int64[1] one = {1}"),
        {"v": np.array(2, np.float32)},
    ),
    "a product of a part with one column": (
        model("float[N,M,8] x => float[] y", "u = Unsqueeze (x, c)  s = Slice (u, a, d, b)  y = MatMul (s, w)",
              "int64[1] a = {0}, int64[1] b = {2}, int64[1] c = {3}, int64[1] d = {4}, float[1,1] w = {0.5}"),
        {"x": normal(2, 3, 8)},
    ),
    "a product of a part with one row and one column, inside of another result": (
        model("float[N,1] x, float[1,2] v => float[N,2] y", "a, b = Split <axis = 1> (v)"
              "  c = Gemm <transB = 1, beta = 2.0> (x, b, k)  y = Concat <axis = 1> (x, c)", "float[1] k = {0.5}", 14),
        {"x": normal(3, 1), "v": normal(1, 2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_checker_accepts_an_unusual_plan(name: str) -> None:
    assert_like_onnx_runtime(MODELS[name][0], MODELS[name][1])
