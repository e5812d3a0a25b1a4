"""Gather, scatter and related operators. Negative indices count from the end.

An index out of range is an error, except in OneHot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward, Rewrite, scatter_along
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, RowAxis, RuntimeValue, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import (
    BOOL,
    INDEX,
    NUMBER,
    agree,
    check_kind,
    expect_shape,
    normalize_axis,
    same_dtype,
    untouched_rows,
)


def normalize_indices(c: NodeView, indices: Array, extent: int, axis: int) -> Any:
    """Indices as int64 from 0 to `extent - 1`, negative ones resolved; ModelError or FeedError if out of range."""
    wide = indices.astype(np.int64)
    if wide.size and (wide.min() < -extent or wide.max() >= extent):
        wrong = wide.max() if wide.max() >= extent else wide.min()
        c.fail(f"index {wrong} is out of range for axis {axis} of extent {extent}")
    return np.where(wide < 0, wide + extent, wide)


@register
class Gather(OpDef):
    """The slices of `data` at `indices` along `axis`; the axes of `indices` replace this axis in the result.

    Negative indices count from the end. ModelError or FeedError for an index out of range.
    """

    inputs = "data, indices"
    outputs = "output"
    attrs = {"axis": 0}
    shape_arithmetic = True

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 1, INDEX)
        data, indices = c.shape(0), c.shape(1)
        if data is None or indices is None:
            return [TensorType(c.dtype(0), None)]
        if not data:
            c.fail(f"data is {c.tensor(0)}, expected rank 1 or more")
        axis = normalize_axis(c, c.attr("axis"), len(data))
        return [TensorType(c.dtype(0), (*data[:axis], *indices, *data[axis + 1 :]))]

    def reference(self, c: Call, data: Array, indices: Array) -> Array:
        axis = normalize_axis(c, c.attr("axis"), data.ndim)
        return np.take(data, normalize_indices(c, indices, data.shape[axis], axis), axis)

    def quickly(self, c: NodeView) -> Callable[[Array, Array], Array]:
        axis = c.attr("axis")
        return lambda data, indices: np.asarray(data.take(indices, axis), data.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        data, indices = c.shape(0), c.shape(1)
        if data is None or indices is None or (axes[0] is not None and axes[1] is not None):
            return MixesRows("Gather may pick from any row")
        axis = normalize_axis(c, c.attr("axis"), len(data))
        if axes[1] is not None:
            return [axis + axes[1]]
        if axes[0] is None:
            return [None]
        if axes[0] == axis:
            return MixesRows("Gather picks along the row axis")
        return [axes[0] + (len(indices) - 1 if axes[0] > axis else 0)]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        axis = normalize_axis(g, g.attr("axis"), g.x().rank)
        return [scatter_along(g.dy(), g.x(1), axis, g.x().shape[axis])]


def _grid(shape: tuple[int, ...], axis: int, indices: Any) -> tuple[Any, ...]:
    """An index tuple of arrays: `indices`, of this shape, along `axis`, and an element's own position along others."""
    grid: list[Any] = list(np.ogrid[tuple(slice(extent) for extent in shape)])
    grid[axis] = indices
    return tuple(grid)


def _positions(like: Term, axis: int) -> Term:
    """The positions 0, 1, 2 ... along `axis` of `like`, int64, of extent 1 along all other axes."""
    shape = [extent if i == axis else 1 for i, extent in enumerate(like.shape)]
    ones = like.writer.fill(1, DType.INT64, shape)
    return ones.op("CumSum", like.writer.array(axis), exclusive=1)


