"""Operators on parts of tensors: Slice, Pad, Trilu, ReverseSequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.ir.dim import Dim, SymDim, floor_div, is_checked_at_run_time, is_never_negative, maximum
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward, Rewrite, scatter_along
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, RowAxis, RuntimeValue, register
from lathe.core.ops.opdef.terms import Operand, Term
from lathe.core.ops.opdef.type_rules import INDEX, Shape, check_kind, expect_shape, normalize_axes, untouched_rows

# "To the end": exporters write the greatest (or least) number of int32 or int64, tf2onnx writes 10**9. Symbolic extents
# are assumed to be smaller than this, since a longer axis would take gigabytes.
_FAR = 10**9
_FARTHEST = 2**31 - 1  # the greatest `k` of Trilu in its definition, whose indices are int32
_Range = tuple[Any, Any, int]


@register
class Slice(OpDef):
    """Python's slicing along `axes` (the first ones when absent), clamped to the input.

    If the extent or a bound is symbolic, the type may assume that the bounds lie within the extent (`supposes`). If the
    extent is symbolic and the end is a number above 1, as in models that clamp a length, the result gets a new symbol.
    In dynamic-shape code, the minimum of the end and the extent takes the place of the end.
    """

    inputs = "data, starts, ends, axes?, steps?"
    outputs = "output"
    params = {"starts": 1, "ends": 2, "axes": 3, "steps": 4}
    symbolic = ("starts", "ends")
    shape_arithmetic = True

    def ranges(self, c: Infer | Call, rank: int) -> dict[int, _Range] | None:
        """Start, end and step of each axis that is cut, by axis; None if they are not known.

        ModelError if their numbers differ, a step is 0, or an axis is out of range or occurs twice.
        """
        starts, ends = c.param("starts"), c.param("ends")
        if starts is None or ends is None or (isinstance(c, Infer) and self._has_unknown_axes(c)):
            return None
        axes = normalize_axes(c, c.param("axes") or range(len(starts)), rank)
        steps = c.param("steps") or (1,) * len(starts)
        if not len(starts) == len(ends) == len(axes) == len(steps):
            lengths = f"{len(starts)}, {len(ends)}, {len(axes)} and {len(steps)}"
            c.fail(f"starts, ends, axes and steps have {lengths} elements, expected one length")
        if 0 in steps:
            c.fail("a step is 0, expected any other number")
        return {axis: (starts[i], ends[i], steps[i]) for i, axis in enumerate(axes)}

    def _axes(self, c: Infer, rank: int) -> Sequence[int]:
        """The axes that the Slice cuts, even if its bounds are not known; all axes if `axes` is not known."""
        axes = c.param("axes")
        if axes is not None:
            return normalize_axes(c, axes, rank)
        bounds = [c.shape(index) for index in (1, 2) if c.has_input(index)]
        count = next((shape[0] for shape in bounds if shape is not None and len(shape) == 1), rank)
        return range(rank if c.has_param("axes") or not isinstance(count, int) else count)

    def _has_unknown_axes(self, c: Infer) -> bool:
        return any(c.has_param(name) and c.param(name) is None for name in ("axes", "steps"))

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = c.tensor(0)
        for index in filter(c.has_input, range(1, 5)):
            check_kind(c, index, INDEX)
        if type_.shape is None:
            return [type_]
        ranges = self.ranges(c, type_.rank)
        dims = list(type_.shape)
        if ranges is None:
            cut_axes = self._axes(c, type_.rank)
            dims = [c.fresh_dim(f"d{axis}") if axis in cut_axes else dim for axis, dim in enumerate(dims)]
            return [TensorType(type_.dtype, tuple(dims))]
        for axis, bounds in ranges.items():
            cut = slice_length(dims[axis], *bounds)
            dims[axis] = (
                c.fresh_dim(f"d{axis}") if cut is None or any(map(is_checked_at_run_time, cut.supposed)) else cut.length
            )
        return [TensorType(type_.dtype, tuple(dims))]

    def supposes(self, c: Infer) -> Sequence[Dim]:
        shape = c.shape(0)
        ranges = None if shape is None else self.ranges(c, len(shape))
        if shape is None or ranges is None:
            return ()
        cuts = (slice_length(shape[axis], *bounds) for axis, bounds in ranges.items())
        return [dim for cut in cuts if cut is not None for dim in cut.supposed]

    def reference(self, c: Call, x: Array, *_: RuntimeValue) -> Array:
        ranges = self.ranges(c, x.ndim) or {}
        return x[tuple(slice(*ranges[axis]) if axis in ranges else slice(None) for axis in range(x.ndim))]

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        ranges = None if shape is None else self.ranges(c, len(shape))
        if shape is None or ranges is None:
            return super().rows(c, axes)
        cut = {axis for axis, (start, end, step) in ranges.items() if not _is_whole(shape[axis], start, end, step)}
        return untouched_rows(c, axes, cut)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        ranges = self.ranges(g, g.x().rank)
        if ranges is None:
            g.unsupported("starts, ends, axes and steps must be known to differentiate it")
        dx, widths = g.dy(), list[tuple[Dim, Dim]]()
        for axis, extent in enumerate(g.x().shape):
            if axis in ranges:
                dx, first = _dilated_gradient(dx, axis, _first_index(g, extent, *ranges[axis]), ranges[axis][2])
                widths.append((first, extent - first - dx.shape[axis]))
            else:
                widths.append((0, 0))
        return [dx.pad(widths)]


def is_whole_slice(c: Infer) -> bool:
    """Whether a Slice returns its whole input, for all values of the symbols; False if that is not known."""
    shape = c.shape(0)
    ranges = None if shape is None else Slice().ranges(c, len(shape))
    return shape is not None and ranges is not None and all(_is_whole(shape[k], *cut) for k, cut in ranges.items())


def _is_whole(extent: Dim, start: Dim, end: Dim, step: int) -> bool:
    """Whether a slice takes an axis whole and in order, for all values of the symbols."""
    first = start == 0 or (_from_end(start) and is_never_negative(-(extent + start)))
    return step == 1 and first and (is_never_negative(end - extent) or (isinstance(end, int) and end >= _FAR))


def _from_end(bound: Dim) -> bool:
    """Whether a bound is negative (counts from the end) or 0 for all values of its symbols."""
    return isinstance(bound, SymDim) and is_never_negative(-bound)


def first_index(extent: Dim, start: Dim) -> Dim:
    """The first index of a slice with positive step, from the start of the axis, under the assumptions of its type."""
    return _bound(extent, start)[0]


@dataclass(frozen=True, slots=True)
class SliceLength:
    """The number of elements that a slice takes; it is right if no dimension in `supposed` is negative."""

    length: Dim
    supposed: tuple[Dim, ...] = ()


def slice_length(extent: Dim, start: Dim, end: Dim, step: int) -> SliceLength | None:
    """The number of elements that a slice takes along an axis of extent `extent`, with the assumptions behind it.

    Bounds are clamped if their order is known, and otherwise assumed to lie within the extent. None if the number
    remains unknown, or no such tensor can exist.
    """
    if isinstance(extent, int) and extent < 0:
        return None
    if isinstance(extent, int) and isinstance(start, int) and isinstance(end, int):
        return SliceLength(len(range(*slice(start, end, step).indices(extent))))
    if _is_whole(extent, start, end, step):
        return SliceLength(extent)
    if step < 0:
        return None
    if _clamps(extent, end):
        return _clamped_cut(extent, start, end, step)
    (first, first_supposed), (last, last_supposed) = _bound(extent, start), _bound(extent, end)
    if is_never_negative(first - last):
        return SliceLength(0, (*first_supposed, *last_supposed))
    length = floor_div(last - first + (step - 1), step)
    return SliceLength(length, (*first_supposed, *last_supposed, last - first))


def _clamps(extent: Dim, end: Dim) -> bool:
    """Whether a slice clamps a symbolic extent: its end is a number above 1, counted from the start.

    A number from `_FAR` on means the end of the axis.
    """
    return isinstance(end, int) and 1 < end < _FAR and not isinstance(extent, int)


def _clamped_cut(extent: Dim, start: Dim, end: Dim, step: int) -> SliceLength | None:
    """The number of elements of a slice for which `_clamps` is true, in dynamic-shape code: with a minimum.

    None if the extent has symbols other than sizes of dynamic-shape code, or the start is no number from the start.
    """
    if not has_only_sizes(extent) or not isinstance(start, int) or start < 0:
        return None
    last = extent + end - maximum(extent, end)  # the minimum of the two
    return SliceLength(floor_div(maximum(last - start, 0) + (step - 1), step))


def _bound(extent: Dim, bound: Dim) -> tuple[Dim, tuple[Dim, ...]]:
    """A bound of a slice with positive step, from the start of the axis, and dimensions assumed to be 0 or more."""
    if isinstance(bound, int) and bound >= _FAR:
        return extent, ()
    if isinstance(bound, int) and bound <= -_FAR:
        return 0, ()
    if isinstance(bound, int) and bound < 0:
        bound = extent + bound
        if isinstance(bound, int):
            return max(0, bound), ()
        return bound, (bound,)
    if _from_end(bound):  # counts from the end: a value of 0 would mean the start
        from_start = extent + bound
        return from_start, () if from_start == 0 else (from_start, -bound - 1)
    if is_never_negative(bound - extent):
        return extent, ()
    return bound, (bound, extent - bound)


@register
class Pad(OpDef):
    """Pads (or with negative numbers crops) each axis; `mode` is constant, reflect, edge or wrap."""

    inputs = "data, pads, constant_value?, axes?"
    outputs = "output"
    attrs = {"mode": "constant"}
    params = {"pads": 1, "constant_value": 2, "axes": 3}
    symbolic = ("pads",)

    def widths(self, c: Infer | Call, rank: int) -> list[tuple[Any, Any]] | None:
        """The numbers of elements to add before and after, per axis; None if they are not known.

        ModelError if `pads` does not have two elements per axis, or an axis is out of range or occurs twice.
        """
        pads, given = c.param("pads"), c.param("axes")
        if pads is None or (given is None and isinstance(c, Infer) and c.has_param("axes")):
            return None
        axes = normalize_axes(c, range(rank) if given is None else given, rank)
        if len(pads) != 2 * len(axes):
            c.fail(f"pads has {len(pads)} elements, expected {2 * len(axes)}")
        widths: list[tuple[Any, Any]] = [(0, 0)] * rank
        for i, axis in enumerate(axes):
            widths[axis] = (pads[i], pads[i + len(axes)])
        return widths

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = c.tensor(0)
        if c.attr("mode") not in ("constant", "reflect", "edge", "wrap"):
            c.fail(f"attribute 'mode' is '{c.attr('mode')}', expected constant, reflect, edge or wrap")
        if type_.shape is None:
            return [type_]
        widths = self.widths(c, type_.rank)
        if widths is None:
            return [TensorType(type_.dtype, tuple(c.fresh_dim(f"d{axis}") for axis in range(type_.rank)))]
        dims = tuple(dim + before + after for dim, (before, after) in zip(type_.shape, widths, strict=True))
        if any(isinstance(dim, int) and dim < 0 for dim in dims):
            c.fail(f"pads crop more elements than {type_} has")
        return [TensorType(type_.dtype, dims)]

    def supposes(self, c: Infer) -> Sequence[Dim]:
        """Each padded extent less its crops (negative widths), and minus 1 unless the mode is "constant".

        The other modes repeat elements, so one must be left. Kernels rely on these assumptions.
        """
        shape = c.shape(0)
        widths = None if shape is None else self.widths(c, len(shape))
        least = 0 if c.attr("mode") == "constant" else 1
        pairs = zip(shape or (), widths or (), strict=False)
        return [
            extent - sum(maximum(-width, 0) for width in added) - least for extent, added in pairs if added != (0, 0)
        ]

    def reference(self, c: Call, x: Array, *_: RuntimeValue) -> Array:
        widths = self.widths(c, x.ndim) or []
        if any(size + before + after < 0 for (before, after), size in zip(widths, x.shape, strict=True)):
            raise ValueError(f"pads {widths} crop more elements than shape {list(x.shape)} has")
        # One side may crop more than all of x: the rest of the crop is taken from what the other side adds.
        kept = [(max(0, -a), max(0, -a, size - max(0, -b))) for (a, b), size in zip(widths, x.shape, strict=True)]
        crop = tuple(slice(*ends) for ends in kept)
        if c.attr("mode") == "constant":
            fill = c.param("constant_value")
            value = x.dtype.type(0) if fill is None else np.asarray(fill[0]).astype(x.dtype)
            y = np.full([size + a + b for (a, b), size in zip(widths, x.shape, strict=True)], value, x.dtype)
            if x[crop].size:
                y[tuple(slice(lo + a, hi + a) for (lo, hi), (a, _) in zip(kept, widths, strict=True))] = x[crop]
            return y
        grow = [(max(0, a), max(0, b)) for a, b in widths]
        return np.pad(x[crop], grow, mode=c.attr("mode"))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        widths = None if shape is None else self.widths(c, len(shape))
        if widths is None:
            return super().rows(c, axes)
        return untouched_rows(c, axes, {axis for axis, width in enumerate(widths) if width != (0, 0)})

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        x, dy = g.x(), g.dy()
        widths = self.widths(g, x.rank)
        if widths is None:
            g.unsupported("pads and axes must be known to differentiate it")
        if g.attr("mode") != "constant":
            return [_fold_padding_gradient(dy, x.shape, widths, g.attr("mode"))]
        dx = dy.pad([(-before, -after) for before, after in widths])
        filled = dy.sum(keepdims=False) - dx.sum(keepdims=False) if g.wants(2) else None
        return [dx, None, filled.reshape(g.x(2).shape) if filled is not None else None]


@register
class Trilu(OpDef):
    """The upper (`upper` 1) or lower triangle of each matrix, from or up to diagonal `k`, included; zero elsewhere."""

    inputs = "input, k?"
    outputs = "output"
    attrs = {"upper": 1}
    params = {"k": 1}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = c.tensor(0)
        if type_.shape is not None and type_.rank < 2:
            c.fail(f"input is {type_}, expected rank 2 or more")
        return [type_]

    def reference(self, c: Call, x: Array, *_: RuntimeValue) -> Array:
        diagonal = (c.param("k") or (0,))[0]
        return (np.triu if c.attr("upper") else np.tril)(x, diagonal)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        return super().rows(c, axes) if shape is None else untouched_rows(c, axes, {len(shape) - 2, len(shape) - 1})

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [g.again(g.dy(), g.x_or_none(1))[0]]

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """A Where, whose condition compares the difference of an element's column and row with `k`."""
        x, given = g.x(0), g.x_or_none(1)
        down, across = (g.writer.places(x.shape[-2:], axis, 2, DType.INT32) for axis in (0, 1))
        diagonal: Operand = 0
        if given is not None:
            diagonal = given.reshape(()).op("Clip", -_FARTHEST, _FARTHEST).cast(DType.INT32)
        elif g.param("k") is not None:
            diagonal = max(-_FARTHEST, min(int((g.param("k") or (0,))[0]), _FARTHEST))
        kept = across - down >= diagonal if g.attr("upper") else across - down <= diagonal
        return [kept.where(x, g.writer.number(0, x.dtype))]


