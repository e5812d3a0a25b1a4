"""Arithmetic and mathematical functions, element by element, with ONNX (NumPy) broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import pi, sqrt
from typing import Any, ClassVar

import numpy as np

from lathe.core.ir.dim import Dim, floor_div, maximum
from lathe.core.ir.graph import Array
from lathe.core.ir.ratio import has_ratios, rounding_assumptions
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef import scalar_math
from lathe.core.ops.opdef.backward import Backward, Rewrite, Slope
from lathe.core.ops.opdef.numeric import erf, int_pow, truncated_div
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, RowAxis, register
from lathe.core.ops.opdef.scalar import Operand, ScalarOps
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import (
    ANY,
    FLOAT,
    NUMBER,
    Kind,
    as_computed,
    broadcast_rows,
    broadcast_shapes,
    check_kind,
    same_dtype,
)

UFunc = Callable[..., Any]


class Elementwise(OpDef):
    """Family base: outputs have the broadcast shape of the inputs and, unless overridden, their element type."""

    accepts: ClassVar[Kind] = ANY

    def infer(self, c: Infer) -> Sequence[ValueType]:
        count = len(c.node.inputs)
        if count == 0:
            c.fail("has no inputs, expected at least 1")
        dtype = same_dtype(c, range(count))
        check_kind(c, 0, self.accepts)
        return [TensorType(dtype, broadcast_shapes(c, [c.shape(i) for i in range(count)]))]

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return broadcast_rows(c, axes)


class Binary(Elementwise):
    """Family base: `ufunc` of two broadcast inputs of one number type, also of symbolic dimensions."""

    accepts = NUMBER
    inputs = "A, B"
    outputs = "C"
    shape_arithmetic = True
    ufunc: ClassVar[UFunc]

    def reference(self, c: Call, a: Array, b: Array) -> Array:
        return self.ufunc(a, b)


class Unary(Elementwise):
    """Family base: `ufunc` on one input; floats of at most two bytes are computed in float32."""

    accepts = NUMBER
    inputs = "X"
    outputs = "Y"
    ufunc: ClassVar[UFunc]

    def reference(self, c: Call, x: Array) -> Array:
        return self.ufunc(as_computed(x)).astype(x.dtype)


class Variadic(Elementwise):
    """Family base: `combine` is folded over any number of inputs, from the left."""

    accepts = NUMBER
    inputs = "*data"
    shape_arithmetic = True
    commutative = True

    def combine(self, e: ScalarOps, x: Operand, y: Operand) -> Operand:
        raise NotImplementedError

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return reduce(lambda total, item: self.combine(e, total, item), x)


def share_among_extremes(g: Backward) -> Sequence[Term | None]:
    """The gradients of a Max or Min node: dY split equally among the inputs that attain the result."""
    chosen = [x.equals(g.y()).cast(g.y().dtype) for x in g.terms]
    share = g.dy() / reduce(lambda total, one: total + one, chosen)
    return [one * share for one in chosen]


@register
class Add(Binary):
    commutative = True
    ufunc = np.add

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.add(*x)

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1.0, 1.0]


@register
class Sub(Binary):
    ufunc = np.subtract

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.sub(*x)

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1.0, -1.0]


@register
class Mul(Binary):
    commutative = True
    ufunc = np.multiply

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.mul(*x)

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [g.x(1), g.x(0)]


@register
class Div(Binary):
    """A / B; integer division truncates towards zero.

    A quotient of symbolic dimensions is rounded down, which is the same if neither is negative; `supposes` returns that
    assumption.
    """

    def supposes(self, c: Infer) -> Sequence[Dim]:
        counted = [array for array in map(c.value, range(2)) if array is not None]  # ratios are no such quotients
        if len(counted) < 2 or all(array.dtype != object for array in counted):
            return ()
        pairs = zip(*(array.ravel().tolist() for array in np.broadcast_arrays(*counted)), strict=True)
        return [dim for a, b in pairs if b != 0 and floor_div(a, b) * b != a for dim in (a, b)]

    def reference(self, c: Call, a: Array, b: Array) -> Array:
        if has_ratios(a) or has_ratios(b):
            return np.true_divide(a, b, dtype=object)
        if a.dtype == object or b.dtype == object:
            return np.vectorize(_rounded_down, otypes=[object])(a, b)
        return truncated_div(a, b) if a.dtype.kind in "iu" else np.divide(a, b)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.div(*x)

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        a, b = g.terms
        return [1 / b, -a / (b * b)]


def _rounded_down(a: Dim, b: Dim) -> Dim:
    """a // b of dimensions. ZeroDivisionError if b is 0.

    TypeError if a or b is a negative number and the division is not exact: truncation towards zero may then differ.
    That a symbolic a or b is not negative is an assumption (`Div.supposes`).
    """
    if b == 0:
        raise ZeroDivisionError(f"{a} divided by zero")
    quotient = floor_div(a, b)
    if quotient * b != a and any(isinstance(dim, int) and dim < 0 for dim in (a, b)):
        raise TypeError(f"the rounding of {a} / {b} depends on the values of their symbols")
    return quotient


@register
class Mod(Binary):
    """The remainder of A / B, with the sign of the divisor, or with `fmod=1` that of the dividend."""

    jumps = True
    attrs = {"fmod": 0}

    def reference(self, c: Call, a: Array, b: Array) -> Array:
        return np.fmod(a, b) if c.attr("fmod") else np.mod(a, b)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        rest = e.rem(*x)
        if c.attr("fmod"):
            return rest
        opposite = e.bit_xor(e.lt(rest, 0), e.lt(x[1], 0))
        exact = e.eq(rest, 0)
        return e.select(e.bit_and(opposite, e.bit_not(exact)), e.add(rest, x[1]), rest)

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        a, b = g.terms
        ratio = a / b
        whole = (ratio < 0).where(ratio.op("Ceil"), ratio.op("Floor")) if g.attr("fmod") else ratio.op("Floor")
        return [1.0, -whole]


@register
class Pow(Elementwise):
    """X ** Y, in the element type of X; Y may have another. Integers: see `int_pow`."""

    accepts = NUMBER
    inputs = "X, Y"
    outputs = "Z"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 1, NUMBER)
        return [TensorType(check_kind(c, 0, NUMBER), broadcast_shapes(c, [c.shape(0), c.shape(1)]))]

    def reference(self, c: Call, x: Array, y: Array) -> Array:
        if x.dtype.kind in "iu":
            return int_pow(x, y)
        return np.power(as_computed(x), as_computed(y).astype(as_computed(x).dtype)).astype(x.dtype)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        base, exponent = e.dtype(x[0]), e.dtype(x[1])
        if base.is_integer and not exponent.is_integer:
            return e.cast(e.pow(e.cast(x[0], DType.FLOAT64), e.cast(x[1], DType.FLOAT64)), base)
        return e.pow(x[0], e.cast(x[1], base))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """Slopes Y * X ** (Y - 1) and log(X) * X ** Y; zero instead of NaN where Y is 0 (for X) or X is 0 (for Y)."""
        x, y, dy = g.x(0), g.x(1), g.dy()
        exponent = y.cast(x.dtype)
        base = exponent.equals(0).where(0, exponent * x.op("Pow", exponent - 1))
        if not g.wants(1):
            return [dy * base]
        zero = x.equals(0)
        return [dy * base, zero.where(0, dy * g.y() * zero.where(1, x).log()).cast(y.dtype)]


@register
class Sum(Variadic):
    accepts = FLOAT
    outputs = "sum"

    def reference(self, c: Call, *x: Array) -> Array:
        return reduce(np.add, x)

    def combine(self, e: ScalarOps, x: Operand, y: Operand) -> Operand:
        return e.add(x, y)

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1.0 for _ in g.terms]


@register
class Mean(Variadic):
    """The mean of n inputs: their sum times a rounded 1 / n, as in ONNX Runtime; the mean of 41 ones is less than 1."""

    accepts = FLOAT
    outputs = "mean"

    def reference(self, c: Call, *x: Array) -> Array:
        total = np.asarray(reduce(np.add, map(as_computed, x)))
        return (total * total.dtype.type(1 / len(x))).astype(x[0].dtype)

    def combine(self, e: ScalarOps, x: Operand, y: Operand) -> Operand:
        return e.add(x, y)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.mul(super().scalar(e, c, *x), 1 / len(x))

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1 / len(g.terms) for _ in g.terms]


_larger: UFunc = np.frompyfunc(maximum, 2, 1)
_smaller: UFunc = np.frompyfunc(lambda one, other: one + other - maximum(one, other), 2, 1)


@register
class Max(Variadic):
    outputs = "max"
    shape_arithmetic = True

    def reference(self, c: Call, *x: Array) -> Array:
        return reduce(_larger if any(each.dtype == object for each in x) else np.maximum, x)

    def combine(self, e: ScalarOps, x: Operand, y: Operand) -> Operand:
        return e.max(x, y)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return share_among_extremes(g)


@register
class Min(Variadic):
    outputs = "min"
    shape_arithmetic = True

    def reference(self, c: Call, *x: Array) -> Array:
        return reduce(_smaller if any(each.dtype == object for each in x) else np.minimum, x)

    def combine(self, e: ScalarOps, x: Operand, y: Operand) -> Operand:
        return e.min(x, y)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return share_among_extremes(g)


@register
class Neg(Unary):
    shape_arithmetic = True
    ufunc = np.negative

    def reference(self, c: Call, x: Array) -> Array:
        return np.negative(x) if x.dtype == object else super().reference(c, x)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.neg(x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [-1.0]


@register
class Abs(Unary):
    ufunc = np.abs

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.abs(x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [g.x().sign()]


@register
class Sign(Unary):
    ufunc = np.sign
    zero_gradient = "a sign does not change with small changes"

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        dtype = e.dtype(x[0])
        signed = not dtype.label.startswith("uint")
        negative = e.select(e.lt(x[0], 0), e.const(-1, dtype), x[0]) if signed else x[0]
        return e.select(e.lt(0, x[0]), e.const(1, dtype), negative)


class FloatUnary(Unary):
    """Family base: `ufunc` on one input of a floating-point type."""

    accepts = FLOAT


@register
class Sqrt(FloatUnary):
    ufunc = np.sqrt
    shape_arithmetic = True  # computes the scale of attention from static shapes

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.sqrt(x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [0.5 / g.x().sqrt()]


@register
class Reciprocal(FloatUnary):
    ufunc = np.reciprocal
    shape_arithmetic = True

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.div(e.const(1.0, e.dtype(x[0])), x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [-1 / g.x().square()]


@register
class Exp(FloatUnary):
    rounds_freely = True
    ufunc = np.exp

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.exp(x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [g.x().exp()]


@register
class Log(FloatUnary):
    rounds_freely = True
    ufunc = np.log

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.log(x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1 / g.x()]


@register
class Erf(FloatUnary):
    rounds_freely = True
    ufunc = staticmethod(erf)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.erf(x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [2 / sqrt(pi) * (-g.x().square()).exp()]


class Rounding(FloatUnary):
    """Family base: rounds a number, or a ratio of dimensions, to an integer."""

    shape_arithmetic = True
    zero_gradient = "a step function is flat between its steps"

    def supposes(self, c: Infer) -> Sequence[Dim]:
        return rounding_assumptions(c.ratios(0))

    def reference(self, c: Call, x: Array) -> Array:
        return self.ufunc(x) if x.dtype == object else super().reference(c, x)


@register
class Floor(Rounding):
    ufunc = np.floor

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.floor(x[0])


@register
class Ceil(Rounding):
    ufunc = np.ceil

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.ceil(x[0])


@register
class Round(FloatUnary):
    """Rounds to the nearest integer, halves to even."""

    ufunc = np.rint
    zero_gradient = "a step function is flat between its steps"

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.rint(x[0])


@register
class Sin(FloatUnary):
    rounds_freely = True
    ufunc = np.sin

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.sin(x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [g.x().op("Cos")]


@register
class Cos(FloatUnary):
    rounds_freely = True
    ufunc = np.cos

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.cos(x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [-g.x().op("Sin")]


@register
class Tan(FloatUnary):
    rounds_freely = True
    ufunc = np.tan

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.div(e.sin(x[0]), e.cos(x[0]))

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1 + g.x().op("Tan").square()]


@register
class Asin(FloatUnary):
    ufunc = np.arcsin

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return scalar_math.asin(e, x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1 / (1 - g.x().square()).sqrt()]


@register
class Acos(FloatUnary):
    ufunc = np.arccos

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return scalar_math.acos(e, x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [-1 / (1 - g.x().square()).sqrt()]


@register
class Atan(FloatUnary):
    ufunc = np.arctan

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return scalar_math.atan(e, x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1 / (1 + g.x().square())]


@register
class Sinh(FloatUnary):
    ufunc = np.sinh

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return scalar_math.sinh(e, x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [g.x().op("Cosh")]


@register
class Cosh(FloatUnary):
    ufunc = np.cosh

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return scalar_math.cosh(e, x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [g.x().op("Sinh")]


@register
class Tanh(FloatUnary):
    rounds_freely = True
    ufunc = np.tanh

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.tanh(x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1 - g.x().op("Tanh").square()]


@register
class Asinh(FloatUnary):
    ufunc = np.arcsinh

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return scalar_math.asinh(e, x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1 / (g.x().square() + 1).sqrt()]


@register
class Acosh(FloatUnary):
    ufunc = np.arccosh

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return scalar_math.acosh(e, x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1 / (g.x().square() - 1).sqrt()]


@register
class Atanh(FloatUnary):
    ufunc = np.arctanh

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return scalar_math.atanh(e, x[0])

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1 / (1 - g.x().square())]
