"""Activation functions."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, sqrt

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef import scalar_math
from lathe.core.ops.opdef.backward import Backward, Rewrite, Slope
from lathe.core.ops.opdef.numeric import erf
from lathe.core.ops.opdef.registry import Call, Infer, NodeView, register
from lathe.core.ops.opdef.scalar import Operand, ScalarOps
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import NUMBER, as_computed, broadcast_shapes, check_kind, same_dtype
from lathe.core.ops.tensor.elementwise import Elementwise, FloatUnary, Unary


class Activation(FloatUnary):
    """Family base: `formula` of one input, computed in float32 or float64, and cast to the input's element type."""

    def formula(self, c: NodeView, x: Array) -> Array:
        raise NotImplementedError

    def reference(self, c: Call, x: Array) -> Array:
        return np.asarray(self.formula(c, as_computed(x))).astype(x.dtype)


@register
class Relu(Unary):
    """max(x, 0), also for integers."""

    accepts = NUMBER

    def reference(self, c: Call, x: Array) -> Array:
        return np.maximum(x, x.dtype.type(0))

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.max(x[0], 0)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """dY where the output is positive, otherwise 0: reads the output, so that the input need not stay in memory."""
        return [(g.y() > 0).where(g.dy(), 0)]


@register
class LeakyRelu(Activation):
    attrs = {"alpha": 0.01}

    def formula(self, c: NodeView, x: Array) -> Array:
        return np.where(x < 0, x * c.attr("alpha"), x)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.select(e.lt(x[0], 0.0), e.mul(x[0], c.attr("alpha")), x[0])

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [(g.x() < 0).where(g.dy() * g.attr("alpha"), g.dy())]


@register
class PRelu(Elementwise):
    """x where it is not negative, otherwise `slope` * x; `slope` broadcasts to X and has at most its rank."""

    accepts = NUMBER
    inputs = "X, slope"
    shaped_by = 0
    outputs = "Y"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = same_dtype(c, range(2))
        check_kind(c, 0, self.accepts)
        shape, x = broadcast_shapes(c, [c.shape(0), c.shape(1)]), c.shape(0)
        if shape is not None and x is not None and len(shape) != len(x):
            c.fail(f"slope {c.tensor(1)} does not broadcast to X {c.tensor(0)}")
        return [TensorType(dtype, shape)]

    def reference(self, c: Call, x: Array, slope: Array) -> Array:
        return np.where(x < 0, x * slope, x).astype(x.dtype)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.select(e.lt(x[0], 0), e.mul(x[0], x[1]), x[0])

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        x, slope, dy = g.x(0), g.x(1), g.dy()
        negative = x < 0
        return [negative.where(dy * slope, dy), negative.where(dy * x, 0)]


