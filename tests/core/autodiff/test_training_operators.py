"""The operators of quantization-aware training and pruning: results and gradients of the papers' formulas in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.autodiff import gradients
from lathe.core.errors import ModelError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.terms import Term, Writer
from lathe.core.reference import interpret
from tests.random_numbers import RNG

F = np.float32


def graph_of(op: str, *arrays: np.ndarray, **attrs: Any) -> Graph:
    """An operator on inputs x0, x1, ..; its result times an input `dy`, so that `dy` is the gradient of the result."""
    graph = Graph("g")
    writer = Writer(graph)
    terms = [writer.input(f"x{place}", TensorType(DType.FLOAT32, array.shape)) for place, array in enumerate(arrays)]
    result = Term(writer, writer.emit(op, [term.value for term in terms], attrs)[0])
    dy = writer.input("dy", TensorType(DType.FLOAT32, result.shape))
    graph.outputs = [result.value, (result * dy).value]
    return graph


def results(op: str, *arrays: np.ndarray, **attrs: Any) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """The result, dy, and the gradients of all inputs; interpreted, and the same compiled."""
    graph = graph_of(op, *arrays, **attrs)
    names = [f"x{place}" for place in range(len(arrays))]
    back = gradients(graph, of=graph.outputs[1].name, with_respect_to=names)
    feeds = dict(zip(names, arrays, strict=True)) | {"dy": RNG.standard_normal(arrays[0].shape).astype(F)}
    interpreted = list(interpret(back, feeds).values())
    with lathe.compile(back, threads=1, tune="off") as session:
        compiled = list(session.run(feeds).values())
        assert "0 on the reference" in session.explain()
    for mine, other in zip(compiled, interpreted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
    return compiled[0], feeds["dy"], compiled[2:]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("axis", "count"), [(0, 1), (0, 6), (1, 4), (-1, 5)])
@pytest.mark.parametrize(("low", "high"), [(-128, 127), (0, 255), (-8, 7), (-1, 1)])
def test_learned_steps_have_the_gradients_of_their_paper(axis: int, count: int, low: int, high: int) -> None:
    """LSQ, equations 1 to 3: with s the step size and v the number, all in float64."""
    x = (RNG.standard_normal((6, 4, 5)) * 3).astype(F)
    unit = tuple(float(F(each)) for each in RNG.uniform(0.5, 2, count) * 4 / max(high, 2))
    step = RNG.uniform(0.8, 1.2, count).astype(F)
    got, dy, (dx, dstep) = results(
        "FakeQuantize", x, step, axis=axis, low=low, high=high, unit=unit, gradient_scale=0.25
    )
    shape = [1, 1, 1]
    shape[axis] = count
    s = (step * np.array(unit, F)).astype(float).reshape(shape)
    v = x / s
    inside = (v >= low) & (v <= high)
    np.testing.assert_allclose(got, np.rint(v).clip(low, high) * s, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, dy * inside, rtol=1e-5)
    slope = np.where(v <= low, low, np.where(v >= high, high, np.rint(v) - v))
    others = tuple(i for i in range(3) if shape[i] == 1)
    expected = (dy * slope).sum(axis=others).reshape(-1) * 0.25 / np.array(unit)
    np.testing.assert_allclose(dstep, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_powers_of_two_are_the_nearest() -> None:
    """Against a search over all 15 values."""
    x = (RNG.standard_normal((8, 50)) * 0.4).astype(F)
    step, unit = np.ones(8, F), tuple(float(F(each)) for each in RNG.uniform(0.5, 2, 8))
    got, dy, (dx, _) = results("FakeQuantize", x, step, axis=0, code="powers", low=-1, high=1, unit=unit)
    magnitudes = 2.0 ** -np.arange(7)
    values = np.concatenate([[0], magnitudes, -magnitudes])
    scale = np.array(unit, F)[:, None]
    distance = np.abs(x[..., None] / scale[..., None] - values)
    np.testing.assert_allclose(got, values[distance.argmin(axis=-1)] * scale, rtol=1e-6)
    np.testing.assert_array_equal(dx, np.where(np.abs(x / scale) <= 1, dy, 0))


def test_binary_weights() -> None:
    w = RNG.standard_normal((6, 4, 3)).astype(F)
    got, dy, (dw,) = results("CodedWeight", w, code="binary", axis=0)
    mean = np.abs(w).mean(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(got, np.where(w >= 0, 1, -1) * mean, rtol=1e-6)
    through = dy * mean * (np.abs(w) <= 1)
    of_mean = np.sign(w) * (dy * np.sign(w)).mean(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(dw, through + of_mean, rtol=1e-4, atol=1e-5)


def test_ternary_weights_minimise_the_error_for_their_threshold() -> None:
    w = RNG.standard_normal((6, 40)).astype(F)
    got, dy, (dw,) = results("CodedWeight", w, code="ternary", axis=0)
    for row, mine in zip(w, got, strict=True):
        kept = np.abs(row) > 0.7 * np.abs(row).mean()
        scale, *_ = np.linalg.lstsq((np.sign(row) * kept)[:, None].astype(float), row, rcond=None)
        np.testing.assert_allclose(mine, np.sign(row) * kept * scale, rtol=1e-5)
    np.testing.assert_array_equal(dw, dy)


def test_trained_ternary_weights() -> None:
    """TTQ, equations 6 to 8."""
    w, scales = RNG.standard_normal((9, 7)).astype(F), np.array([0.75, 1.5], F)
    got, dy, (dw, dscales) = results("CodedWeight", w, scales, code="trained_ternary")
    threshold = 0.05 * np.abs(w).max()
    positive, negative = w > threshold, w < -threshold
    np.testing.assert_array_equal(got, positive * F(0.75) - negative * F(1.5))
    np.testing.assert_allclose(dw, dy * np.where(positive, 0.75, np.where(negative, 1.5, 1)), rtol=1e-6)
    np.testing.assert_allclose(dscales, [dy[positive].sum(), -dy[negative].sum()], rtol=1e-4)


@pytest.mark.parametrize("has_scores", [False, True])
def test_masks_stop_gradients_but_not_those_of_scores(has_scores: bool) -> None:
    w, mask = RNG.standard_normal((6, 5)).astype(F), (RNG.random((6, 5)) > 0.5).astype(F)
    scores = [RNG.standard_normal((6, 5)).astype(F)] if has_scores else []
    got, dy, (dw, dmask, *rest) = results("MaskedWeight", w, mask, *scores)
    np.testing.assert_array_equal(got, w * mask)
    np.testing.assert_array_equal(dw, dy * mask)
    assert not dmask.any()
    for dscores in rest:
        np.testing.assert_array_equal(dscores, dy * w)


@pytest.mark.parametrize(
    ("op", "arrays", "attrs", "complaint"),
    [
        ("FakeQuantize", [(4, 3), (2,)], {"unit": (1.0,)}, r"step is float32\[2\], expected \[1\]"),
        ("FakeQuantize", [(4, 3), (3,)], {"unit": (1.0,) * 3}, r"expected 3 along axis 0"),
        ("FakeQuantize", [(4, 3), (1,)], {"unit": (1.0,), "code": "log"}, "code is 'log', expected one of uniform"),
        ("CodedWeight", [(4, 3)], {"code": "five"}, "code is 'five', expected one of binary"),
        ("CodedWeight", [(4, 3)], {"code": "trained_ternary"}, "scales: expected two numbers"),
        ("CodedWeight", [(4, 3), (3,)], {"code": "trained_ternary"}, r"scales are float32\[3\], expected \[2\]"),
        ("MaskedWeight", [(4, 3), (3, 4)], {}, r"mask is float32\[3,4\], expected float32\[4,3\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(op: str, arrays: Any, attrs: Any, complaint: str) -> None:
    limits = {"low": -8, "high": 7} if op == "FakeQuantize" else {}
    with pytest.raises(ModelError, match=complaint):
        graph_of(op, *(np.zeros(shape, F) for shape in arrays), **limits, **attrs)
