"""Operators that rearrange elements: reshapes, permutations, concatenation, splits, repetition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.ir.dim import Dim, Maximum, floor_div, product, replace_atom, symbols
from lathe.core.ir.equation import solve_maximum
from lathe.core.ir.graph import Array
from lathe.core.ir.types import TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward
from lathe.core.ops.opdef.registry import (
    Call,
    Infer,
    MixesRows,
    NodeView,
    OpDef,
    Required,
    RowAxis,
    RuntimeValue,
    register,
)
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import (
    Shape,
    broadcast_shapes,
    normalize_axes,
    normalize_axis,
    same_dtype,
    shape_text,
    unique_axes,
    unknown_shape,
    untouched_rows,
)


class SameElements(OpDef):
    """Family base: the output has the input's elements in the same order, in the shape that `target` returns."""

    outputs = "output"
    shape_arithmetic = True

    def target(self, c: Infer | Call, shape: Shape) -> Shape | None:
        """The output shape for an input shape; None if it depends on values that are not known.

        An error (`c.fail`) if no such shape exists.
        """
        raise NotImplementedError

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = c.tensor(0)
        target = self.unknown(c) if type_.shape is None else self.target(c, type_.shape)
        return [TensorType(type_.dtype, target)]

    def unknown(self, c: Infer) -> Shape | None:
        """The output shape if the input's rank is not known; None, the default, if the output's is not known either."""
        return None

    def reference(self, c: Call, x: Array, *_: RuntimeValue) -> Array:
        target = self.target(c, x.shape)
        if target is None or product(target) != x.size:
            c.fail(f"cannot give {x.size} elements of shape {list(x.shape)} the shape {shape_text(target)}")
        return x.reshape(target)  # type: ignore[arg-type]

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        old, new = c.shape(0), c.node.output.tensor.shape
        if any(axis is not None for axis in axes[1:]):
            return MixesRows(f"the shape given to {c.op.name} has rows")
        if axes[0] is None:
            return [None]
        axis = None if old is None or new is None else row_axis_after_reshape(old, axes[0], new, c.row_symbol)
        return MixesRows(f"{c.op.name} spreads or joins rows") if axis is None else [axis]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [g.dy().reshape(g.x().shape)]


def row_axis_after_reshape(old: Shape, axis: int, new: Shape, row_symbol: str) -> int | None:
    """The axis of `new` along which rows lie after a reshape, or None if rows are spread over several axes.

    Rows lie along `axis` of `old`. The extents before the axis of `new` must have the same product as those before
    `axis`. Each row must be a whole number of indices along the new axis, or each index a whole number of rows. In the
    second case the extent must depend on `row_symbol`, the number of rows, so that every caller brings whole indices.
    """
    outside = product(old[:axis])
    for candidate, extent in enumerate(new):
        if product(new[:candidate]) == outside and _divides_rows(old[axis], extent, row_symbol):
            return candidate
    return None


def _divides_rows(old: Dim, new: Dim, row_symbol: str) -> bool:
    """Whether an axis of extent `old` can become one of extent `new` without mixing the rows of different callers."""
    steps_per_row = _exact_quotient(new, old)
    if steps_per_row is not None:
        return row_symbol not in symbols(steps_per_row)
    rows_per_step = _exact_quotient(old, new)
    return rows_per_step is not None and row_symbol in symbols(new) and row_symbol not in symbols(rows_per_step)


def _exact_quotient(x: Dim, y: Dim) -> Dim | None:
    if y == 0:
        return None
    quotient = floor_div(x, y)
    return quotient if quotient * y == x else None


