"""Reductions along axes, and ArgMax, ArgMin."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from lathe.core.ir.dim import Dim, product
from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward, Rewrite
from lathe.core.ops.opdef.numeric import truncated_div
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, RowAxis, RuntimeValue, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import (
    BOOL,
    NUMBER,
    Kind,
    Shape,
    as_computed,
    check_kind,
    mean_over,
    normalize_axis,
    unique_axes,
)

Axes = tuple[int, ...]


class Reduce(OpDef):
    """Family base: a reduction over `axes`; without any, over all axes, or over none with `noop_with_empty_axes`."""

    accepts: ClassVar[Kind] = NUMBER
    inputs = "data, axes?"
    outputs = "reduced"
    attrs = {"keepdims": 1, "noop_with_empty_axes": 0}
    params = {"axes": 1}

    def over(self, x: Array, axes: Axes) -> Array:
        """The reduction of `x` over `axes`, which stay with extent 1; subclasses define it.

        Floats of at most two bytes arrive as float32. The result may be of any type: the caller casts it.
        """
        raise NotImplementedError

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, shape = check_kind(c, 0, self.accepts), c.shape(0)
        known = not c.has_param("axes") or c.param("axes") is not None
        if shape is None or not (known or c.attr("keepdims")):
            return [TensorType(dtype, None)]
        if not known:
            return [TensorType(dtype, tuple(c.fresh_dim(f"d{axis}") for axis in range(len(shape))))]
        return [TensorType(dtype, reduced_shape(shape, self.axes(c, len(shape)), c.attr("keepdims")))]

    def axes(self, c: Infer | Call, rank: int) -> Axes:
        given = c.param("axes")
        if not given:
            return () if c.attr("noop_with_empty_axes") else tuple(range(rank))
        return unique_axes(c, given, rank)

    def reference(self, c: Call, x: Array, axes: RuntimeValue = None) -> Array:
        reduced = self.axes(c, x.ndim)
        result = self.over(as_computed(x), reduced).astype(x.dtype)
        return result if c.attr("keepdims") else np.squeeze(result, reduced)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        if shape is None or (c.has_param("axes") and c.param("axes") is None):
            return super().rows(c, axes)
        return rows_after_reduction(c, axes, self.axes(c, len(shape)))

    def with_reduced_axes(self, g: Backward, term: Term) -> Term:
        """`term`, which has the output's shape, with the reduced axes inserted with extent 1."""
        return term.reshape(reduced_shape(g.x().shape, self.axes(g, g.x().rank), keepdims=True))

    def chosen(self, g: Backward) -> list[Term | None]:
        """The gradient of a maximum or minimum: dY split equally among the elements that attain it."""
        hit = g.x().equals(self.with_reduced_axes(g, g.y())).cast(g.x().dtype)
        return [hit * (self.with_reduced_axes(g, g.dy()) / hit.sum(self.axes(g, g.x().rank)))]

    def spread(self, g: Backward, term: Term) -> list[Term | None]:
        """The list of gradients, which is that of the first input alone.

        It is `term`, which has the output's shape, broadcast to the shape of the input.
        """
        return [self.with_reduced_axes(g, term).expand(g.x().shape)]


def reduced_shape(shape: Shape, axes: Axes, keepdims: bool) -> Shape:
    if keepdims:
        return tuple(1 if axis in axes else dim for axis, dim in enumerate(shape))
    return tuple(dim for axis, dim in enumerate(shape) if axis not in axes)


def rows_after_reduction(c: NodeView, axes: Sequence[RowAxis], reduced: Axes) -> Sequence[RowAxis] | MixesRows:
    """The rule for batch rows (`OpDef.rows`) of a reduction over the axes `reduced`, which must not have the rows.

    Without `keepdims` the row axis moves by the number of dropped axes before it.
    """
    row = axes[0]
    if row is None:
        return [None] * len(c.node.outputs)
    if row in reduced:
        return MixesRows(f"{c.op.name} reduces over the row axis")
    moved = row if c.attr("keepdims") else row - sum(axis < row for axis in reduced)
    return [moved] * len(c.node.outputs)


@register
class ReduceSum(Reduce):
    shape_arithmetic = True

    def over(self, x: Array, axes: Axes) -> Array:
        return np.add.reduce(x, axes, keepdims=True)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return self.spread(g, g.dy())


@register
class ReduceProd(Reduce):
    shape_arithmetic = True

    def over(self, x: Array, axes: Axes) -> Array:
        return np.multiply.reduce(x, axes, keepdims=True)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """A cumulative product along the joined reduced axes: its gradient is right also where elements are zero."""
        x, axes = g.x(), self.axes(g, g.x().rank)
        if not axes:
            return [x]
        staying = [axis for axis in range(x.rank) if axis not in axes]
        flat = x.transpose(*staying, *axes).reshape((*(x.shape[a] for a in staying), product(x.shape[a] for a in axes)))
        last = flat.op("CumProd", g.writer.array(flat.rank - 1)).slice(flat.rank - 1, -1, 2**31 - 1)
        return [last.reshape(g.node.output.shape)]


@register
class ReduceMean(Reduce):
    def over(self, x: Array, axes: Axes) -> Array:
        if x.dtype.kind not in "iu":
            return mean_over(x, axes)
        count = np.array(prod(x.shape[axis] for axis in axes))
        return truncated_div(np.add.reduce(x, axes, keepdims=True), count)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        count = g.x().count(self.axes(g, g.x().rank))
        return self.spread(g, g.dy() / count)