@register
class GatherElements(OpDef):
    """Element by element: y[i][j] = data[indices[i][j]][j] for axis 0."""

    inputs = "data, indices"
    outputs = "output"
    attrs = {"axis": 0}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 1, INDEX)
        data, indices = c.shape(0), c.shape(1)
        if data is not None and indices is not None and len(data) != len(indices):
            c.fail(f"data is {c.tensor(0)}, indices {c.tensor(1)}; expected one rank")
        if data is not None:
            normalize_axis(c, c.attr("axis"), len(data))
        return [TensorType(c.dtype(0), indices)]

    def supposes(self, c: Infer) -> Sequence[Dim]:
        """The excess of `data` over `indices` along each other axis; a run fails where it is negative."""
        data, indices = c.shape(0), c.shape(1)
        if data is None or indices is None:
            return ()
        axis = normalize_axis(c, c.attr("axis"), len(data))
        pairs = enumerate(zip(data, indices, strict=True))
        return [extent - count for at, (extent, count) in pairs if at != axis]

    def reference(self, c: Call, data: Array, indices: Array) -> Array:
        axis = normalize_axis(c, c.attr("axis"), data.ndim)
        return data[_grid(indices.shape, axis, normalize_indices(c, indices, data.shape[axis], axis))]

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return _rows_together(c, axes)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        zeros = g.writer.zeros_like(g.x().value)
        return [zeros.op("ScatterElements", g.x(1), g.dy(), axis=g.attr("axis"), reduction="add")]


def _rows_together(c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
    """The rule for batch rows (`OpDef.rows`) of element-wise gathers and scatters.

    All inputs must have rows along the same axis, of equal extents, other than the axis of the operator.
    """
    shapes = [c.shape(i) for i in range(len(axes))]
    if all(axis is None for axis in axes):
        return [None]
    row = axes[0]
    if row is None or len(set(axes)) > 1 or any(shape is None for shape in shapes):
        return MixesRows(f"not all inputs of {c.op.name} have rows along one axis")
    known = [shape for shape in shapes if shape is not None]
    if row == normalize_axis(c, c.attr("axis"), len(known[0])) or len({shape[row] for shape in known}) > 1:
        return MixesRows(f"{c.op.name} works along the row axis")
    return [row]


def _indexed(c: Call, data: Array, indices: Array, batch: int = 0) -> tuple[Array, list[Array]]:
    """`data` and the indices along its axes after the first `batch`, from coordinates along the last axis of `indices`.

    Without coordinates, where each place is all of `data`, the result has an axis of extent 1 for a single index.
    """
    if indices.shape[-1] == 0:
        return np.expand_dims(data, batch), [np.zeros(indices.shape[:-1], np.int64)]
    places = range(indices.shape[-1])
    return data, [normalize_indices(c, indices[..., i], data.shape[batch + i], batch + i) for i in places]


@register
class GatherND(OpDef):
    """The slices of `data` at coordinates, which the last axis of `indices` holds (ONNX GatherND).

    With b = `batch_dims`, the first b axes of both inputs have equal extents, and batch items are indexed separately.
    The k coordinates of a slice are indices along axes b to b + k - 1 of `data`; negative ones count from the end. The
    output is [*indices.shape[:-1], *data.shape[b + k :]]. ModelError or FeedError for coordinates out of range.
    """

    agreeing = True
    inputs = "data, indices"
    outputs = "output"
    attrs = {"batch_dims": 0}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 1, INDEX)
        data, indices, batch = c.shape(0), c.shape(1), c.attr("batch_dims")
        if data is None or indices is None or not indices or not isinstance(indices[-1], int):
            return [TensorType(c.dtype(0), None)]
        if not 0 <= batch < min(len(data), len(indices)) or batch + indices[-1] > len(data):
            c.fail(f"data is {c.tensor(0)}, indices {c.tensor(1)}; the indices reach past data's rank")
        if not agree(c, data[:batch], indices[:batch]):
            c.fail(f"data is {c.tensor(0)}, indices {c.tensor(1)}; expected the same {batch} first extents")
        return [TensorType(c.dtype(0), (*indices[:-1], *data[batch + indices[-1] :]))]

    def reference(self, c: Call, data: Array, indices: Array) -> Array:
        batch = c.attr("batch_dims")
        lead = np.ogrid[tuple(slice(extent) for extent in data.shape[:batch])] if batch else []
        spread = [np.expand_dims(g, tuple(range(batch, indices.ndim - 1))) for g in lead]
        data, parts = _indexed(c, data, indices, batch)
        return data[(*spread, *parts)]

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        data, indices = axes
        if data is None:
            shape = c.shape(1)
            last = shape is None or indices == len(shape) - 1 or (indices or 0) < c.attr("batch_dims")
            return (
                [indices] if indices is None or not last else MixesRows("GatherND's coordinates lie along the row axis")
            )
        shape, batch = c.shape(1), c.attr("batch_dims")
        if data == indices and data < batch:
            return [data]
        if indices is None and shape and isinstance(shape[-1], int) and data >= batch + shape[-1]:
            return [len(shape) - 1 + data - batch - shape[-1]]  # an axis that no coordinate indexes
        return MixesRows("GatherND may pick from any row")

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        indices, shape = g.x(1), g.x(1).shape
        batch = g.attr("batch_dims")
        if batch:
            lead = [_positions(indices, axis).expand((*shape[:-1], 1)) for axis in range(batch)]
            indices = lead[0].op("Concat", *lead[1:], indices.cast(DType.INT64), axis=-1)
        return [g.writer.zeros_like(g.x().value).op("ScatterND", indices, g.dy(), reduction="add")]