@register
class Reshape(SameElements):
    """In `shape`, -1 is inferred from the other extents, and 0 copies the input's extent (unless `allowzero`)."""

    inputs = "data, shape"
    attrs = {"allowzero": 0}
    params = {"shape": 1}
    symbolic = ("shape",)

    def target(self, c: Infer | Call, shape: Shape) -> Shape | None:
        wanted = self._requested_shape(c, shape)
        if wanted is None:
            return unknown_shape(c, c.shape(1)) if isinstance(c, Infer) else None
        return self._infer_minus_one(c, shape, wanted)

    def supposes(self, c: Infer) -> Sequence[Dim]:
        shape = c.shape(0)
        wanted = None if shape is None else self._requested_shape(c, shape)
        taken = None if shape is None or wanted is None else _required_side(shape, wanted)
        if taken is None:
            return ()
        maximum, side = taken
        return [side - other for other in maximum.sides]

    def _requested_shape(self, c: Infer | Call, shape: Shape) -> Shape | None:
        """The parameter `shape`, None if not known. Zeros become the input's extents unless `allowzero`; -1 stays."""
        wanted = c.param("shape")
        if wanted is None or c.attr("allowzero"):
            return wanted
        return tuple(self._copied_extent(c, shape, i, dim) for i, dim in enumerate(wanted))

    def unknown(self, c: Infer) -> Shape | None:
        wanted = c.param("shape")
        if wanted is None:
            return unknown_shape(c, c.shape(1))
        return tuple(c.fresh_dim(f"d{i}") if dim in (0, -1) else dim for i, dim in enumerate(wanted))

    def _copied_extent(self, c: NodeView, shape: Shape, index: int, dim: Dim) -> Dim:
        if dim != 0:
            return dim
        if index >= len(shape):
            c.fail(f"shape copies extent {index} of an input of rank {len(shape)}")
        return shape[index]

    def _infer_minus_one(self, c: NodeView, shape: Shape, wanted: Shape) -> Shape:
        total, known = product(shape), product(dim for dim in wanted if dim != -1)
        if any(isinstance(dim, int) and dim < -1 for dim in wanted) or wanted.count(-1) > 1:
            c.fail(f"shape is {shape_text(wanted)}, expected extents of 0 or more and at most one -1")
        if -1 not in wanted:
            taken = _required_side(shape, wanted)
            if taken is not None:
                return tuple(replace_atom(dim, *taken) for dim in wanted)
            if not c.agree(total, known):
                c.fail(f"cannot give {total} elements of shape {shape_text(shape)} the shape {shape_text(wanted)}")
            return wanted
        if known == 0:
            declared = c.declared_shape() if isinstance(c, Call) else None
            if declared is not None:  # an empty batch: what inference found for every batch size
                return declared
            c.fail(f"the -1 in shape {shape_text(wanted)} is not determined: the other extents multiply to 0")
        if isinstance(total, int) and isinstance(known, int) and total % known:
            c.fail(f"cannot give {total} elements of shape {shape_text(shape)} the shape {shape_text(wanted)}")
        return tuple(floor_div(total, known) if dim == -1 else dim for dim in wanted)


def _required_side(shape: Shape, wanted: Shape) -> tuple[Maximum, Dim] | None:
    """A maximum in a requested shape, and the side that it must equal for the number of elements to be right.

    None if no maximum decides that, or if an extent is requested as -1. [n, 2] can be reshaped to [min(n, 64), 2] only
    if n is at most 64.
    """
    return None if -1 in wanted else solve_maximum(product(shape), product(wanted))


@register
class Flatten(SameElements):
    """A matrix: the axes before `axis` are joined to rows, the others to columns."""

    inputs = "input"
    attrs = {"axis": 1}

    def target(self, c: Infer | Call, shape: Shape) -> Shape | None:
        axis = c.attr("axis")
        if not -len(shape) <= axis <= len(shape):
            c.fail(f"axis {axis} is out of range for rank {len(shape)}")
        axis = axis if axis >= 0 else axis + len(shape)
        return product(shape[:axis]), product(shape[axis:])

    def unknown(self, c: Infer) -> Shape | None:
        return c.fresh_dim("rows"), c.fresh_dim("columns")


@register
class Squeeze(SameElements):
    """The input without the axes `axes`, of extent 1; by default without all axes of extent 1."""

    inputs = "data, axes?"
    params = {"axes": 1}

    def target(self, c: Infer | Call, shape: Shape) -> Shape | None:
        given = c.param("axes")
        if given is None:
            unknown = any(not isinstance(dim, int) for dim in shape)  # one of these may be 1 in a run
            if isinstance(c, Infer) and (c.has_param("axes") or unknown):
                return None
            return tuple(dim for dim in shape if dim != 1)
        axes = unique_axes(c, given, len(shape))
        for axis in axes:
            if not c.agree(shape[axis], 1):
                c.fail(
                    f"cannot squeeze axis {axis} of shape {shape_text(shape)}: its extent is {shape[axis]}, expected 1"
                )
        return tuple(dim for axis, dim in enumerate(shape) if axis not in axes)


@register
class Unsqueeze(SameElements):
    """The input with new axes of extent 1, which have the indices `axes` in the output."""

    inputs = "data, axes"
    params = {"axes": 1}

    def target(self, c: Infer | Call, shape: Shape) -> Shape | None:
        given = c.param("axes")
        if given is None:
            return None
        rank = len(shape) + len(given)
        axes, rest = normalize_axes(c, given, rank), iter(shape)
        return tuple(1 if axis in axes else next(rest) for axis in range(rank))


