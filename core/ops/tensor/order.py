"""Cumulative sums and products, and TopK, along one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward, Rewrite
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, RowAxis, RuntimeValue, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import NUMBER, as_computed, check_kind, normalize_axis, untouched_rows


class Cumulative(OpDef):
    """Family base: a cumulative sum or product along `axis`.

    With `exclusive` it is without the element itself, with `reverse` from the end.
    """

    inputs = "x, axis"
    outputs = "y"
    attrs = {"exclusive": 0, "reverse": 0}
    params = {"axis": 1}
    accumulate: ClassVar[Callable[..., Any]]
    neutral: ClassVar[int]

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, NUMBER)
        axis, shape = c.param("axis"), c.shape(0)
        if axis is not None and shape is not None:
            normalize_axis(c, axis[0], len(shape))
        return [c.tensor(0)]

    def reference(self, c: Call, x: Array, _: RuntimeValue = None) -> Array:
        axis = normalize_axis(c, (c.param("axis") or (0,))[0], x.ndim)
        ordered = np.moveaxis(as_computed(x), axis, 0)
        if c.attr("reverse"):
            ordered = ordered[::-1]
        total = self.accumulate(ordered, 0, ordered.dtype)
        if c.attr("exclusive") and len(total):
            total = np.concatenate([np.full_like(total[:1], self.neutral), total[:-1]])
        return np.moveaxis(total[::-1] if c.attr("reverse") else total, 0, axis).astype(x.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        axis, shape = c.param("axis"), c.shape(0)
        if axis is None or shape is None:
            return super().rows(c, axes)
        return untouched_rows(c, axes, {normalize_axis(c, axis[0], len(shape))})


@register
class CumSum(Cumulative):
    accumulate = np.add.accumulate
    neutral = 0

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [g.again(g.dy(), g.x_or_none(1), reverse=int(not g.attr("reverse")))[0]]


@register
class CumProd(Cumulative):
    accumulate = np.multiply.accumulate
    neutral = 1

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """A Scan, whose gradient is right also where an element is zero."""
        axis = normalize_axis(g, (g.param("axis") or (0,))[0], g.x().rank)
        x, reverse = g.x(), (int(g.attr("reverse")),)
        one = g.writer.fill(1, x.dtype, (*x.shape[:axis], *x.shape[axis + 1 :]))
        return [
            one.ops(
                "Scan",
                x,
                outputs=2,
                body=self._step(g, one),
                num_scan_inputs=1,
                scan_input_axes=(axis,),
                scan_output_axes=(axis,),
                scan_input_directions=reverse,
                scan_output_directions=reverse,
            )[1]
        ]

    def _step(self, g: Rewrite, one: Term) -> Graph:
        body = Graph("step")
        inner = g.writer.nested(body)
        before, factor = (inner.input(name, one.value.tensor) for name in ("before", "factor"))
        after = before * factor
        seen = before if g.attr("exclusive") else after
        body.outputs = [after.value, seen.op("Identity").value]
        return body


@register
class TopK(OpDef):
    """The K greatest (or least) elements along `axis`, and their indices; ties in order of their indices."""

    inputs = "X, K"
    outputs = "Values, Indices"
    attrs = {"axis": -1, "largest": 1, "sorted": 1}
    params = {"K": 1}
    symbolic = ("K",)

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, shape, given = check_kind(c, 0, NUMBER), c.shape(0), c.param("K")
        if given is not None and len(given) != 1:
            c.fail(f"K has {len(given)} elements, expected 1")
        if shape is None:
            return [TensorType(dtype, None), TensorType(DType.INT64, None)]
        axis = normalize_axis(c, c.attr("axis"), len(shape))
        count: Dim = c.fresh_dim("k") if given is None else given[0]
        extent = shape[axis]
        if isinstance(count, int) and (count < 0 or (isinstance(extent, int) and count > extent)):
            c.fail(f"K is {count}, expected 0 to {extent}")
        result = (*shape[:axis], count, *shape[axis + 1 :])
        return [TensorType(dtype, result), TensorType(DType.INT64, result)]

    def supposes(self, c: Infer) -> Sequence[Dim]:
        """The extent minus K: kernels read K elements of each line. A run fails where it is negative."""
        shape, given = c.shape(0), c.param("K")
        if shape is None or given is None:
            return ()
        return [shape[normalize_axis(c, c.attr("axis"), len(shape))] - given[0]]

    def reference(self, c: Call, x: Array, _: RuntimeValue = None) -> tuple[Array, Array]:
        axis, count = normalize_axis(c, c.attr("axis"), x.ndim), int((c.param("K") or (0,))[0])
        if not 0 <= count <= x.shape[axis]:
            c.fail(f"K is {count}, expected 0 to {x.shape[axis]}")
        order = (
            _descending(as_computed(x), axis) if c.attr("largest") else np.argsort(as_computed(x), axis, kind="stable")
        )
        indices = np.take(order, range(count), axis)
        return np.take_along_axis(x, indices, axis), indices.astype(np.int64)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        if shape is None:
            return super().rows(c, axes)
        return untouched_rows(c, axes, {normalize_axis(c, c.attr("axis"), len(shape))})

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        indices = g.y(1) if len(g.node.outputs) > 1 else g.again(g.x(), g.x_or_none(1), outputs=2)[1]
        zeros = g.writer.zeros_like(g.x().value)
        return [zeros.op("ScatterElements", indices, g.dy(), axis=g.attr("axis"), reduction="add")]


def _descending(x: Array, axis: int) -> Any:
    """The indices that sort `x` along `axis` in descending order, stably: equal elements stay in order."""
    mirrored = np.argsort(np.flip(x, axis), axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(mirrored, axis)
