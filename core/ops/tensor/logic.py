"""Comparisons, logic, bit operations, selection, casts, and operators that return their input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from lathe.core.ir.dim import Dim, SymDim
from lathe.core.ir.graph import Array
from lathe.core.ir.ratio import has_ratios, ratio_of, rounding_assumptions, truncate
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward, Rewrite, Slope
from lathe.core.ops.opdef.numeric import convert
from lathe.core.ops.opdef.registry import Call, Infer, NodeView, OpDef, Required, RuntimeValue, register
from lathe.core.ops.opdef.scalar import Operand, ScalarOps
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import (
    ANY,
    BOOL,
    FLOAT,
    INTEGER,
    NUMBER,
    Kind,
    as_dtype,
    broadcast_shapes,
    check_kind,
    same_dtype,
)
from lathe.core.ops.tensor.elementwise import Elementwise, UFunc, Unary


class Predicate(Elementwise):
    """Family base: the result is bool."""

    inputs = "A, B"
    outputs = "C"
    shape_arithmetic = True
    ufunc: ClassVar[UFunc]
    zero_gradient = "truth values do not change with small changes"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        return [TensorType(DType.BOOL, t.shape) for t in super().infer(c) if isinstance(t, TensorType)]

    def reference(self, c: Call, *x: Array) -> Array:
        return self.ufunc(*x)


@register
class Equal(Predicate):
    """A == B. Of symbolic dimensions the result is known if it is the same for all values of their symbols."""

    accepts = ANY
    commutative = True

    def reference(self, c: Call, *x: Array) -> Array:
        if any(array.dtype == object for array in x) and _has_symbols(*x):
            return np.vectorize(dims_equal, otypes=[bool])(*x)
        return np.equal(*x)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.eq(*x)


@register
class Less(Predicate):
    accepts = NUMBER
    ufunc = np.less

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.lt(*x)


@register
class LessOrEqual(Predicate):
    accepts = NUMBER
    ufunc = np.less_equal

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.le(*x)


@register
class Greater(Predicate):
    accepts = NUMBER
    ufunc = np.greater

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.lt(x[1], x[0])


@register
class GreaterOrEqual(Predicate):
    accepts = NUMBER
    ufunc = np.greater_equal

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.le(x[1], x[0])


@register
class And(Predicate):
    accepts = BOOL
    commutative = True
    ufunc = np.logical_and

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.bit_and(*x)


@register
class Or(Predicate):
    accepts = BOOL
    commutative = True
    ufunc = np.logical_or

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.bit_or(*x)


@register
class Xor(Predicate):
    accepts = BOOL
    commutative = True
    ufunc = np.logical_xor

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.bit_xor(*x)


@register
class Not(Predicate):
    accepts = BOOL
    inputs = "X"
    ufunc = np.logical_not

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.bit_not(x[0])


@register
class IsNaN(Predicate):
    accepts = FLOAT
    inputs = "X"
    ufunc = np.isnan

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.bit_not(e.eq(x[0], x[0]))


@register
class IsInf(Predicate):
    accepts = FLOAT
    inputs = "X"
    attrs = {"detect_positive": 1, "detect_negative": 1}

    def reference(self, c: Call, *x: Array) -> Array:
        positive, negative = bool(c.attr("detect_positive")), bool(c.attr("detect_negative"))
        return np.isinf(x[0]) & np.where(x[0] > 0, positive, negative)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        infinity = e.const(float("inf"), e.dtype(x[0]))
        kinds = [e.eq(x[0], infinity)] if c.attr("detect_positive") else []
        kinds += [e.eq(e.neg(x[0]), infinity)] if c.attr("detect_negative") else []
        if len(kinds) == 2:
            return e.bit_or(*kinds)
        return kinds[0] if kinds else e.lt(x[0], x[0])


class Bits(Elementwise):
    """Family base: a bitwise operation on two integers."""

    accepts: ClassVar[Kind] = INTEGER
    inputs = "A, B"
    outputs = "C"
    commutative = True
    ufunc: ClassVar[UFunc]
    zero_gradient = "integers have no gradients"

    def reference(self, c: Call, *x: Array) -> Array:
        return self.ufunc(*x)


@register
class BitwiseAnd(Bits):
    ufunc = np.bitwise_and

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.bit_and(*x)


@register
class BitwiseOr(Bits):
    ufunc = np.bitwise_or

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.bit_or(*x)


@register
class BitwiseXor(Bits):
    ufunc = np.bitwise_xor

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.bit_xor(*x)


@register
class BitwiseNot(Unary):
    accepts = INTEGER
    ufunc = np.bitwise_not
    zero_gradient = "integers have no gradients"

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.bit_not(x[0])


@register
class BitShift(Elementwise):
    """X shifted by Y bits; a shift by at least the width of X gives 0, or -1 for a negative number shifted right."""

    accepts = INTEGER
    inputs = "X, Y"
    outputs = "Z"
    attrs = {"direction": Required("LEFT or RIGHT")}
    zero_gradient = "integers have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        if c.attr("direction") not in ("LEFT", "RIGHT"):
            c.fail(f"attribute 'direction' is '{c.attr('direction')}', expected 'LEFT' or 'RIGHT'")
        return super().infer(c)

    def reference(self, c: Call, x: Array, y: Array) -> Array:
        return np.left_shift(x, y) if c.attr("direction") == "LEFT" else np.right_shift(x, y)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        dtype = e.dtype(x[0])
        left, last = c.attr("direction") == "LEFT", dtype.itemsize * 8 - 1
        amount = e.bit_and(x[1], last)  # longer shifts may be undefined on the device
        inside = e.eq(amount, x[1])
        if left:
            return e.select(inside, e.shift_left(x[0], amount), e.const(0, dtype))
        sign = e.select(e.lt(x[0], 0), e.bit_not(e.const(0, dtype)), e.const(0, dtype))
        return e.select(inside, e.shift_right(x[0], amount), sign)


@register
class Where(Elementwise):
    inputs = "condition, X, Y"
    outputs = "output"
    shape_arithmetic = True

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, BOOL)
        return [TensorType(same_dtype(c, (1, 2)), broadcast_shapes(c, [c.shape(i) for i in range(3)]))]

    def reference(self, c: Call, condition: Array, x: Array, y: Array) -> Array:
        return np.where(condition, x, y)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.select(*x)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        condition, dy = g.x(0), g.dy()
        return [None, condition.where(dy, 0), condition.where(0, dy)]


@register
class Clip(Elementwise):
    """min(max(x, min), max) with bounds of one element; either may be absent. If min exceeds max, the result is max."""

    accepts = NUMBER
    inputs = "input, min?, max?"
    outputs = "output"
    params: ClassVar[dict[str, int]] = {"min": 1, "max": 2}
    shape_arithmetic = True

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = same_dtype(c, range(3))
        check_kind(c, 0, self.accepts)
        for index in (1, 2):
            if c.has_input(index) and c.tensor(index).shape not in (None, (), (1,)):
                c.fail(f"{c.op.input_name(index)} is {c.tensor(index)}, expected a scalar")
        return [TensorType(dtype, c.shape(0))]

    def reference(self, c: Call, x: Array, *_: RuntimeValue) -> Array:
        low, high = c.param("min"), c.param("max")
        x = x if low is None else np.maximum(x, x.dtype.type(low[0]))
        return x if high is None else np.minimum(x, x.dtype.type(high[0]))

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        result, operands = x[0], iter(x[1:])
        for name, combine in (("min", e.max), ("max", e.min)):
            bound = c.attr(name)
            if bound is None and c.has_input(self.params[name]):
                bound = next(operands)
            if bound is not None:
                result = combine(result, bound[0] if isinstance(bound, tuple) else bound)
        return result

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """dY goes to the bound that replaces an element, summed by the caller, otherwise to the input."""
        x, dy = g.x(0), g.dy()
        low, high = (self._bound(g, name) for name in ("min", "max"))
        above = None if high is None else (x if low is None else x.op("Max", low)) > high
        below = None if low is None else x < low
        inside, under = dy, None
        if above is not None:
            inside = above.where(0, inside)
        if below is not None:
            inside, under = below.where(0, inside), below.where(inside, 0)
        return [inside, under, None if above is None else above.where(dy, 0)]

    def _bound(self, g: Rewrite, name: str) -> Term | None:
        value = g.attr(name)
        if value is None:
            return g.x_or_none(self.params[name])
        return g.writer.number(value[0] if isinstance(value, tuple) else value, g.x().dtype)


@register
class Cast(Elementwise):
    """The input converted to the element type `to`; see `lathe.core.ops.opdef.numeric.convert` for the rules."""

    inputs = "input"
    outputs = "output"
    attrs = {"to": Required("element type"), "saturate": 1, "round_mode": "up"}
    shape_arithmetic = True

    def target(self, c: NodeView) -> DType:
        return as_dtype(c, c.attr("to"))

    def infer(self, c: Infer) -> Sequence[ValueType]:
        return [TensorType(self.target(c), c.shape(0))]

    def supposes(self, c: Infer) -> Sequence[Dim]:
        counted = c.ratios(0)
        if counted is not None and counted.dtype == object and self.target(c) is DType.FLOAT32:
            counted = _map_elements(ratio_of, counted)
        return rounding_assumptions(counted)

    def reference(self, c: Call, x: Array, *_: Array) -> Array:
        dtype = self.target(c)
        if x.dtype == object and dtype.is_integer and _has_symbols(x):
            return x
        if x.dtype == object and dtype is DType.FLOAT32 and _has_symbols(x):
            return _map_elements(ratio_of, x)
        if dtype.is_integer and has_ratios(x):
            return _map_elements(truncate, x)
        try:
            return convert(x, dtype, bool(c.attr("saturate")), c.attr("round_mode"))
        except ValueError as error:
            return c.fail(f"cannot cast to {dtype}: {error}")

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.cast(x[0], self.target(c))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [g.dy().cast(g.x().dtype)]


@register
class BitCast(OpDef):
    """Reinterprets the bits as another element type of the same width."""

    inputs = "input"
    outputs = "output"
    attrs = {"to": Required("element type")}
    zero_gradient = "bits have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        source, target = c.dtype(0), as_dtype(c, c.attr("to"))
        if DType.STRING in (source, target) or source.bits != target.bits:
            c.fail(f"input is {source}, expected an element type as wide as {target}")
        return [TensorType(target, c.shape(0))]

    def reference(self, c: Call, x: Array) -> Array:
        return np.ascontiguousarray(x).view(as_dtype(c, c.attr("to")).numpy).reshape(x.shape)

    def rows(self, c: Infer, axes: Sequence[int | None]) -> Sequence[int | None]:
        return list(axes)


@register
class Identity(OpDef):
    """Returns its input, of any type."""

    inputs = "input"
    outputs = "output"
    shape_arithmetic = True

    def infer(self, c: Infer) -> Sequence[ValueType]:
        value = c.node.input(0)
        return [value.type] if value is not None else c.fail("input 0 (input) is missing")

    def reference(self, c: Call, x: RuntimeValue) -> RuntimeValue:
        return x

    def rows(self, c: Infer, axes: Sequence[int | None]) -> Sequence[int | None]:
        return list(axes)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return x[0]

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        return [1.0]


@register
class RoundableRows(Identity):
    """Returns its input, whose rows a product with weights of few bits may round to int8 (`DequantizedMatMul`)."""

    domain = "lathe"


@register
class StopGradient(Identity):
    """Returns its input; differentiation treats the result as a constant."""

    domain = "lathe"
    zero_gradient = "by definition"


@register
class Boundary(OpDef):
    """Returns its first input. Passes move and fuse nothing across it; see `lathe.core.passes.rewrite.boundaries`.

    The other inputs must have been computed before a node reads the output, but nothing reads them.
    """

    inputs = "input, *after"
    outputs = "output"
    attrs: ClassVar[Mapping[str, Any]] = {"device": ""}
    domain = "lathe"
    shape_arithmetic = True
    no_gradient = "it exists only while passes run"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        value = c.node.input(0)
        return [value.type] if value is not None else c.fail("input 0 (input) is missing")

    def reference(self, c: Call, x: RuntimeValue, *after: RuntimeValue) -> RuntimeValue:
        return x

    def rows(self, c: Infer, axes: Sequence[int | None]) -> Sequence[int | None]:
        return [axes[0]]


def dims_equal(x: Dim, y: Dim) -> bool:
    """Whether two dimensions are equal. TypeError if that depends on the values of their symbols."""
    difference = x - y
    if isinstance(difference, int):
        return difference == 0
    if _same_sign(difference):
        return False
    raise TypeError(f"whether {x} equals {y} depends on their symbols")


def _same_sign(dim: SymDim) -> bool:
    """Whether all terms have one sign and one is a constant, so that the sum is never zero for nonnegative symbols."""
    signs = {coefficient > 0 for _, coefficient in dim.terms}
    plain = all(isinstance(atom, str) for atoms, _ in dim.terms for atom in atoms)
    return plain and len(signs) == 1 and any(atoms == () for atoms, _ in dim.terms)


def _map_elements(function: Callable[..., object], x: Array) -> Array:
    """The results of a function of each element, as an object array of the same shape."""
    return np.asarray(np.frompyfunc(function, 1, 1)(x), object)


def _has_symbols(*x: Any) -> bool:
    """Whether any element is a symbolic dimension; arrays of strings are object arrays as well."""
    return any(isinstance(item, SymDim) for array in x for item in array.ravel().tolist())
