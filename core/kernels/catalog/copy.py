"""Nodes that only move elements: every one is a list of strided copies, whatever the element type."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from core.ir.dim import floor_div
from core.ir.dims import is_sized
from core.ir.graph import Node, Value
from core.ir.types import Dim
from core.kernels.catalog.attributes import attribute, axis_of, integers
from core.kernels.catalog.base import VIEWS, In, KernelCall, KernelSpec, Operand, Out, Request, covers
from core.kernels.catalog.nest import (
    Nest,
    broadcast_strides,
    has_plannable_types,
    is_fixed_size,
    is_plannable,
    row_major,
    traffic,
)
from core.kernels.catalog.numbers import Numbers
from core.kernels.target import Target
from core.ops.slicing import first_place


@dataclass(frozen=True, slots=True)
class Piece:
    """One strided copy: operand `source` (None: the fill value) to operand `target`.

    The nest's operands are source and target; `offsets` are where each starts, in elements.
    """

    source: int | None
    target: int
    nest: Nest
    offsets: tuple[Dim, Dim] = (0, 0)


_FAR = 10**9  # a bound that stands for an end, see core.ops.slicing
_LONG_ROW = 1 << 14  # elements; of shorter ones a task takes several


@dataclass(frozen=True)
class CopySpec(KernelSpec):
    """Copies elements of `itemsize` bytes; `fill` is the bit pattern that pieces without a source write. `numbers`: the
    operand with those that come with the call."""

    family: ClassVar[str] = "copy"
    itemsize: int
    pieces: tuple[Piece, ...]
    fill: int = 0
    numbers: int = 0

    def general(self, target: Target, place: int) -> tuple[KernelSpec, tuple[int, ...]] | None:
        """Of rows that stay rows, and are short enough that a task takes whole ones."""
        numbers, pieces = Numbers(), []
        for piece in self.pieces:
            nest = numbers.of_nest(piece.nest) if _goes_by_rows(piece.nest) else None
            if nest is None or not all(map(is_plannable, piece.offsets)):
                return None
            start, goal = map(numbers.take, piece.offsets)
            pieces.append(replace(piece, nest=nest, offsets=(start, goal)))
        return replace(self, pieces=tuple(pieces), numbers=place), tuple(numbers.values)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """All that pieces are described by."""
        return tuple(dim for piece in self.pieces for dim in (*piece.nest.dims, *piece.offsets))

    @property
    def summary(self) -> str:
        loops = max((piece.nest.rank for piece in self.pieces), default=0)
        return f"copy({len(self.pieces)} pieces, {loops} loops)"


def _goes_by_rows(nest: Nest) -> bool:
    """Whether no other loop than the last one goes from one element of the source to the next."""
    inner, (source, _) = nest.extents[-1], nest.strides
    return 1 not in source[:-1] and (nest.rank == 1 or (isinstance(inner, int) and inner <= _LONG_ROW))


def _call(
    node: Node, pieces: Sequence[Piece], operands: Sequence[Operand], fill: int = 0, strided: bool = False
) -> KernelCall | None:
    """The call that makes all pieces, simplified; None when a stride or an offset cannot be computed. `strided`: they
    go by the operands' own strides."""
    live = [piece for piece in pieces if 0 not in piece.nest.extents]
    merged = tuple(Piece(p.source, p.target, p.nest.collapsed(), p.offsets) for p in live)
    if not all(map(is_plannable, (dim for p in merged for dim in (*p.offsets, *p.nest.extents)))):
        return None
    given = tuple(operand for operand in operands if isinstance(operand, In | Out)) if strided else ()
    spec = CopySpec(node.output.dtype.itemsize, merged, fill)
    return KernelCall(spec, tuple(operands), strided=given, bytes=traffic(node))


def _is_movable(node: Node) -> bool:
    """Whether elements are plain fixed-size bytes in shapes that can be planned."""
    return has_plannable_types(node) and is_fixed_size(node.output.dtype)


def _moved(node: Node, extents: Sequence[Dim], strides: Sequence[Dim], offset: Dim = 0) -> KernelCall | None:
    """One dense output, filled from one dense input walked with `strides` from `offset`."""
    nest = Nest(tuple(extents), (tuple(strides), row_major(extents)))
    return _call(node, [Piece(0, 1, nest, (offset, 0))], [In(0), Out()])


@covers(*VIEWS)
def duplicate(request: Request) -> KernelCall | None:
    """A view that must have memory of its own (an output of the graph) is one dense copy.

    None for a Reshape whose sizes only agree for some batch sizes: the reference checks those when the model runs.
    """
    node = request.node
    if not _is_movable(node) or len(node.outputs) > 1 or _input(node).tensor.size != node.output.tensor.size:
        return None
    return _moved(node, (node.output.tensor.size,), (1,))