# How updates are combined with the data; "none" replaces. They are applied one by one, so duplicates accumulate.
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add.at,
    "mul": np.multiply.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}


class Scattering(OpDef):
    """Family base: a copy of `data` with `updates` written at `indices`, combined by `reduction`."""

    agreeing = True
    inputs = "data, indices, updates"
    outputs = "output"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        same_dtype(c, (0, 2))
        check_kind(c, 1, INDEX)
        if c.attr("reduction") not in ("none", *_REDUCTIONS):
            c.fail(f"attribute 'reduction' is '{c.attr('reduction')}', expected none, {', '.join(_REDUCTIONS)}")
        return [c.tensor(0)]

    def write(self, c: NodeView, data: Array, where: tuple[Any, ...], updates: Array) -> Array:
        result = data.copy()
        if c.attr("reduction") == "none":
            result[where] = updates
        else:
            _REDUCTIONS[c.attr("reduction")](result, where, updates)
        return result

    def picked(self, g: Backward, data: Term) -> Term:
        """The elements of `data` at the positions that the updates are written to; subclasses define it.

        `data` has the shape of the output, the result that of the updates.
        """
        raise NotImplementedError

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """The gradients of `data` and `updates`. If several updates replace one element, each gets its gradient.

        For the reduction "mul" it is right where updates are 0, but there its own derivative is not.
        """
        dy, updates = g.dy(), g.x(2)
        match g.attr("reduction"):
            case "none":
                return [g.again(dy, g.x(1), g.writer.zeros_like(updates.value))[0], None, self.picked(g, dy)]
            case "add":
                return [dy, None, self.picked(g, dy)]
            case "mul":
                return [g.again(dy, g.x(1), updates)[0], None, self._of_factors(g, dy, updates)]
        kept = g.x(0).equals(g.y()).cast(dy.dtype)
        written = updates.equals(self.picked(g, g.y())).cast(dy.dtype)
        share = dy / g.again(kept, g.x(1), written, reduction="add")[0]
        return [kept * share, None, written * self.picked(g, share)]

    def _of_factors(self, g: Backward, dy: Term, updates: Term) -> Term:
        """The gradient of updates that are factors: dY times the product of the data and the other updates of a place.

        That is the product of all factors that are not 0, divided by the update; 0 if another update of the place is 0.
        """
        zero = updates.equals(0).cast(dy.dtype)
        product = g.again(g.x(0), g.x(1), updates + zero)[0]
        zeros = g.again(g.writer.zeros_like(dy.value), g.x(1), zero, reduction="add")[0]
        alone = (self.picked(g, zeros) - zero).equals(0).cast(dy.dtype)
        return self.picked(g, dy * product) / (updates + zero) * alone


