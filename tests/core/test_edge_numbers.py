"""Edge cases that ONNX leaves open: compiled code agrees with the reference operators."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import lathe
from tests.core.small_models import model, theirs


def both(data: bytes, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of compiled code, after comparing them with the reference operators."""
    with lathe.compile(data, tune="off") as session:
        found, expected = session.run(feeds), lathe.interpret(lathe.load(data), feeds)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    return found


@pytest.mark.parametrize("point", [0, 3])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_quantized_numbers_that_are_not_finite(dtype: str, point: int) -> None:
    body = "y = QuantizeLinear(x, scale, point)"
    data = model(f"float[n] x => {dtype}[n] y", body, f"float scale = {{0.5}}, {dtype} point = {{{point}}}")
    found = both(data, {"x": np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)})["y"]
    limits = np.iinfo(dtype)
    assert found.tolist() == [0, limits.max, limits.min, 2 + point]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_integers_by_zero(op: str, dtype: str) -> None:
    data = model(f"{dtype}[n] a, {dtype}[n] b => {dtype}[n] y", f"y = {op}(a, b)")
    a = np.array([-7, -5, 0, 5, 7], dtype)
    both(data, {"a": a, "b": np.array([2, 0, 0, 0, -2], dtype)})
    assert (
        both(data, {"a": a, "b": np.full(5, -2, dtype)})["y"].tolist()
        == theirs(data, {"a": a, "b": np.full(5, -2, dtype)})["y"].tolist()
    )


@pytest.mark.parametrize("x", [[0.0, 0.0], [1.0, 2.0], [-3.0, 1.0]])
def test_dynamic_quantization(x: list[float]) -> None:
    data = model("float[n] x => uint8[n] y, float scale, uint8 point", "y, scale, point = DynamicQuantizeLinear(x)")
    feeds = {"x": np.array(x, np.float32)}
    expected = ReferenceEvaluator(onnx.load_from_string(data)).run(None, feeds)
    for got, want in zip(both(data, feeds).values(), expected, strict=True):
        np.testing.assert_allclose(got, want, 1e-6)
