"""Nodes that only move elements: each becomes a list of strided copies, for any element type."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from lathe.core.ir.dim import floor_div
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Node
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Request
from lathe.core.kernels.shared.attributes import attribute, axis_of, integers
from lathe.core.kernels.shared.nest import (
    Nest,
    broadcast_strides,
    has_plannable_types,
    is_fixed_size,
    is_plannable,
    row_major,
    traffic,
)
from lathe.core.kernels.shared.runtime_numbers import RuntimeNumbers
from lathe.core.kernels.target import Target
from lathe.core.ops.tensor.slicing import first_index


@dataclass(frozen=True, slots=True)
class Piece:
    """One strided copy from operand `source` (None: the fill value) to operand `target`.

    The nest's operands are source and target; `offsets` are their starts, in elements.
    """

    source: int | None
    target: int
    nest: Nest
    offsets: tuple[Dim, Dim] = (0, 0)


_FAR = 10**9  # bounds from here on mean the end of an axis, see lathe.core.ops.tensor.slicing
_LONG_ROW = 1 << 14  # elements; a task takes several shorter rows


@dataclass(frozen=True)
class CopySpec(KernelSpec):
    """Copies elements of `itemsize` bytes. `fill` is the bit pattern that pieces without a source write.

    `numbers` is the index of the operand with run-time numbers, if the dimensions have any.
    """

    family: ClassVar[str] = "copy"
    generator: ClassVar[str] = "copy.cpu"
    itemsize: int
    pieces: tuple[Piece, ...]
    fill: int = 0
    numbers: int = 0

    def general(self, target: Target, place: int) -> tuple[KernelSpec, tuple[int, ...]] | None:
        """The spec of code that reads the numbers of loops and offsets at run time, and those numbers.

        None unless every piece is copied row by row (`_is_row_copy`) and generated code can compute its dimensions.
        `place` is the index of the operand that holds the numbers.
        """
        numbers, pieces = RuntimeNumbers(), []
        for piece in self.pieces:
            nest = numbers.of_nest(piece.nest) if _is_row_copy(piece.nest) else None
            if nest is None or not all(map(is_plannable, piece.offsets)):
                return None
            start, goal = map(numbers.take, piece.offsets)
            pieces.append(replace(piece, nest=nest, offsets=(start, goal)))
        return replace(self, pieces=tuple(pieces), numbers=place), tuple(numbers.values)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """All dimensions in the pieces: extents, strides and offsets."""
        return tuple(dim for piece in self.pieces for dim in (*piece.nest.dims, *piece.offsets))

    @property
    def summary(self) -> str:
        loops = max((piece.nest.rank for piece in self.pieces), default=0)
        return f"copy({len(self.pieces)} pieces, {loops} loops)"


def _is_row_copy(nest: Nest) -> bool:
    """Whether a copy goes row by row: the source is contiguous along no loop before the last.

    The rows must also be at most `_LONG_ROW` elements long, or the only loop.
    """
    inner, (source, _) = nest.extents[-1], nest.strides
    return 1 not in source[:-1] and (nest.rank == 1 or (isinstance(inner, int) and inner <= _LONG_ROW))


def _call(
    node: Node, pieces: Sequence[Piece], operands: Sequence[Operand], fill: int = 0, strided: bool = False
) -> KernelCall | None:
    """The call that copies all pieces, with their loops merged; None if code cannot compute an extent or an offset.

    Pieces with an extent of 0 are dropped. `strided` says that the pieces use the operands' own strides, so that the
    operands may lie inside other tensors.
    """
    live = [piece for piece in pieces if 0 not in piece.nest.extents]
    merged = tuple(Piece(p.source, p.target, p.nest.collapsed(), p.offsets) for p in live)
    if not all(map(is_plannable, (dim for p in merged for dim in (*p.offsets, *p.nest.extents)))):
        return None
    given = tuple(operand for operand in operands if isinstance(operand, In | Out)) if strided else ()
    spec = CopySpec(node.output.dtype.itemsize, merged, fill)
    return KernelCall(spec, tuple(operands), strided=given, bytes=traffic(node))


def _is_movable(node: Node) -> bool:
    """Whether elements have a fixed size that registers hold, and shapes can be planned."""
    return has_plannable_types(node) and is_fixed_size(node.output.dtype)


def _copy_call(node: Node, extents: Sequence[Dim], strides: Sequence[Dim], offset: Dim = 0) -> KernelCall | None:
    """The call that fills one row-major output from one row-major input, walked with `strides` from `offset`.

    None as in `_call`.
    """
    nest = Nest(tuple(extents), (tuple(strides), row_major(extents)))
    return _call(node, [Piece(0, 1, nest, (offset, 0))], [In(0), Out()])


def duplicate(request: Request) -> KernelCall | None:
    """Selector of Identity, Reshape, Flatten, Squeeze and Unsqueeze that need memory of their own: one contiguous copy.

    An example is a view that is a graph output. Elements have 1, 2, 4 or 8 bytes. None for other nodes, if generated
    code cannot compute a dimension, for several outputs, and for a Reshape whose sizes agree only for some batch sizes:
    the reference checks those at run time.
    """
    node = request.node
    if not _is_movable(node) or len(node.outputs) > 1 or node.required_input(0).tensor.size != node.output.tensor.size:
        return None
    return _copy_call(node, (node.output.tensor.size,), (1,))


def transpose(request: Request) -> KernelCall | None:
    """Selector of Transpose of elements of 1, 2, 4 or 8 bytes; input and output may lie inside other tensors.

    None for other nodes, and if generated code cannot compute a dimension.
    """
    node = request.node
    if not _is_movable(node):
        return None
    source, strides = node.required_input(0).shape, request.strides_of(node.required_input(0))
    perm = integers(node, "perm") or tuple(reversed(range(len(source))))
    walks = (tuple(strides[axis] for axis in perm), request.strides_of(node.output))
    piece = Piece(0, 1, Nest(tuple(source[axis] for axis in perm), walks))
    return _call(node, [piece], [In(0), Out()], strided=True)


def blocks(request: Request) -> KernelCall | None:
    """Selector of DepthToSpace and SpaceToDepth of rank 4: a transpose of the shape with the block's axes split off.

    Elements have 1, 2, 4 or 8 bytes. None for other nodes, and if generated code cannot compute a dimension.
    """
    node = request.node
    if not _is_movable(node) or len(node.required_input(0).shape) != 4:
        return None
    size, last = attribute(node, "blocksize"), attribute(node, "layout") == "NHWC"
    depth = node.required_input(0).shape if node.op == "DepthToSpace" else node.output.shape
    mode = attribute(node, "mode") or "DCR"
    to_space = _depth_to_space(depth, size, last, mode)
    extents, strides = to_space if node.op == "DepthToSpace" else _inverse(to_space, last, mode)
    return _copy_call(node, extents, strides)


def _depth_to_space(depth: Sequence[Dim], size: int, last: bool, mode: str) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """The extents of loops in the image's order, and the strides with which they walk the depth tensor.

    The order is n, c, h, block row, w, block column; with channels last, c is at the end.
    """
    n, c, h, w = (depth[0], depth[3], depth[1], depth[2]) if last else depth
    dense = row_major(depth)
    sn, sc, sh, sw = (dense[0], dense[3], dense[1], dense[2]) if last else dense
    inner = floor_div(c, size * size)
    channel, row, column = (sc, inner * size * sc, inner * sc) if mode == "DCR" else (size * size * sc, size * sc, sc)
    loops = [(n, sn), (inner, channel), (h, sh), (size, row), (w, sw), (size, column)]
    if last:
        loops.append(loops.pop(1))
    return tuple(extent for extent, _ in loops), tuple(stride for _, stride in loops)


def _inverse(
    to_space: tuple[tuple[Dim, ...], tuple[Dim, ...]], last: bool, mode: str
) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """The inverse copy: loops in the depth tensor's order, with strides that walk the image."""
    extents, _ = to_space
    dense = row_major(extents)
    n, c, h, row, w, column = (0, 5, 1, 2, 3, 4) if last else range(6)
    channels = (row, column, c) if mode == "DCR" else (c, row, column)
    order = (n, h, w, *channels) if last else (n, *channels, h, w)
    return tuple(extents[k] for k in order), tuple(dense[k] for k in order)


