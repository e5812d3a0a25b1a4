"""Numbers that a model cuts into buckets fall into those that ONNX Runtime says, also at the borders."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.small_models import assert_like_onnx_runtime, model

BUCKETS = {
    "floor": "q = Div(x, c) y = Floor(q)",
    "whole": "q = Div(x, c) i = Cast <to = 6> (q) y = Cast <to = 1> (i)",
    "compared": "q = Div(x, c) t = GreaterOrEqual(q, one) y = Cast <to = 1> (t)",
    "over a sum": "q = Div(x, c) a = Add(q, one) y = Ceil(a)",
    "rest": "q = Div(x, c) y = Mod <fmod = 1> (q, one)",
    "thresholded": "q = Div(x, c) y = ThresholdedRelu <alpha = 1.0> (q)",
    "scaled twice": "a = Mul(x, tenth) b = Mul(a, c) y = Floor(b)",
    "in a branch": """
        s = ReduceSum <keepdims = 0> (x) t = Less(s, one) q = If(t) <
            then_branch = a () => (float[n] r) { r = Neg(x) },
            else_branch = b () => (float[n] r) { r = Div(x, c) }>
        y = Floor(q)""",
}


@pytest.mark.parametrize("divisor", [41.0, 49.0, 0.1, 3.0, 8.0])
@pytest.mark.parametrize("body", BUCKETS.values(), ids=BUCKETS)
def test_multiples_of_the_divisor(body: str, divisor: float) -> None:
    constants = f"float c = {{{divisor}}}, float one = {{1.0}}, float tenth = {{0.1}}"
    data = model("float[n] x => float[n] y", body, constants)
    multiples = np.arange(1000, dtype=np.float32) * np.float32(divisor)
    assert_like_onnx_runtime(data, {"x": multiples}, {"x": np.arange(1000, dtype=np.float32)}, tolerance=0)