@covers("Transpose")
def transpose(request: Request) -> KernelCall | None:
    node = request.node
    if not _is_movable(node):
        return None
    source, strides = _input(node).shape, request.strides_of(_input(node))
    perm = integers(node, "perm") or tuple(reversed(range(len(source))))
    walks = (tuple(strides[axis] for axis in perm), request.strides_of(node.output))
    piece = Piece(0, 1, Nest(tuple(source[axis] for axis in perm), walks))
    return _call(node, [piece], [In(0), Out()], strided=True)


@covers("DepthToSpace", "SpaceToDepth")
def blocks(request: Request) -> KernelCall | None:
    """Depth and space exchange blocks: a transpose of the shape with the block's axes split off."""
    node = request.node
    if not _is_movable(node) or len(_input(node).shape) != 4:
        return None
    size, last = attribute(node, "blocksize"), attribute(node, "layout") == "NHWC"
    depth = _input(node).shape if node.op == "DepthToSpace" else node.output.shape
    mode = attribute(node, "mode") or "DCR"
    to_space = _depth_to_space(depth, size, last, mode)
    extents, strides = to_space if node.op == "DepthToSpace" else _inverse(to_space, last, mode)
    return _moved(node, extents, strides)


def _depth_to_space(depth: Sequence[Dim], size: int, last: bool, mode: str) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """Loops in the image's order (n, c, h, block row, w, block column; channels last: c at the end), and the strides
    with which they walk the depth tensor."""
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
    """The opposite copy: loops in the depth tensor's order with strides that walk the image."""
    extents, _ = to_space
    dense = row_major(extents)
    n, c, h, row, w, column = (0, 5, 1, 2, 3, 4) if last else range(6)
    channels = (row, column, c) if mode == "DCR" else (c, row, column)
    order = (n, h, w, *channels) if last else (n, *channels, h, w)
    return tuple(extents[k] for k in order), tuple(dense[k] for k in order)


@covers("Expand")
def expand(request: Request) -> KernelCall | None:
    node = request.node
    if not _is_movable(node) or len(node.inputs) != 1:
        return None
    shape = node.output.shape
    return _moved(node, shape, broadcast_strides(_input(node).shape, shape))


@covers("Tile")
def tile(request: Request) -> KernelCall | None:
    node = request.node
    repeats = integers(node, "repeats")
    if not _is_movable(node) or repeats is None:
        return None
    shape = _input(node).shape
    dense = row_major(shape)
    pairs = [((times, 0), (extent, step)) for times, extent, step in zip(repeats, shape, dense, strict=True)]
    loops = [loop for pair in pairs for loop in pair]
    return _moved(node, [extent for extent, _ in loops], [stride for _, stride in loops])


@covers("Slice")
def slice_(request: Request) -> KernelCall | None:
    node = request.node
    walk = sliced(node, request.strides_of(_input(node))) if _is_movable(node) else None
    if walk is None:
        return None
    offset, strides = walk
    piece = Piece(0, 1, Nest(node.output.shape, (strides, request.strides_of(node.output))), (offset, 0))
    return _call(node, [piece], [In(0), Out()], strided=True)


def sliced(node: Node, given: Sequence[Dim]) -> tuple[Dim, tuple[Dim, ...]] | None:
    """Where a slice of an input with these strides begins, and its strides; None when a value is not known."""
    starts, steps = integers(node, "starts"), integers(node, "steps")
    if starts is None or len(node.inputs) != 1:
        return None
    source = _input(node).shape
    axes = integers(node, "axes") or tuple(range(len(starts)))
    strides: list[Dim] = list(given)
    offset: Dim = 0
    for axis, start, step in zip(axes, starts, steps or (1,) * len(starts), strict=True):
        axis = axis_of(axis, len(source))
        first = _first(start, step, source[axis])
        if first is None:
            return None
        offset = offset + first * strides[axis]
        strides[axis] = strides[axis] * step
    return offset, tuple(strides)


def _first(start: Dim, step: int, extent: Dim) -> Dim | None:
    """Where a slice begins, clamped as ONNX says; None when that needs the value of a symbol."""
    if isinstance(start, int) and isinstance(extent, int):
        begin = start + extent if start < 0 else start
        return min(max(begin, 0), extent if step > 0 else extent - 1)
    if start == 0 and step > 0:
        return 0
    if start == -1 and step < 0:
        return extent - 1
    # Where sizes of a table are concerned, the type of the result supposes that bounds lie within the extent.
    if step < 0 or not (is_sized(start) or is_sized(extent)) or (isinstance(start, int) and abs(start) >= _FAR):
        return None
    return first_place(extent, start)