@register
class ReverseSequence(OpDef):
    """Reverses the first `sequence_lens[i]` steps of sequence i, keeping the others."""

    agreeing = True
    inputs = "input, sequence_lens"
    outputs = "Y"
    attrs = {"batch_axis": 1, "time_axis": 0}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = c.tensor(0)
        check_kind(c, 1, INDEX)
        if type_.shape is not None:
            axes = normalize_axes(c, (c.attr("batch_axis"), c.attr("time_axis")), type_.rank)
            expect_shape(c, 1, (type_.shape[axes[0]],))
        return [type_]

    def reference(self, c: Call, x: Array, lengths: Array) -> Array:
        batch, time = normalize_axes(c, (c.attr("batch_axis"), c.attr("time_axis")), x.ndim)
        steps: Any = x.shape[time]
        if np.any((lengths < 0) | (lengths > steps)):
            c.fail(f"sequence_lens has {lengths.min()} to {lengths.max()}, expected 0 to {steps}")
        index = np.broadcast_to(np.arange(steps), (lengths.size, steps))
        mirrored = np.where(index < lengths[:, None], lengths[:, None] - 1 - index, index)
        shape = [1] * x.ndim
        shape[batch], shape[time] = lengths.size, steps
        order = mirrored if batch < time else mirrored.T
        return np.take_along_axis(x, order.reshape(shape), time)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        if shape is None:
            return super().rows(c, axes)
        batch, time = normalize_axes(c, (c.attr("batch_axis"), c.attr("time_axis")), len(shape))
        if axes[0] == batch and axes[1] == 0:
            return [batch]
        return untouched_rows(c, axes, {batch, time})

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [g.again(g.dy(), g.x(1))[0]]

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """A Gather of steps by computed indices, from all sequences as one list of steps.

        UnsupportedError unless batch and time are the first two axes. A length out of range gives an index out of
        range, which Gather refuses.
        """
        x, rank = g.x(0), g.x(0).rank
        batch, time = normalize_axes(g, (g.attr("batch_axis"), g.attr("time_axis")), rank)
        if {batch, time} != {0, 1} or x.shape[batch] != g.x(1).shape[0]:
            g.unsupported("sequences must lie along the first two axes, and there must be as many as lengths")
        step, sequence = (g.writer.places(x.shape, axis, 2) for axis in (time, batch))
        count, steps = (g.writer.extent(x.shape[axis]) for axis in (0, time))
        length = g.x(1).cast(DType.INT64).unsqueeze(1 - batch)
        mirrored = (step < length).where(length - 1 - step, step)
        fits = (length >= 0).op("And", length <= steps)
        stride = g.writer.extent(x.shape[1])
        flat = mirrored * stride + sequence if time == 0 else sequence * stride + mirrored
        nowhere = count * stride
        rows = x.reshape((x.shape[0] * x.shape[1], *x.shape[2:]))
        return [rows.gather(fits.where(flat, nowhere))]