def expand(request: Request) -> KernelCall | None:
    """Selector of Expand of elements of 1, 2, 4 or 8 bytes, if its shape is not an input.

    None for other nodes, and if generated code cannot compute a dimension.
    """
    node = request.node
    if not _is_movable(node) or len(node.inputs) != 1:
        return None
    shape = node.output.shape
    return _copy_call(node, shape, broadcast_strides(node.required_input(0).shape, shape))


def tile(request: Request) -> KernelCall | None:
    """Selector of Tile of elements of 1, 2, 4 or 8 bytes, if its repeats are known.

    None for other nodes, and if generated code cannot compute a dimension.
    """
    node = request.node
    repeats = integers(node, "repeats")
    if not _is_movable(node) or repeats is None:
        return None
    shape = node.required_input(0).shape
    dense = row_major(shape)
    pairs = [((times, 0), (extent, step)) for times, extent, step in zip(repeats, shape, dense, strict=True)]
    loops = [loop for pair in pairs for loop in pair]
    return _copy_call(node, [extent for extent, _ in loops], [stride for _, stride in loops])


def slice_(request: Request) -> KernelCall | None:
    """Selector of Slice of elements of 1, 2, 4 or 8 bytes, if starts and steps are attributes.

    Input and output may lie inside other tensors. None for other nodes, if generated code cannot compute a dimension,
    and if the first element's place depends on clamping that code cannot compute.
    """
    node = request.node
    walk = slice_strides(node, request.strides_of(node.required_input(0))) if _is_movable(node) else None
    if walk is None:
        return None
    offset, strides = walk
    piece = Piece(0, 1, Nest(node.output.shape, (strides, request.strides_of(node.output))), (offset, 0))
    return _call(node, [piece], [In(0), Out()], strided=True)