@register
class ScatterElements(Scattering):
    """Element by element: y[indices[i][j]][j] = updates[i][j] for axis 0."""

    attrs = {"axis": 0, "reduction": "none"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        data, indices, updates = (c.shape(i) for i in range(3))
        if data is not None:
            normalize_axis(c, c.attr("axis"), len(data))
        if indices is not None and updates is not None and not agree(c, updates, indices):
            c.fail(f"indices are {c.tensor(1)}, updates {c.tensor(2)}; expected one shape")
        if data is not None and indices is not None and len(data) != len(indices):
            c.fail(f"data is {c.tensor(0)}, indices {c.tensor(1)}; expected one rank")
        return super().infer(c)

    def reference(self, c: Call, data: Array, indices: Array, updates: Array) -> Array:
        axis = normalize_axis(c, c.attr("axis"), data.ndim)
        where = _grid(indices.shape, axis, normalize_indices(c, indices, data.shape[axis], axis))
        return self.write(c, data, where, updates)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return _rows_together(c, axes)

    def picked(self, g: Backward, data: Term) -> Term:
        return data.op("GatherElements", g.x(1), axis=g.attr("axis"))


@register
class Scatter(ScatterElements):
    """The older name of ScatterElements; the importer renames it."""

    attrs = {"axis": 0, "reduction": "none"}


@register
class ScatterND(Scattering):
    """`data` with slices replaced by `updates` at coordinates, which the last axis of `indices` holds."""

    attrs = {"reduction": "none"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        data, indices, updates = (c.shape(i) for i in range(3))
        if data is not None and indices and updates is not None and isinstance(indices[-1], int):
            expected = (*indices[:-1], *data[indices[-1] :])
            if indices[-1] > len(data) or not agree(c, updates, expected):
                c.fail(f"updates are {c.tensor(2)}, expected [{','.join(map(str, expected))}]")
        return super().infer(c)

    def reference(self, c: Call, data: Array, indices: Array, updates: Array) -> Array:
        indexed, parts = _indexed(c, data, indices)
        return self.write(c, indexed, tuple(parts), updates).reshape(data.shape)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        """Rows stay apart along an axis that no coordinate indexes, if `updates` have rows there, `indices` none."""
        indices, (row, of_indices, of_updates) = c.shape(1), axes
        if not indices or not isinstance(indices[-1], int) or row is None or of_indices is not None:
            return super().rows(c, axes)
        behind = row - indices[-1]
        return [row] if behind >= 0 and of_updates == len(indices) - 1 + behind else super().rows(c, axes)

    def picked(self, g: Backward, data: Term) -> Term:
        return data.op("GatherND", g.x(1))


@register
class OneHot(OpDef):
    """One-hot vectors along a new axis of extent `depth`: `on` at the index, `off` elsewhere, for `values` [off, on].

    An index out of range gives `off` everywhere.
    """

    agreeing = True
    inputs = "indices, depth, values"
    outputs = "output"
    attrs = {"axis": -1}
    params = {"depth": 1}
    symbolic = ("depth",)

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, NUMBER)
        shape, depth = c.shape(0), c.param("depth")
        expect_shape(c, 2, (2,))
        if shape is None:
            return [TensorType(c.dtype(2), None)]
        axis = normalize_axis(c, c.attr("axis"), len(shape) + 1)
        extent = c.fresh_dim("depth") if depth is None else _whole(depth[0])
        if isinstance(extent, int) and extent < 0:
            c.fail(f"depth is {extent}, expected 0 or more")
        return [TensorType(c.dtype(2), (*shape[:axis], extent, *shape[axis:]))]

    def reference(self, c: Call, indices: Array, _: RuntimeValue, values: Array) -> Array:
        depth = int((c.param("depth") or (0,))[0])
        axis = normalize_axis(c, c.attr("axis"), indices.ndim + 1)
        wide = indices.astype(np.int64)
        places: Any = np.expand_dims(np.where(wide < 0, wide + depth, wide), axis)
        order = np.arange(depth).reshape([depth if i == axis else 1 for i in range(indices.ndim + 1)])
        return np.where(places == order, values[1], values[0])

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape, row = c.shape(0), axes[0]
        if shape is None or row is None or any(axis is not None for axis in axes[1:]):
            return super().rows(c, axes)
        return [row + (normalize_axis(c, c.attr("axis"), len(shape) + 1) <= row)]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """For `values` only: the sums of dY where the result is `off` and where it is `on`."""
        dy = g.dy()
        (hot,) = g.again(g.x(0), g.x_or_none(1), g.writer.array([0, 1], dy.dtype))
        off, on = ((dy * part).sum(keepdims=False).unsqueeze(0) for part in (1 - hot, hot))
        return [None, None, off.op("Concat", on, axis=0)]

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """A Where of a comparison of the index with 0..depth-1. UnsupportedError for an unknown or very large depth."""
        depth, indices, values = g.param("depth"), g.x(0).cast(DType.INT64), g.x(2)
        if depth is None or not isinstance(_whole(depth[0]), int) or values.shape != (2,):
            g.unsupported("the depth, or the number of values, is not known")
        if depth[0] > _DEEPEST:
            g.unsupported(f"depth is {depth[0]}, expected at most {_DEEPEST}: larger ones would be large constants")
        count, rank = int(depth[0]), indices.rank + 1
        axis = normalize_axis(g, g.attr("axis"), rank)
        order = np.arange(count).reshape([count if i == axis else 1 for i in range(rank)])
        places = (indices < 0).where(indices + count, indices).unsqueeze(axis)
        off, on = (values.gather(g.writer.number(index, DType.INT64)) for index in (0, 1))
        return [places.equals(g.writer.array(order, DType.INT64)).where(on, off)]


_DEEPEST = 1 << 20  # the largest depth that is defined by comparison: its positions are a constant of 8 MiB


def _whole(value: Any) -> Dim:
    return int(value) if isinstance(value, float) else value


@register
class NonZero(OpDef):
    """The coordinates of the elements that are not zero: int64 [rank, count], one column each, in row-major order."""

    inputs = "X"
    outputs = "Y"
    zero_gradient = "positions do not change with small changes"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        shape = c.shape(0)
        rank = c.fresh_dim("rank") if shape is None else max(1, len(shape))
        return [TensorType(DType.INT64, (rank, c.fresh_dim("count")))]

    def reference(self, c: Call, x: Array) -> Array:
        return np.array(np.nonzero(np.atleast_1d(x)), np.int64)


@register
class Compress(OpDef):
    """Slices along `axis` (elements of the flattened input if absent) whose condition is true.

    Slices beyond the end of a shorter condition are left out.
    """

    inputs = "input, condition"
    outputs = "output"
    attrs = {"axis": None}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 1, BOOL)
        type_, count = c.tensor(0), c.fresh_dim("count")
        if c.attr("axis") is None:
            return [TensorType(type_.dtype, (count,))]
        if type_.shape is None:
            return [type_]
        axis = normalize_axis(c, c.attr("axis"), type_.rank)
        return [TensorType(type_.dtype, (*type_.shape[:axis], count, *type_.shape[axis + 1 :]))]

    def reference(self, c: Call, x: Array, condition: Array) -> Array:
        axis = c.attr("axis")
        extent = x.size if axis is None else x.shape[normalize_axis(c, axis, x.ndim)]
        if condition.size > extent:
            c.fail(f"condition has {condition.size} elements, expected at most {extent}")
        return np.compress(condition, x, axis)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        if shape is None or c.attr("axis") is None:
            return super().rows(c, axes)
        return untouched_rows(c, axes, {normalize_axis(c, c.attr("axis"), len(shape))})

    def definition(self, g: Rewrite) -> Sequence[Term]:
        axis = g.attr("axis")
        x = g.x().reshape((g.x().value.tensor.size,)) if axis is None else g.x()
        return [x.gather(g.x(1).op("NonZero").squeeze(0), axis or 0)]


