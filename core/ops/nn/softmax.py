"""Softmax and its relatives, along one axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward, Rewrite
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import FLOAT, as_computed, check_kind, normalize_axis, untouched_rows


class AlongAxis(OpDef):
    """Family base: the function `along` along the axis `axis`; the result has the input's type and shape.

    float16 is rounded after each step, as in ONNX's function body; bfloat16 arrives as float32.
    """

    inputs = "input"
    outputs = "output"
    attrs = {"axis": -1}

    def along(self, x: Array, axis: int) -> Array:
        raise NotImplementedError

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, shape = check_kind(c, 0, FLOAT), c.shape(0)
        if shape is not None:
            normalize_axis(c, c.attr("axis"), len(shape))
        return [TensorType(dtype, shape)]

    def reference(self, c: Call, x: Array) -> Array:
        if x.size == 0:
            return x
        return self.along(x if x.dtype == np.float16 else as_computed(x), c.attr("axis")).astype(x.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        if shape is None:
            return super().rows(c, axes)
        return untouched_rows(c, axes, {normalize_axis(c, c.attr("axis"), len(shape))})


@register
class Softmax(AlongAxis):
    rounds_freely = True

    def along(self, x: Array, axis: int) -> Array:
        powers = np.exp(x - x.max(axis, keepdims=True))
        return powers / powers.sum(axis, keepdims=True)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        y, dy, axis = g.y(), g.dy(), g.attr("axis")
        return [(dy - (dy * y).sum([axis])) * y]


@register
class GuardedSoftmax(Softmax):
    """Softmax with NaN results replaced by zero: for vectors of -inf alone, or with +inf or NaN.

    PyTorch's attention computes it for tokens whose keys are all masked.
    """

    domain = "lathe"
    no_gradient = "only passes emit it, after differentiation"

    def along(self, x: Array, axis: int) -> Array:
        with np.errstate(invalid="ignore"):
            return zero_nan(super().along(x, axis))


def zero_nan(shares: Array) -> Array:
    """The array with NaN replaced by zero."""
    return np.asarray(np.where(np.isnan(shares), shares.dtype.type(0), shares))


@register
class LogSoftmax(AlongAxis):
    rounds_freely = True

    def along(self, x: Array, axis: int) -> Array:
        shifted = x - x.max(axis, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [g.dy() - g.y().exp() * g.dy().sum([g.attr("axis")])]


@register
class Hardmax(AlongAxis):
    """1 at the first maximum along the axis, 0 elsewhere."""

    zero_gradient = "positions do not change with small changes"

    def along(self, x: Array, axis: int) -> Array:
        result = np.zeros_like(x)
        np.put_along_axis(result, np.expand_dims(x.argmax(axis), axis), 1, axis)
        return result

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x = g.x()
        axis = normalize_axis(g, g.attr("axis"), x.rank)
        if x.shape[axis] == 0:
            g.unsupported("an empty axis has no maximum")
        places = g.writer.places(x.shape, axis, x.rank)
        return [places.equals(x.op("ArgMax", axis=axis, keepdims=1)).cast(x.dtype)]