@register
class Transpose(OpDef):
    """The input with its axes in the order `perm`, by default reversed."""

    inputs = "data"
    outputs = "transposed"
    attrs = {"perm": None}
    shape_arithmetic = True

    def perm(self, c: NodeView, rank: int) -> tuple[int, ...]:
        given = c.attr("perm")
        perm = tuple(range(rank))[::-1] if given is None else tuple(given)
        if sorted(perm) != list(range(rank)):
            c.fail(f"perm is {list(perm)}, expected a permutation of 0..{rank - 1}")
        return perm

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = c.tensor(0)
        if type_.shape is None:
            return [type_]
        shape = type_.shape
        return [TensorType(type_.dtype, tuple(shape[axis] for axis in self.perm(c, len(shape))))]

    def reference(self, c: Call, x: Array) -> Array:
        return np.transpose(x, self.perm(c, x.ndim))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        if axes[0] is None or shape is None:
            return super().rows(c, axes)
        return [self.perm(c, len(shape)).index(axes[0])]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        perm = self.perm(g, g.x().rank)
        return [g.dy().transpose(*(perm.index(axis) for axis in range(len(perm))))]


@register
class Concat(OpDef):
    inputs = "*inputs"
    outputs = "concat_result"
    attrs = {"axis": Required("int")}
    shape_arithmetic = True

    def infer(self, c: Infer) -> Sequence[ValueType]:
        count = len(c.node.inputs)
        if count == 0:
            c.fail("has no inputs, expected at least 1")
        dtype, shapes = same_dtype(c, range(count)), [c.shape(i) for i in range(count)]
        known = [shape for shape in shapes if shape is not None]
        if len(known) < count:
            return [TensorType(dtype, None)]
        if len({len(shape) for shape in known}) > 1:
            c.fail(f"inputs must have one rank, got {', '.join(map(shape_text, known))}")
        axis = normalize_axis(c, c.attr("axis"), len(known[0]))
        return [TensorType(dtype, tuple(self._extent(c, known, axis, i) for i in range(len(known[0]))))]

    def _extent(self, c: Infer, shapes: Sequence[Shape], axis: int, index: int) -> Dim:
        extents = [shape[index] for shape in shapes]
        if index == axis:
            return sum(extents[1:], extents[0])
        found = next((dim for dim in extents if isinstance(dim, int)), extents[0])
        if not all(c.agree(found, dim) for dim in extents):
            c.fail(f"inputs must agree except along axis {axis}, got {', '.join(map(shape_text, shapes))}")
        return found

    def reference(self, c: Call, *inputs: Array) -> Array:
        return np.concatenate(inputs, c.attr("axis"))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        """All inputs must have rows along the same axis, other than `axis`.

        An input without rows would have another extent there in some batch.
        """
        shape = c.shape(0)
        if len(set(axes)) > 1 or shape is None:
            return MixesRows("Concat joins inputs that have rows with inputs that do not, or along another axis")
        if axes[0] is not None and axes[0] == normalize_axis(c, c.attr("axis"), len(shape)):
            return MixesRows("Concat joins along the row axis")
        return [axes[0]]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        axis = normalize_axis(g, g.attr("axis"), g.y().rank)
        sizes = tuple(x.shape[axis] for x in g.terms)
        return list(g.dy().ops("Split", outputs=len(sizes), axis=axis, split=sizes))