def _dilated_gradient(dy: Term, axis: int, first: Dim, step: int) -> tuple[Term, Dim]:
    """The gradient `dy` of a slice with `step` - 1 zeros after each element along `axis`, and the slice's least index.

    `first` is the first index of the slice, in the input. For a negative step, `dy` is reversed before, so that the
    result is in the order of the input.
    """
    count = dy.shape[axis]
    if step < 0:
        dy, first, step = dy.slice(axis, -1, -_FAR, -1), first + (count - 1) * step, -step
    if step == 1 or count == 0:
        return dy, (first if count != 0 else 0)
    spread = dy.unsqueeze(axis + 1).pad([(0, step - 1 if i == axis + 1 else 0) for i in range(dy.rank + 1)])
    return spread.reshape((*dy.shape[:axis], count * step, *dy.shape[axis + 1 :])), first


def _first_index(c: Infer, extent: Dim, start: Dim, end: Dim, step: int) -> Dim:
    """The first index of a slice, from the start of the axis.

    UnsupportedError for a negative step if the extent or a bound is symbolic.
    """
    if isinstance(extent, int) and isinstance(start, int) and isinstance(end, int):
        return slice(start, end, step).indices(extent)[0]
    if step < 0:
        c.unsupported(f"the first index of a slice of extent {extent} from {start} in steps of {step} must be known")
    return _bound(extent, start)[0]


def _fold_padding_gradient(dy: Term, shape: Shape, widths: Sequence[tuple[Any, Any]], mode: str) -> Term:
    """The gradient of a padding that repeats elements: each output adds to the element that it copies.

    UnsupportedError for a padded axis of symbolic extent.
    """
    for axis, (width, extent) in enumerate(zip(widths, shape, strict=True)):
        if width == (0, 0):
            continue
        if not isinstance(extent, int):
            raise UnsupportedError(f"padding an extent of {extent} by {mode} can only be differentiated for a number")
        before, after = width
        places = np.arange(max(0, -before), extent - max(0, -after))
        shown: Any = np.pad(places, (max(0, before), max(0, after)), mode=mode)  # type: ignore[call-overload]
        dy = scatter_along(dy, dy.writer.array(shown), axis, extent)
    return dy