@register
class Unique(OpDef):
    """The distinct elements (or slices along `axis`), their first indices, the inverse indices, and their counts.

    They are sorted, or in the order of their first occurrence if `sorted` is 0.
    """

    inputs = "X"
    outputs = "Y, indices, inverse_indices, counts"
    attrs = {"axis": None, "sorted": 1}
    no_gradient = "the number of distinct elements may change with small changes"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_, count, axis = c.tensor(0), c.fresh_dim("count"), c.attr("axis")
        if axis is None:
            first = TensorType(type_.dtype, (count,))
            extent = c.fresh_dim("size") if type_.shape is None else type_.size
        elif type_.shape is None:
            first, extent = type_, c.fresh_dim("size")
        else:
            at = normalize_axis(c, axis, type_.rank)
            first = TensorType(type_.dtype, (*type_.dims[:at], count, *type_.dims[at + 1 :]))
            extent = type_.dims[at]
        return [first, *(TensorType(DType.INT64, (size,)) for size in (count, extent, count))]

    def reference(self, c: Call, x: Array) -> tuple[Array, ...]:
        axis = c.attr("axis")
        y, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
        inverse = inverse.reshape(-1)
        if not c.attr("sorted"):
            order = np.argsort(first)
            y, first, counts = np.take(y, order, 0 if axis is None else axis), first[order], counts[order]
            inverse = np.argsort(order)[inverse]
        return y, first, inverse, counts