def slice_strides(node: Node, given: Sequence[Dim]) -> tuple[Dim, tuple[Dim, ...]] | None:
    """The offset of a Slice's first element, and the slice's strides, in an input with the strides `given`.

    None if a parameter is an input, or the first place cannot be computed.
    """
    starts, steps = integers(node, "starts"), integers(node, "steps")
    if starts is None or len(node.inputs) != 1:
        return None
    source = node.required_input(0).shape
    axes = integers(node, "axes") or tuple(range(len(starts)))
    strides: list[Dim] = list(given)
    offset: Dim = 0
    for axis, start, step in zip(axes, starts, steps or (1,) * len(starts), strict=True):
        axis = axis_of(axis, len(source))
        first = _first_place(start, step, source[axis])
        if first is None:
            return None
        offset = offset + first * strides[axis]
        strides[axis] = strides[axis] * step
    return offset, tuple(strides)


def _first_place(start: Dim, step: int, extent: Dim) -> Dim | None:
    """The first index of a slice along an axis, clamped as in ONNX; None if that needs the value of a symbol."""
    if isinstance(start, int) and isinstance(extent, int):
        begin = start + extent if start < 0 else start
        return min(max(begin, 0), extent if step > 0 else extent - 1)
    if start == 0 and step > 0:
        return 0
    if start == -1 and step < 0:
        return extent - 1
    # With entries of the table of sizes, the type of the result assumes that bounds lie within the extent.
    if (
        step < 0
        or not (has_only_sizes(start) or has_only_sizes(extent))
        or (isinstance(start, int) and abs(start) >= _FAR)
    ):
        return None
    return first_index(extent, start)


def concat(request: Request) -> KernelCall | None:
    """Selector of Concat of elements of 1, 2, 4 or 8 bytes.

    There is one piece per input that does not lie at its place in the output already. None for other nodes, if an input
    is absent, and if generated code cannot compute a dimension.
    """
    node = request.node
    if not _is_movable(node) or any(value is None for value in node.inputs):
        return None
    shape = node.output.shape
    axis = axis_of(attribute(node, "axis"), len(shape))
    strides = request.strides_of(node.output)
    pieces: list[Piece] = []
    position: Dim = 0
    for index, value in enumerate(node.inputs):
        if value is None:
            return None
        nest = Nest(value.shape, (request.strides_of(value), strides))
        if value not in request.inputs_in_place:
            pieces.append(Piece(index, len(node.inputs), nest, (0, position * strides[axis])))
        position = position + value.shape[axis]
    return _call(node, pieces, [*(In(i) for i in range(len(node.inputs))), Out()], strided=True)


