"""Operators of models under training whose weights or activations will be stored in few bits, or pruned.

Their results are those of the compressed model, and their gradients those of straight-through estimators (Bengio et al.
2013, https://arxiv.org/abs/1308.3432). They have no form in ONNX: `lathe.core.compress` makes and replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward, Rewrite
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import Kind, check_kind, normalize_axis, untouched_rows

_FLOAT32 = Kind("float32", frozenset({DType.FLOAT32}))
_SMALLEST = 1e-12  # of a scale
POWERS = 7  # magnitudes of a power-of-two code: 1, 1/2, ... 1/64 of the scale
_SCALED_CODES = ("uniform", "powers")
_CODES = ("binary", "ternary", "trained_ternary")
TERNARY_SHARE = 0.7  # of the mean magnitude: the threshold of TWN, section 2.1 of the paper
TRAINED_TERNARY_SHARE = 0.05  # of the greatest magnitude: the threshold of TTQ, section 4 of the paper


@register
class FakeQuantize(OpDef):
    """scale * code(x / scale), where scale = max(step * unit, 1e-12) is one number, or one per index of `axis`.

    The code is `uniform`: rounded, half to even, and clamped to `low` .. `high`; or `powers`: 0, or the nearest of
    +-1, +-1/2, .. +-1/64. The gradient of x passes where x / scale is within the limits (-1 and 1 for powers). That of
    `step` is the one of LSQ (Esser et al. 2020, https://arxiv.org/abs/1902.08153, equation 3) with respect to the
    scale, times `gradient_scale` / unit. `step` is float32 [1] or [C]; `unit` has as many numbers.
    """

    domain = "lathe"
    inputs = "x, step"
    outputs = "y"
    agreeing = True
    attrs = {
        "axis": 0,
        "code": "uniform",
        "low": Required("integer"),
        "high": Required("integer"),
        "unit": Required("numbers"),
        "gradient_scale": 1.0,
    }

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, _FLOAT32)
        check_kind(c, 1, _FLOAT32)
        x, step, count = c.tensor(0).dims, c.tensor(1).dims, len(c.attr("unit"))
        if c.attr("code") not in _SCALED_CODES:
            c.fail(f"code is {c.attr('code')!r}, expected one of {', '.join(_SCALED_CODES)}")
        if step != (count,):
            c.fail(f"step is {c.tensor(1)}, expected [{count}] for {count} units")
        if count > 1 and x[normalize_axis(c, c.attr("axis"), len(x))] != count:
            c.fail(f"x is {c.tensor(0)}, expected {count} along axis {c.attr('axis')}")
        return [c.tensor(0)]

    def reference(self, c: Call, x: Array, step: Array) -> Array:
        scale = np.maximum(step * np.asarray(c.attr("unit"), np.float32), np.float32(_SMALLEST))
        shape = [1] * x.ndim
        if step.size > 1:
            shape[c.attr("axis")] = -1
        scale = scale.reshape(shape)
        code = uniform_code if c.attr("code") == "uniform" else powers_code
        return np.asarray(code(x / scale, c.attr("low"), c.attr("high")) * scale, np.float32)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        rank = len(c.tensor(0).dims)
        touched = {c.attr("axis") % rank} if len(c.attr("unit")) > 1 else set()
        return untouched_rows(c, axes, touched)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        scale = self._scale(g)
        return [self._code(g, g.x() / scale) * scale]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        scale, dy = self._scale(g), g.dy()
        ratio = g.x() / scale
        low, high = (-1, 1) if g.attr("code") == "powers" else (g.attr("low"), g.attr("high"))
        is_inside = (ratio >= float(low)).op("And", ratio <= float(high))
        code = self._code(g, ratio)
        slope = code - is_inside.where(ratio, 0.0)
        factor = g.attr("gradient_scale") / np.asarray(g.attr("unit"), np.float32)
        total = (dy * slope).fit(scale.shape).reshape(g.x(1).shape)
        return [is_inside.where(dy, 0.0), total * g.writer.array(factor)]

    def _scale(self, g: Rewrite) -> Term:
        step, x = g.x(1), g.x(0)
        scale = (step * g.writer.array(np.asarray(g.attr("unit"), np.float32))).op("Max", _SMALLEST)
        axis = g.attr("axis") % max(x.rank, 1)
        many = len(g.attr("unit")) > 1
        return scale.reshape([scale.shape[0] if many and i == axis else 1 for i in range(x.rank)])

    def _code(self, g: Rewrite, ratio: Term) -> Term:
        if g.attr("code") == "uniform":
            return ratio.op("Round").op("Max", float(g.attr("low"))).op("Min", float(g.attr("high")))
        size = ratio.abs()
        total = (size >= _threshold(POWERS - 1)).where(_power(POWERS - 1), g.writer.zeros_like(ratio.value))
        for place in range(POWERS - 2, -1, -1):
            total = (size >= _threshold(place)).where(_power(place), total)
        return total * ratio.sign()


def _power(place: int) -> float:
    return 2.0**-place


def _threshold(place: int) -> float:
    """The least magnitude that is nearer to 2^-place than to the next smaller code."""
    return 0.5 * _power(place) if place == POWERS - 1 else 0.75 * _power(place)


def uniform_code(ratio: Array, low: int, high: int) -> Array:
    """The integers nearest to `ratio`, from `low` to `high`."""
    return np.rint(ratio).clip(low, high)


def powers_code(ratio: Array, low: int = -1, high: int = 1) -> Array:
    """0, or the nearest of +-1, +-1/2, .. +-1/64; `low` and `high` are not read."""
    total = np.zeros(ratio.shape, np.float32)
    for place in range(POWERS - 1, -1, -1):
        total = np.where(np.abs(ratio) >= np.float32(_threshold(place)), np.float32(_power(place)), total)
    return np.asarray(total * np.sign(ratio))


@register
class CodedWeight(OpDef):
    """Weights of two or three values for each index of `axis`, or for the whole tensor.

    `code` is `binary`: sign(w) times the mean magnitude, where sign(0) is 1 (XNOR-Net, Rastegari et al. 2016,
    https://arxiv.org/abs/1603.05279); `ternary`: 0 up to 0.7 of the mean magnitude, else sign(w) times the mean
    magnitude of the others (TWN, Li et al. 2016, https://arxiv.org/abs/1605.04711); or `trained_ternary`: 0 up to 0.05
    of the greatest magnitude of the tensor, else `scales[0]` for positive and -`scales[1]` for negative weights (TTQ,
    Zhu et al. 2016, https://arxiv.org/abs/1612.01064, equations 7 and 8).

    The gradient of w passes through: for `binary` times mean magnitude where |w| <= 1, plus that of the mean; for
    `trained_ternary` times the scale of each weight, 1 for zeros.
    """

    domain = "lathe"
    inputs = "w, scales?"
    outputs = "y"
    attrs = {"axis": 0, "code": Required("text")}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, _FLOAT32)
        if c.attr("code") not in _CODES:
            c.fail(f"code is {c.attr('code')!r}, expected one of {', '.join(_CODES)}")
        normalize_axis(c, c.attr("axis"), len(c.tensor(0).dims))
        if (c.attr("code") == "trained_ternary") != c.has_input(1):
            c.fail("scales: expected two numbers for the code trained_ternary, and none for others")
        if c.has_input(1) and c.tensor(1).dims != (2,):
            c.fail(f"scales are {c.tensor(1)}, expected [2]")
        return [TensorType(DType.FLOAT32, c.shape(0))]

    def reference(self, c: Call, w: Array, scales: Array | None = None) -> Array:
        signs, scale = coded(w, c.attr("code"), c.attr("axis"))
        if scales is not None:
            scale = np.where(signs > 0, scales[0], scales[1])
        return np.asarray(signs * scale, np.float32)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return [None] if all(axis is None for axis in axes) else MixesRows("its scale depends on all rows")

    def definition(self, g: Rewrite) -> Sequence[Term]:
        if g.attr("code") == "binary":
            return [_sign(g.x()) * self._mean(g, g.x().abs())]
        is_kept = self._is_kept(g)
        if g.attr("code") == "ternary":
            return [is_kept.where(g.x().sign(), 0.0) * self._kept_mean(g, is_kept)]
        positive, negative = self._scales(g)
        return [is_kept.where((g.x() > 0.0).where(positive, -negative), g.writer.zeros_like(g.x().value))]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        w, dy = g.x(), g.dy()
        if g.attr("code") == "ternary":
            return [dy]
        if g.attr("code") == "binary":
            through = (w.abs() <= 1.0).where(dy, 0.0) * self._mean(g, w.abs())
            sign = _sign(w)
            return [through + sign * self._mean(g, dy * sign)]
        is_kept, (positive, negative) = self._is_kept(g), self._scales(g)
        is_positive, is_negative = is_kept.op("And", w > 0.0), is_kept.op("And", w < 0.0)
        factor = is_positive.where(positive, is_negative.where(negative, 1.0))
        sums = [is_positive.where(dy, 0.0).sum().reshape((1,)), is_negative.where(-dy, 0.0).sum().reshape((1,))]
        return [dy * factor, sums[0].op("Concat", sums[1], axis=0)]

    def _others(self, g: Rewrite) -> list[int]:
        return [i for i in range(g.x().rank) if i != g.attr("axis") % g.x().rank]

    def _mean(self, g: Rewrite, term: Term) -> Term:
        return term.mean(self._others(g))

    def _is_kept(self, g: Rewrite) -> Term:
        size = g.x().abs()
        if g.attr("code") == "ternary":
            return size > self._mean(g, size) * TERNARY_SHARE
        return size > size.max() * TRAINED_TERNARY_SHARE

    def _kept_mean(self, g: Rewrite, is_kept: Term) -> Term:
        total = is_kept.where(g.x().abs(), 0.0).sum(self._others(g))
        return total / is_kept.cast(DType.FLOAT32).sum(self._others(g)).op("Max", 1.0)

    def _scales(self, g: Rewrite) -> tuple[Term, Term]:
        ones = (1,) * g.x().rank
        scales = g.x(1)
        return scales.slice(0, 0, 1).reshape(ones), scales.slice(0, 1, 2).reshape(ones)


def _sign(term: Term) -> Term:
    return (term >= 0.0).where(term.writer.fill(1.0, term.dtype, term.shape), -1.0)


def coded(w: Any, code: str, axis: int) -> tuple[Array, Array]:
    """The signs of weights (-1, 0, 1), and what each index of `axis` is multiplied by; 1 for `trained_ternary`."""
    others = tuple(i for i in range(w.ndim) if i != axis % w.ndim)
    size = np.abs(w)
    mean = size.mean(axis=others, keepdims=True)
    if code == "binary":
        return np.where(w >= 0, np.float32(1), np.float32(-1)), mean
    if code == "trained_ternary":
        is_kept = size > size.max() * np.float32(TRAINED_TERNARY_SHARE)
        return np.where(is_kept, np.sign(w), np.float32(0)), np.ones((1,) * w.ndim, np.float32)
    is_kept = size > mean * np.float32(TERNARY_SHARE)
    count = np.maximum(is_kept.sum(axis=others, keepdims=True), 1)
    scale = np.where(is_kept, size, 0).sum(axis=others, keepdims=True) / count
    return np.where(is_kept, np.sign(w), np.float32(0)), scale.astype(np.float32)


@register
class MaskedWeight(OpDef):
    """w * mask. The gradient of w is masked; that of `scores`, if present, is w times the gradient of the result.

    Movement pruning (Sanh et al. 2020, https://arxiv.org/abs/2005.07683, section 4) learns such scores, from which the
    mask follows outside of the graph. All three are float32 of one shape.
    """

    domain = "lathe"
    inputs = "w, mask, scores?"
    outputs = "y"
    agreeing = True

    def infer(self, c: Infer) -> Sequence[ValueType]:
        for index in range(len(c.node.inputs)):
            check_kind(c, index, _FLOAT32)
            if c.shape(index) != c.shape(0):
                c.fail(f"{self.input_name(index)} is {c.tensor(index)}, expected {c.tensor(0)}")
        return [c.tensor(0)]

    def reference(self, c: Call, w: Array, mask: Array, scores: Array | None = None) -> Array:
        return np.asarray(w * mask)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return [None] if all(axis is None for axis in axes) else MixesRows("weights have no rows of a batch")

    def definition(self, g: Rewrite) -> Sequence[Term]:
        return [g.x(0) * g.x(1)]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        dy = g.dy()
        return [dy * g.x(1), None, *([dy * g.x(0)] if g.has_input(2) else [])]


def step_scale(node: NodeView, step: Array) -> Array:
    """The scale of a FakeQuantize node: float32, of the shape of its step."""
    return np.asarray(np.maximum(step * np.asarray(node.attr("unit"), np.float32), np.float32(_SMALLEST)))