@register
class Split(OpDef):
    """Parts of the input along `axis`: of the sizes in `split`, otherwise equal (the last may be smaller)."""

    inputs = "input, split?"
    outputs = "*outputs"
    attrs = {"axis": 0, "num_outputs": None}
    params = {"split": 1}
    symbolic = ("split",)
    shape_arithmetic = True

    def sizes(self, c: Infer | Call, extent: Dim) -> list[Dim] | None:
        count, given = len(c.node.outputs), c.param("split")
        if given is not None:
            self._check(c, given, extent)
            return list(given)
        if isinstance(c, Infer) and c.has_param("split"):
            return [c.fresh_dim(f"part{i}") for i in range(count)]
        parts = c.attr("num_outputs") or count
        if parts != count:
            c.fail(f"num_outputs is {parts}, but the node has {count} outputs")
        each = floor_div(extent + (parts - 1), parts)
        return [*[each] * (parts - 1), extent - each * (parts - 1)]

    def _check(self, c: NodeView, sizes: Sequence[Dim], extent: Dim) -> None:
        if len(sizes) != len(c.node.outputs) or any(isinstance(size, int) and size < 0 for size in sizes):
            c.fail(f"split is {shape_text(sizes)}, expected {len(c.node.outputs)} sizes of 0 or more")
        total = sum(sizes[1:], sizes[0])
        if not c.agree(extent, total):
            c.fail(f"split is {shape_text(sizes)}, which sums to {total}, expected {extent}")

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = c.tensor(0)
        if type_.shape is None:
            return [type_] * len(c.node.outputs)
        axis = normalize_axis(c, c.attr("axis"), type_.rank)
        sizes = self.sizes(c, type_.shape[axis]) or []
        return [TensorType(type_.dtype, (*type_.shape[:axis], size, *type_.shape[axis + 1 :])) for size in sizes]

    def reference(self, c: Call, x: Array, *_: RuntimeValue) -> tuple[Array, ...]:
        axis = normalize_axis(c, c.attr("axis"), x.ndim)
        sizes: Any = self.sizes(c, x.shape[axis])
        if any(size < 0 for size in sizes):
            raise ValueError(f"an extent of {x.shape[axis]} does not split into {shape_text(sizes)}")
        return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        return untouched_rows(c, axes, {normalize_axis(c, c.attr("axis"), len(shape))} if shape else ())

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        parts = [g.dy(i) for i in range(len(g.node.outputs))]
        return [parts[0].op("Concat", *parts[1:], axis=g.attr("axis"))]


@register
class Expand(OpDef):
    """The input broadcast with `shape`: where `shape` has extent 1 or no axis, the input's extent stays."""

    inputs = "input, shape"
    outputs = "output"
    params = {"shape": 1}
    symbolic = ("shape",)
    shape_arithmetic = True

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_, wanted = c.tensor(0), c.param("shape")
        if wanted is None:
            lengths = c.shape(1)
            unknown = None if type_.shape is None or lengths is None else unknown_shape(c, lengths)
            longest = unknown is not None and type_.shape is not None and len(unknown) >= len(type_.shape)
            return [TensorType(type_.dtype, unknown if longest else None)]
        return [TensorType(type_.dtype, broadcast_shapes(c, [type_.shape, wanted]))]

    def reference(self, c: Call, x: Array, *_: RuntimeValue) -> Array:
        try:
            shape = np.broadcast_shapes(x.shape, c.param("shape") or ())
        except ValueError:
            return c.fail(f"shape {list(x.shape)} does not expand to {shape_text(c.param('shape'))}")
        return np.broadcast_to(x, shape)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        old, new = c.shape(0), c.node.output.tensor.shape
        if old is None or new is None or any(axis is not None for axis in axes[1:]):
            return super().rows(c, axes)
        if axes[0] is None:
            return [None]
        moved = axes[0] + len(new) - len(old)
        return [moved] if new[moved] == old[axes[0]] else MixesRows("Expand copies along the row axis")

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        return [g.dy()]


@register
class Tile(OpDef):
    """Repeats the whole tensor `repeats[i]` times along axis i."""

    inputs = "input, repeats"
    outputs = "output"
    params = {"repeats": 1}
    symbolic = ("repeats",)
    shape_arithmetic = True

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_, repeats = c.tensor(0), c.param("repeats")
        if type_.shape is None:
            return [type_]
        if repeats is None:
            return [TensorType(type_.dtype, tuple(c.fresh_dim(f"d{i}") for i in range(type_.rank)))]
        self._check(c, repeats, type_.rank)
        return [TensorType(type_.dtype, tuple(dim * times for dim, times in zip(type_.shape, repeats, strict=True)))]

    def _check(self, c: NodeView, repeats: Sequence[Dim], rank: int) -> None:
        if len(repeats) != rank or any(isinstance(times, int) and times < 0 for times in repeats):
            c.fail(f"repeats is {shape_text(repeats)}, expected {rank} numbers of 0 or more")

    def reference(self, c: Call, x: Array, *_: RuntimeValue) -> Array:
        repeats = c.param("repeats") or ()
        self._check(c, repeats, x.ndim)
        return np.tile(x, repeats)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        repeats = c.param("repeats")
        if repeats is None:
            return super().rows(c, axes)
        return untouched_rows(c, axes, {axis for axis, times in enumerate(repeats) if times != 1})

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        x, repeats = g.x(), g.param("repeats")
        if repeats is None:
            g.unsupported("repeats must be known to differentiate it")
        pairs = [dim for pair in zip(repeats, x.shape, strict=True) for dim in pair]
        return [g.dy().reshape(pairs).sum(range(0, len(pairs), 2), keepdims=False)]