@register
class Elu(Activation):
    attrs = {"alpha": 1.0}

    def formula(self, c: NodeView, x: Array) -> Array:
        return np.where(x < 0, c.attr("alpha") * np.expm1(x), x)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.select(e.lt(x[0], 0.0), e.mul(e.sub(e.exp(x[0]), 1.0), c.attr("alpha")), x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        alpha = g.attr("alpha")
        return [(g.x() < 0).where(alpha * g.x().op("Min", 0.0).exp(), 1.0)]


@register
class Selu(Activation):
    attrs = {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}

    def formula(self, c: NodeView, x: Array) -> Array:
        return c.attr("gamma") * np.where(x <= 0, c.attr("alpha") * np.expm1(x), x)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        curve = e.mul(e.sub(e.exp(x[0]), 1.0), c.attr("alpha"))
        return e.mul(e.select(e.le(x[0], 0.0), curve, x[0]), c.attr("gamma"))

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        alpha, gamma = g.attr("alpha"), g.attr("gamma")
        return [(g.x() > 0).where(gamma, alpha * gamma * g.x().op("Min", 0.0).exp())]


@register
class Celu(Activation):
    attrs = {"alpha": 1.0}

    def formula(self, c: NodeView, x: Array) -> Array:
        alpha = c.attr("alpha")
        return np.maximum(x, 0) + np.minimum(0, alpha * np.expm1(x / alpha))

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        curve = e.mul(e.sub(e.exp(e.mul(x[0], 1 / c.attr("alpha"))), 1.0), c.attr("alpha"))
        return e.add(e.max(x[0], 0.0), e.min(curve, 0.0))

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [(g.x() / g.attr("alpha")).op("Min", 0.0).exp()]


@register
class Gelu(Activation):
    """Gelu by erf (`approximate` "none") or by tanh ("tanh")."""

    rounds_freely = True
    attrs = {"approximate": "none"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        if c.attr("approximate") not in ("none", "tanh"):
            c.fail(f"attribute 'approximate' is '{c.attr('approximate')}', expected 'none' or 'tanh'")
        return super().infer(c)

    def formula(self, c: NodeView, x: Array) -> Array:
        if c.attr("approximate") == "tanh":
            return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
        return 0.5 * x * (1 + erf(x / sqrt(2)))

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        half = e.mul(x[0], 0.5)
        if c.attr("approximate") == "tanh":
            slope = e.add(e.mul(e.mul(x[0], x[0]), 0.044715 * sqrt(2 / pi)), sqrt(2 / pi))
            return e.fma(half, e.tanh(e.mul(x[0], slope)), half)
        return e.fma(half, e.erf(e.mul(x[0], 1 / sqrt(2))), half)

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        x = g.x()
        if g.attr("approximate") == "tanh":
            inner = (x + 0.044715 * x * x.square()) * sqrt(2 / pi)
            bend = inner.op("Tanh")
            return [0.5 * (1 + bend) + 0.5 * x * (1 - bend.square()) * (1 + 3 * 0.044715 * x.square()) * sqrt(2 / pi)]
        return [0.5 * (1 + (x / sqrt(2)).op("Erf")) + x * (-0.5 * x.square()).exp() / sqrt(2 * pi)]


@register
class Swish(Activation):
    """x * sigmoid(alpha * x); SiLU with alpha 1."""

    rounds_freely = True
    attrs = {"alpha": 1.0}

    def formula(self, c: NodeView, x: Array) -> Array:
        return x * sigmoid(c.attr("alpha") * x)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.mul(x[0], e.sigmoid(e.mul(x[0], c.attr("alpha"))))

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        x, alpha = g.x(), g.attr("alpha")
        gate = (x * alpha).op("Sigmoid")
        return [gate + x * alpha * gate * (1 - gate)]


@register
class Mish(Activation):
    rounds_freely = True

    def formula(self, c: NodeView, x: Array) -> Array:
        return x * np.tanh(np.logaddexp(0, x))

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.mul(x[0], e.tanh(scalar_math.softplus(e, x[0])))

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        x = g.x()
        bend = x.op("Softplus").op("Tanh")
        return [bend + x * (1 - bend.square()) * x.op("Sigmoid")]


@register
class HardSigmoid(Activation):
    attrs = {"alpha": 0.2, "beta": 0.5}

    def formula(self, c: NodeView, x: Array) -> Array:
        return np.clip(c.attr("alpha") * x + c.attr("beta"), 0, 1)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return hard_sigmoid(e, x[0], c.attr("alpha"), c.attr("beta"))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [_within(g.x() * g.attr("alpha") + g.attr("beta")).where(g.dy() * g.attr("alpha"), 0)]


@register
class HardSwish(Activation):
    def formula(self, c: NodeView, x: Array) -> Array:
        return x * np.clip(x / 6 + 0.5, 0, 1)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.mul(x[0], hard_sigmoid(e, x[0], 1 / 6, 0.5))

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        x = g.x()
        line = x / 6 + 0.5
        return [_within(line).where(x / 3 + 0.5, (line >= 1).cast(x.dtype))]


@register
class Sigmoid(Activation):
    rounds_freely = True

    def formula(self, c: NodeView, x: Array) -> Array:
        return sigmoid(x)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.sigmoid(x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        gate = g.x().op("Sigmoid")
        return [gate * (1 - gate)]


@register
class Softplus(Activation):
    rounds_freely = True

    def formula(self, c: NodeView, x: Array) -> Array:
        return np.logaddexp(0, x)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return scalar_math.softplus(e, x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [g.x().op("Sigmoid")]


@register
class Softsign(Activation):
    def formula(self, c: NodeView, x: Array) -> Array:
        return x / (1 + np.abs(x))

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.div(x[0], e.add(e.abs(x[0]), 1.0))

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1 / (1 + g.x().abs()).square()]


@register
class ThresholdedRelu(Activation):
    jumps = True
    attrs = {"alpha": 1.0}

    def formula(self, c: NodeView, x: Array) -> Array:
        return np.where(x > c.attr("alpha"), x, 0)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.select(e.lt(c.attr("alpha"), x[0]), x[0], e.const(0.0, e.dtype(x[0])))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [(g.x() > g.attr("alpha")).where(g.dy(), 0)]


@register
class Shrink(Unary):
    """Zero for |x| <= lambd, otherwise x moved towards zero by `bias`. Also for integers."""

    jumps = True
    attrs = {"lambd": 0.5, "bias": 0.0}

    def reference(self, c: Call, x: Array) -> Array:
        bias, lambd = c.attr("bias"), c.attr("lambd")
        return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)).astype(x.dtype)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        bias, lambd, dtype = c.attr("bias"), c.attr("lambd"), e.dtype(x[0])
        if dtype.is_integer:  # the bounds may be fractions
            return e.cast(self.scalar(e, c, e.cast(x[0], DType.FLOAT64)), dtype)
        above = e.select(e.lt(lambd, x[0]), e.sub(x[0], bias), e.const(0.0, dtype))
        return e.select(e.lt(x[0], -lambd), e.add(x[0], bias), above)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [(g.x().abs() > g.attr("lambd")).where(g.dy(), 0)]


def _within(line: Term) -> Term:
    """Where a hard sigmoid is linear: whether `line`, its value before clipping, lies between 0 and 1."""
    return (line > 0).op("And", line < 1)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    decay = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, decay) / (1 + decay)


def hard_sigmoid(e: ScalarOps, x: Operand, alpha: float, beta: float) -> Operand:
    return e.min(e.max(e.add(e.mul(x, alpha), beta), 0.0), 1.0)
