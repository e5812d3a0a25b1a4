"""Numbers that a model rounds into buckets get ONNX Runtime's buckets, also at the borders."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.reference import interpret
from tests.core.small_models import assert_like_onnx_runtime, model, theirs

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


@pytest.mark.sample(5)
@pytest.mark.parametrize("divisor", [41.0, 49.0, 0.1, 3.0, 8.0])
@pytest.mark.parametrize("body", BUCKETS.values(), ids=BUCKETS)
def test_multiples_of_the_divisor(body: str, divisor: float) -> None:
    constants = f"float c = {{{divisor}}}, float one = {{1.0}}, float tenth = {{0.1}}"
    data = model("float[n] x => float[n] y", body, constants)
    multiples = np.arange(1000, dtype=np.float32) * np.float32(divisor)
    assert_like_onnx_runtime(data, {"x": multiples}, {"x": np.arange(1000, dtype=np.float32)}, tolerance=0)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("scale", [0.3, 0.017, 0.1, 1e-3, 0.25])
def test_numbers_between_two_integers_are_quantized_like_quotients(dtype: str, scale: float) -> None:
    """Numbers halfway between two integers times the scale, and their neighbours."""
    constants = f"float s = {{{scale}}}, {dtype} z = {{3}}, float[2] t = {{{scale}, 0.7}}, {dtype}[2] zz = {{3, 0}}"
    one = model(f"float[n] x => {dtype}[n] y", "y = QuantizeLinear(x, s, z)", constants)
    many = model(f"float[n,2] x => {dtype}[n,2] y", "y = QuantizeLinear <axis = 1> (x, t, zz)", constants)
    halves = (np.arange(-200, 300, dtype=np.float32) + np.float32(0.5)) * np.float32(scale)
    x = np.concatenate([halves, *(np.nextafter(halves, np.float32(end)) for end in (-np.inf, np.inf))])
    assert_like_onnx_runtime(one, {"x": x}, tolerance=0)
    assert_like_onnx_runtime(many, {"x": np.stack([x, x], 1)}, tolerance=0)


def test_activations_are_not_fused_before_a_comparison() -> None:
    """HardSwish of -1 is -0.3333333, the product of its parts -0.33333334."""
    parts = "a = Add(x, three) b = Clip(a, zero, six) c = Mul(x, b) d = Mul(c, sixth)"
    constants = "float three = {3.0}, float zero = {0.0}, float six = {6.0}, float sixth = {0.16666667}"
    limit = "float limit = {-0.33333334}"
    data = model(
        "float[n] x => float[n] y",
        f"{parts} t = LessOrEqual(d, limit) y = Cast <to = 1> (t)",
        f"{constants}, {limit}",
    )
    assert_like_onnx_runtime(data, {"x": np.arange(-4, 4, 0.01, np.float32)}, {"x": np.float32([-1, 1])}, tolerance=0)


@pytest.mark.parametrize("count", [3, 41, 49])
def test_a_mean_of_inputs_is_a_sum_times_a_reciprocal(count: int) -> None:
    """As in ONNX Runtime, in compiled code and in the reference."""
    data = model("float[n] x => float[n] y", f"m = Mean({', '.join(['x'] * count)}) y = Floor(m)")
    x = np.arange(1000, dtype=np.float32)
    assert_like_onnx_runtime(data, {"x": x}, tolerance=0)
    np.testing.assert_array_equal(interpret(lathe.load(data), {"x": x})["y"], theirs(data, {"x": x})["y"])


@pytest.mark.parametrize("size", [3, 7, 41])
@pytest.mark.parametrize(
    "body",
    [
        "m = GlobalAveragePool(x)",
        "m = AveragePool <kernel_shape = [{0}, {0}], pads = [1, 1, 1, 1]> (x)",
        "m = ReduceMean (x, axes)",
    ],
)
def test_means_are_quotients(body: str, size: int) -> None:
    data = model(
        f"float[n,2,{size},{size}] x => float[n,2,a,b] y", f"{body.format(size)} y = Floor(m)", "int64[2] axes = {2, 3}"
    )
    ones = np.ones((12, 2, size, size), np.float32)
    assert_like_onnx_runtime(data, {"x": ones * np.arange(12, dtype=np.float32)[:, None, None, None]}, tolerance=0)