class Blocks(OpDef):
    """Family base: moves blocks between channels and the two spatial axes of an image, in layout NCHW or NHWC."""

    inputs = "input"
    outputs = "output"
    attrs = {"blocksize": Required("int"), "layout": "NCHW"}

    def new_shape(self, c: NodeView, shape: Shape, block: int) -> Shape:
        """The output shape for an input shape, both as N, C, H, W."""
        raise NotImplementedError

    def move(self, c: NodeView, x: Array, block: int) -> Array:
        """The result for an array in layout NCHW, in the same layout; subclasses define it."""
        raise NotImplementedError

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = c.tensor(0)
        if type_.shape is None:
            return [type_]
        if type_.rank != 4 or c.attr("blocksize") < 1:
            c.fail(f"input is {type_}, blocksize {c.attr('blocksize')}; expected rank 4 and a positive blocksize")
        last = c.attr("layout") == "NHWC"
        n, ch, h, w = (type_.shape[i] for i in ((0, 3, 1, 2) if last else (0, 1, 2, 3)))
        n, ch, h, w = self.new_shape(c, (n, ch, h, w), c.attr("blocksize"))
        return [TensorType(type_.dtype, (n, h, w, ch) if last else (n, ch, h, w))]

    def exact(self, c: NodeView, extent: Dim, by: int) -> Dim:
        if isinstance(extent, int) and extent % by:
            c.fail(f"an extent of {extent} is not a multiple of {by} (blocksize {c.attr('blocksize')})")
        return floor_div(extent, by)

    def reference(self, c: Call, x: Array) -> Array:
        if c.attr("layout") == "NHWC":
            return self.move(c, x.transpose(0, 3, 1, 2), c.attr("blocksize")).transpose(0, 2, 3, 1)
        return self.move(c, x, c.attr("blocksize"))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return untouched_rows(c, axes, {1, 2, 3})


@register
class DepthToSpace(Blocks):
    """Channels moved into blocks of `blocksize` x `blocksize` pixels: [N, C, H, W] -> [N, C/b/b, H*b, W*b].

    `mode` is the order within the channels: "DCR" (block row, block column, depth) or "CRD" (depth, block row, block
    column).
    """

    attrs = {**Blocks.attrs, "mode": "DCR"}

    def new_shape(self, c: NodeView, shape: Shape, block: int) -> Shape:
        if c.attr("mode") not in ("DCR", "CRD"):
            c.fail(f"attribute 'mode' is {c.attr('mode')!r}, expected 'DCR' or 'CRD'")
        n, ch, h, w = shape
        return n, self.exact(c, ch, block * block), h * block, w * block

    def move(self, c: NodeView, x: Array, block: int) -> Array:
        n, ch, h, w = x.shape
        depth = ch // (block * block)
        if c.attr("mode") == "CRD":
            parts = x.reshape(n, depth, block, block, h, w).transpose(0, 1, 4, 2, 5, 3)
        else:
            parts = x.reshape(n, block, block, depth, h, w).transpose(0, 3, 4, 1, 5, 2)
        return parts.reshape(n, depth, h * block, w * block)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        blocks, mode = g.attr("blocksize"), g.attr("mode")
        return [g.dy().op("SpaceToDepth", blocksize=blocks, mode=mode, layout=g.attr("layout"))]


@register
class SpaceToDepth(Blocks):
    """The inverse of DepthToSpace with the same `mode`."""

    attrs = {**Blocks.attrs, "mode": "DCR"}

    def new_shape(self, c: NodeView, shape: Shape, block: int) -> Shape:
        n, ch, h, w = shape
        return n, ch * (block * block), self.exact(c, h, block), self.exact(c, w, block)

    def move(self, c: NodeView, x: Array, block: int) -> Array:
        n, ch, h, w = x.shape
        order = (0, 1, 3, 5, 2, 4) if c.attr("mode") == "CRD" else (0, 3, 5, 1, 2, 4)
        parts = x.reshape(n, ch, h // block, block, w // block, block).transpose(order)
        return parts.reshape(n, ch * block * block, h // block, w // block)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        blocks, mode = g.attr("blocksize"), g.attr("mode")
        return [g.dy().op("DepthToSpace", blocksize=blocks, mode=mode, layout=g.attr("layout"))]