@register
class TensorScatter(OpDef):
    """past_cache with `update` written along `axis` from write_indices[n] on (0 when absent) for each batch item n.

    In mode "circular", positions past the end wrap around to the start; otherwise they are an error of the run.
    """

    agreeing = True
    inputs = "past_cache, update, write_indices?"
    outputs = "present_cache"
    attrs = {"axis": -2, "mode": "linear"}
    no_gradient = "it writes to a cache, which nothing is trained through"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        same_dtype(c, (0, 1))
        if c.attr("mode") not in ("linear", "circular"):
            c.fail(f"mode is {c.attr('mode')!r}, expected linear or circular")
        cache, update = c.shape(0), c.shape(1)
        if cache is not None and update is not None:
            axis = normalize_axis(c, c.attr("axis"), len(cache))
            if axis == 0 or len(update) != len(cache):
                c.fail(f"axis is {axis}, update {c.tensor(1)}: expected an axis after the batch, and the cache's rank")
            expect_shape(c, 1, (*cache[:axis], "L", *cache[axis + 1 :]))
            expect_shape(c, 2, cache[:1])
        return [c.tensor(0)]

    def reference(self, c: Call, cache: Array, update: Array, starts: Array | None = None) -> Array:
        axis = normalize_axis(c, c.attr("axis"), cache.ndim)
        result, size = cache.copy(), cache.shape[axis]
        for item in range(len(cache)):
            first = 0 if starts is None else int(starts[item])
            positions = first + np.arange(update.shape[axis])
            positions = positions % size if c.attr("mode") == "circular" else positions
            if len(positions) and (positions.min() < 0 or positions.max() >= size):
                c.fail(f"writes at {positions.min()} to {positions.max()}, the cache has {size} positions")
            where: Any = (slice(None),) * (axis - 1)
            result[item][(*where, positions)] = update[item]
        return result

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        if all(axis is None for axis in axes):
            return [None]
        if any(axes[i] != 0 for i in range(len(axes)) if c.has_input(i)):
            return MixesRows("its cache, update and positions do not all have their rows along the batch axis")
        return [0]
