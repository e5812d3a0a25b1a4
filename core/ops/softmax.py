"""Softmax and its relatives, along one axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.ir.graph import Array
from core.ir.types import TensorType, ValueType
from core.ops.backward import Backward, Rewrite
from core.ops.common import FLOAT, check_kind, normalize_axis, rows_beside, wide
from core.ops.registry import Call, Infer, Mixes, OpDef, RowAxis, register
from core.ops.terms import Term


class AlongAxis(OpDef):
    """Family base: same type out as in; `along` works on one axis. float16 is rounded at each step, as ONNX has it;
    bfloat16 arrives as float32."""

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
        return self.along(x if x.dtype == np.float16 else wide(x), c.attr("axis")).astype(x.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        shape = c.shape(0)
        if shape is None:
            return super().rows(c, axes)
        return rows_beside(c, axes, {normalize_axis(c, c.attr("axis"), len(shape))})


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
    """Softmax with zeros where results are no numbers: lines whose elements are all -inf, or of which one is +inf or
    no number itself. PyTorch's attention computes it for tokens whose keys are all masked."""

    domain = "lathe"
    no_gradient = "passes make it, after differentiation"

    def along(self, x: Array, axis: int) -> Array:
        with np.errstate(invalid="ignore"):
            return guarded(super().along(x, axis))


def guarded(shares: Array) -> Array:
    """The same with zeros in place of what is no number."""
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
    """1 at the first greatest element, 0 elsewhere."""

    zero_gradient = "positions do not change with small changes"

    def along(self, x: Array, axis: int) -> Array:
        result = np.zeros_like(x)
        np.put_along_axis(result, np.expand_dims(x.argmax(axis), axis), 1, axis)
        return result

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x = g.x()
        axis = normalize_axis(g, g.attr("axis"), x.rank)
        if x.shape[axis] == 0:
            g.unsupported("no element is the greatest of none")
        places = g.writer.places(x.shape, axis, x.rank)
        return [places.equals(x.op("ArgMax", axis=axis, keepdims=1)).cast(x.dtype)]