@covers("Concat")
def concat(request: Request) -> KernelCall | None:
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
        if value not in request.placed:
            pieces.append(Piece(index, len(node.inputs), nest, (0, position * strides[axis])))
        position = position + value.shape[axis]
    return _call(node, pieces, [*(In(i) for i in range(len(node.inputs))), Out()], strided=True)


@covers("Split")
def split(request: Request) -> KernelCall | None:
    node = request.node
    if not _is_movable(node) or len(node.inputs) != 1:
        return None
    source = _input(node).shape
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
    """Part of a padded axis: `extent` places from `target` on, read from `source` with `step`; None: the fill value."""

    extent: Dim
    target: Dim
    source: Dim | None = 0
    step: int = 1


@covers("Pad")
def pad(request: Request) -> KernelCall | None:
    """Constant (the default), edge, reflect and wrap padding; a computed value is one more operand. None where that
    takes more than one reflection or repetition, or is not known to; see `core.kernels.catalog.pad`."""
    node = request.node
    widths = pad_widths(node)
    if widths is None or not all(isinstance(width, int) for pair in widths for width in pair):
        return None
    fill = fill_bits(request)
    operands: list[Operand] = [In(0), Out()] if fill is not None else [In(0), Out(), In(2)]
    source, mode = _input(node).shape, attribute(node, "mode") or "constant"
    axes = [_segments(mode, before, after, extent) for (before, after), extent in zip(widths, source, strict=True)]
    if any(segments is None for segments in axes):
        return None
    choices = itertools.product(*(segments for segments in axes if segments is not None))
    filler = None if fill is not None else operands.index(In(2))
    pieces = [_pad_piece(choice, source, node.output.shape, filler) for choice in choices]
    return _call(node, pieces, operands, fill or 0)


def pad_widths(node: Node) -> list[tuple[Any, Any]] | None:
    """The widths that a Pad adds before and after each axis. None where they are not known, or elements cannot be
    copied."""
    pads = integers(node, "pads")
    computed = node.input(1) is not None or node.input(3) is not None
    if not _is_movable(node) or computed or pads is None or len(pads) % 2:
        return None
    rank, half = len(_input(node).shape), len(pads) // 2
    axes = integers(node, "axes") or tuple(range(half))
    widths: list[tuple[Dim, Dim]] = [(0, 0)] * rank
    for position, axis in enumerate(axes):
        widths[axis_of(axis, rank)] = (pads[position], pads[half + position])
    return widths


def fill_bits(request: Request) -> int | None:
    """The bits of what a Pad fills with; None when it is known only at run time."""
    node = request.node
    value = node.attrs.get("constant_value")
    if value is None and node.input(2) is not None:
        value = request.constant(2)
        if value is None:
            return None
    scalar = np.asarray(0 if value is None else value, dtype=node.output.dtype.numpy).ravel()[:1]
    return int.from_bytes(scalar.tobytes(), "little")


def _segments(mode: str, before: int, after: int, extent: Dim) -> list[_Segment] | None:
    """One padded axis from left to right; None for what a single reflection or repetition cannot fill."""
    kept = extent + min(before, 0) + min(after, 0)
    if min(before, after) < 0 and not (isinstance(kept, int) and kept >= 0):
        return None  # more may be cut off than there is
    middle = _Segment(kept, max(before, 0), max(-before, 0))
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
    """One part of a padded tensor. `filler`: the operand that holds the fill value, where it is computed."""
    extents = tuple(segment.extent for segment in choice)
    dense_in, dense_out = row_major(source), row_major(target)
    offset_out = sum((s.target * stride for s, stride in zip(choice, dense_out, strict=True)), start=_ZERO)
    if any(segment.source is None for segment in choice):
        return Piece(filler, 1, Nest(extents, (tuple(0 for _ in extents), dense_out)), (0, offset_out))
    strides = tuple(segment.step * stride for segment, stride in zip(choice, dense_in, strict=True))
    starts = ((s.source or 0) * stride for s, stride in zip(choice, dense_in, strict=True))
    return Piece(0, 1, Nest(extents, (strides, dense_out)), (sum(starts, start=_ZERO), offset_out))


_ZERO: Dim = 0


def _input(node: Node) -> Value:
    value = node.inputs[0]
    if value is None:
        raise ValueError(f"node '{node.name}' ({node.op}) has no first input")
    return value