def split(request: Request) -> KernelCall | None:
    """Selector of Split of elements of 1, 2, 4 or 8 bytes, if its sizes are not an input: one piece per output.

    None for other nodes, and if generated code cannot compute a dimension.
    """
    node = request.node
    if not _is_movable(node) or len(node.inputs) != 1:
        return None
    source = node.required_input(0).shape
    axis = axis_of(attribute(node, "axis"), len(source))
    dense = row_major(source)
    pieces: list[Piece] = []
    position: Dim = 0
    for index, value in enumerate(node.outputs):
        nest = Nest(value.shape, (dense, row_major(value.shape)))
        pieces.append(Piece(0, 1 + index, nest, (position * dense[axis], 0)))
        position = position + value.shape[axis]
    return _call(node, pieces, [In(0), *(Out(i) for i in range(len(node.outputs)))])


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a padded axis: `extent` places from `target` on, read from `source` on with `step`.

    If `source` is None, they hold the fill value.
    """

    extent: Dim
    target: Dim
    source: Dim | None = 0
    step: int = 1


def pad(request: Request) -> KernelCall | None:
    """Selector of Pad by known widths, in the modes constant, edge, reflect and wrap.

    Elements have 1, 2, 4 or 8 bytes; a computed value is a further operand. None for other nodes, if generated code
    cannot compute a dimension, and if padding takes more than one reflection or repetition, or might:
    `lathe.core.kernels.copy.pad_spec` has a kernel for that.
    """
    node = request.node
    widths = pad_widths(node)
    if widths is None or not all(isinstance(width, int) for pair in widths for width in pair):
        return None
    fill = fill_bits(request)
    operands: list[Operand] = [In(0), Out()] if fill is not None else [In(0), Out(), In(2)]
    source, mode = node.required_input(0).shape, attribute(node, "mode") or "constant"
    axes = [_segments(mode, before, after, extent) for (before, after), extent in zip(widths, source, strict=True)]
    if any(segments is None for segments in axes):
        return None
    choices = itertools.product(*(segments for segments in axes if segments is not None))
    filler = None if fill is not None else operands.index(In(2))
    pieces = [_pad_piece(choice, source, node.output.shape, filler) for choice in choices]
    return _call(node, pieces, operands, fill or 0)


def pad_widths(node: Node) -> list[tuple[Any, Any]] | None:
    """The widths that a Pad adds before and after each axis, as pairs: numbers or dimensions; negative ones crop.

    None if they or the axes are inputs, if `pads` is missing or has an odd length, if elements have no fixed size that
    registers hold, or if a shape cannot be planned.
    """
    pads = integers(node, "pads")
    computed = node.input(1) is not None or node.input(3) is not None
    if not _is_movable(node) or computed or pads is None or len(pads) % 2:
        return None
    rank, half = len(node.required_input(0).shape), len(pads) // 2
    axes = integers(node, "axes") or tuple(range(half))
    widths: list[tuple[Dim, Dim]] = [(0, 0)] * rank
    for position, axis in enumerate(axes):
        widths[axis_of(axis, rank)] = (pads[position], pads[half + position])
    return widths


def fill_bits(request: Request) -> int | None:
    """The bits of the value with which a Pad fills; None if it is known only at run time."""
    node = request.node
    value = node.attrs.get("constant_value")
    if value is None and node.input(2) is not None:
        value = request.constant(2)
        if value is None:
            return None
    scalar = np.asarray(0 if value is None else value, dtype=node.output.dtype.numpy).ravel()[:1]
    return int.from_bytes(scalar.tobytes(), "little")


def _segments(mode: str, before: int, after: int, extent: Dim) -> list[_Segment] | None:
    """The segments of a padded axis in order, without empty ones; negative widths crop the axis.

    None if a single reflection or repetition cannot fill the axis, if a crop might exceed its extent, or if an axis
    that a mode other than "constant" pads is also cropped or has a symbolic extent.
    """
    remaining = extent + min(before, 0) + min(after, 0)
    if min(before, after) < 0 and not (isinstance(remaining, int) and remaining >= 0):
        return None  # the crop might exceed the extent
    middle = _Segment(remaining, max(before, 0), max(-before, 0))
    if before <= 0 and after <= 0:
        return [middle]
    if mode != "constant" and (before < 0 or after < 0 or not isinstance(extent, int)):
        return None
    ends = _borders(mode, max(before, 0), max(after, 0), extent, middle)
    return None if ends is None else [s for s in (ends[0], middle, ends[1]) if s.extent != 0]


def _borders(mode: str, before: int, after: int, extent: Dim, middle: _Segment) -> tuple[_Segment, _Segment] | None:
    end = middle.target + middle.extent
    if mode == "constant":
        return _Segment(before, 0, None), _Segment(after, end, None)
    if mode == "edge":
        return _Segment(before, 0, 0, 0), _Segment(after, end, extent - 1, 0)
    widest = max(before, after)
    if mode == "reflect" and isinstance(extent, int) and widest < extent:
        return _Segment(before, 0, before, -1), _Segment(after, end, extent - 2, -1)
    if mode == "wrap" and isinstance(extent, int) and widest <= extent:
        return _Segment(before, 0, extent - before), _Segment(after, end, 0)
    return None


def _pad_piece(choice: Sequence[_Segment], source: Sequence[Dim], target: Sequence[Dim], filler: int | None) -> Piece:
    """The copy of one part of a padded tensor: `choice` has its segment along each axis.

    `source` and `target` are the shapes of x and of the result. `filler` is the index of the operand with the fill
    value, or None if that is a constant of the spec.
    """
    extents = tuple(segment.extent for segment in choice)
    dense_in, dense_out = row_major(source), row_major(target)
    offset_out = sum((s.target * stride for s, stride in zip(choice, dense_out, strict=True)), start=_ZERO)
    if any(segment.source is None for segment in choice):
        return Piece(filler, 1, Nest(extents, (tuple(0 for _ in extents), dense_out)), (0, offset_out))
    strides = tuple(segment.step * stride for segment, stride in zip(choice, dense_in, strict=True))
    starts = ((s.source or 0) * stride for s, stride in zip(choice, dense_in, strict=True))
    return Piece(0, 1, Nest(extents, (strides, dense_out)), (sum(starts, start=_ZERO), offset_out))


_ZERO: Dim = 0