@register
class ReduceMax(Reduce):
    """The maximum, also of booleans; over no elements minus infinity, or the least number of the type."""

    accepts = Kind("a number type or bool", NUMBER.members | BOOL.members)
    shape_arithmetic = True

    def over(self, x: Array, axes: Axes) -> Array:
        return np.maximum.reduce(x, axes, keepdims=True, **_start(x, least=True))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return self.chosen(g)


@register
class ReduceMin(Reduce):
    """The minimum, also of booleans; over no elements infinity, or the greatest number of the type."""

    accepts = ReduceMax.accepts
    shape_arithmetic = True

    def over(self, x: Array, axes: Axes) -> Array:
        return np.minimum.reduce(x, axes, keepdims=True, **_start(x, least=False))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return self.chosen(g)


@register
class ReduceL1(Reduce):
    def over(self, x: Array, axes: Axes) -> Array:
        return np.add.reduce(np.abs(x), axes, keepdims=True)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [self.with_reduced_axes(g, g.dy()) * g.x().sign()]


@register
class ReduceL2(Reduce):
    def over(self, x: Array, axes: Axes) -> Array:
        return np.sqrt(np.add.reduce(np.square(x), axes, keepdims=True))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        norm = self.with_reduced_axes(g, g.y())
        zero = norm.equals(0)
        return [zero.where(0, g.x() / zero.where(1, norm)) * self.with_reduced_axes(g, g.dy())]


@register
class ReduceSumSquare(Reduce):
    def over(self, x: Array, axes: Axes) -> Array:
        return np.add.reduce(np.square(x), axes, keepdims=True)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [self.with_reduced_axes(g, g.dy()) * g.x() * 2]


@register
class ReduceLogSum(Reduce):
    def over(self, x: Array, axes: Axes) -> Array:
        return np.log(np.add.reduce(x, axes, keepdims=True))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return self.spread(g, g.dy() / g.y().exp())


@register
class ReduceLogSumExp(Reduce):
    """log(sum(exp(x))), computed with the maximum subtracted first, so that it does not overflow."""

    def over(self, x: Array, axes: Axes) -> Array:
        x = x.astype(np.float64) if x.dtype.kind in "iu" else x
        peak = np.maximum.reduce(x, axes, keepdims=True, initial=_extreme(x.dtype, least=True))
        shift = np.where(np.isfinite(peak), peak, 0)
        return np.log(np.add.reduce(np.exp(x - shift), axes, keepdims=True)) + shift

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [(g.x() - self.with_reduced_axes(g, g.y())).exp() * self.with_reduced_axes(g, g.dy())]


def _start(x: Array, least: bool) -> dict[str, Any]:
    """The keyword `initial` for NumPy's maximum (`least`) or minimum; empty for object arrays of dimensions."""
    return {} if x.dtype == object else {"initial": _extreme(x.dtype, least)}


def _extreme(dtype: np.dtype[Any], least: bool) -> Any:
    if dtype.kind == "b":
        return not least
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return info.min if least else info.max
    return -np.inf if least else np.inf


class ArgExtreme(OpDef):
    """Family base: the index (int64) of the first extreme along `axis`, or the last with `select_last_index`."""

    inputs = "data"
    outputs = "reduced"
    attrs = {"axis": 0, "keepdims": 1, "select_last_index": 0}
    zero_gradient = "positions do not change with small changes"

    def find(self, x: Array, axis: int) -> Array:
        raise NotImplementedError

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, NUMBER)
        shape = c.shape(0)
        if shape is None:
            return [TensorType(DType.INT64, None)]
        axis = normalize_axis(c, c.attr("axis"), len(shape))
        if shape[axis] == 0:
            c.fail(f"axis {axis} of {c.tensor(0)} is empty, expected at least one element")
        return [TensorType(DType.INT64, reduced_shape(shape, (axis,), c.attr("keepdims")))]

    def supposes(self, c: Infer) -> Sequence[Dim]:
        """The extent minus 1: an empty axis has no extreme. Kernels read the first element."""
        shape = c.shape(0)
        return () if shape is None else [shape[normalize_axis(c, c.attr("axis"), len(shape))] - 1]

    def reference(self, c: Call, x: Array) -> Array:
        axis = normalize_axis(c, c.attr("axis"), x.ndim)
        if x.shape[axis] == 0:
            c.fail(f"axis {axis} of shape {list(x.shape)} is empty, expected at least one element")
        if c.attr("select_last_index"):
            index = x.shape[axis] - 1 - self.find(np.flip(as_computed(x), axis), axis)
        else:
            index = self.find(as_computed(x), axis)
        return np.expand_dims(index, axis) if c.attr("keepdims") else index

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        if shape is None:
            return super().rows(c, axes)
        return rows_after_reduction(c, axes, (normalize_axis(c, c.attr("axis"), len(shape)),))


@register
class ArgMax(ArgExtreme):
    def find(self, x: Array, axis: int) -> Array:
        return np.argmax(x, axis)


@register
class ArgMin(ArgExtreme):
    def find(self, x: Array, axis: int) -> Array:
        return np.argmin(x, axis)
