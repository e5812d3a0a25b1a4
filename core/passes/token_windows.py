"""Tokens beside their neighbours in packed sequences: convolutions along the tokens, and tokens moved by one place.

The window of a token holds those at given offsets from it, and something else where its sequence has none. Convolved,
every token is an image of its own that is as large as the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from core.ir.graph import Node, Value
from core.ops import registry
from core.ops.conv_gradient import flat_pads
from core.ops.registry import Infer
from core.ops.slicing import Pad, Slice
from core.ops.spatial import kernel_of, window_of
from core.passes.base import shape_of
from core.passes.edit import Editor
from core.passes.permutation import inverse

_MOST_COPIES = 16  # of a number, for each time that a convolution multiplies it


@dataclass(frozen=True, slots=True)
class Places:
    """int64[n] of each token: its place among all tokens, and those of the first and the last one of its sequence."""

    own: Value
    first: Value
    last: Value


@dataclass(frozen=True, slots=True)
class Shift:
    """Each token's place has the one `offset` places further on, `fill` where the sequence has none."""

    tokens: Value
    offset: int
    fill: float


def convolved(editor: Editor, c: Infer, axis: int, places: Callable[[], Places]) -> Value | None:
    """What a convolution of one sequence along `axis` gives, of many; None where its results are not one for each
    token, sequences do not lie alone along the batch, or to copy the windows is most of the work."""
    x, *parameters = c.node.inputs
    kernel, shape = kernel_of(c, c.tensor(1).dims), shape_of(x)
    if x is None or kernel is None or shape is None or axis < 2 or shape[0] != 1 or c.attr("layout") != "NCHW":
        return None
    window, at, rank = window_of(c, kernel), axis - 2, len(shape)
    if window.pads is None or window.strides[at] != 1 or sum(window.pads[at]) != window.extents[at] - 1:
        return None
    outputs = c.tensor(1).dims[0]
    if not isinstance(outputs, int) or kernel[at] * c.attr("group") > _MOST_COPIES * outputs:
        return None
    pads, dilations = [*window.pads], [*window.dilations]
    offsets = [tap * dilations[at] - pads[at][0] for tap in range(kernel[at])]
    pads[at], dilations[at] = (0, 0), 1
    windows = _windows(editor, c.node, x, axis, offsets, places(), fill=0)  # [n, taps, 1, channels, ...]
    order = [0, *range(2, axis + 2), 1, *range(axis + 2, rank + 1)]  # taps where the tokens were, behind the new batch
    moved = editor.emit(c.node, "Transpose", windows, attrs={"perm": tuple(order)})
    images = editor.reshaped(c.node, moved, (moved.shape[0], *moved.shape[2:]))
    attrs = {**c.node.attrs, "auto_pad": "NOTSET", "pads": flat_pads(tuple(pads)), "dilations": tuple(dilations)}
    sums = editor.emit(c.node, "Conv", images, *parameters, attrs=attrs)
    back = (axis, *range(1, axis), 0, *range(axis + 1, rank))
    return editor.emit(c.node, "Transpose", sums, attrs={"perm": back})


def shift_of(c: Infer, axis: int) -> Shift | None:
    """What a Pad does that gives back the token which a Slice took off at one end, but at the other end."""
    pad, sliced = c.op, c.node.inputs[0]
    cut = sliced.producer if sliced is not None else None
    if not isinstance(pad, Pad) or cut is None or cut.op != "Slice" or c.attr("mode") != "constant":
        return None
    tokens, fill = cut.inputs[0], c.param("constant_value")
    assert tokens is not None
    if sliced is None or (c.has_param("constant_value") and fill is None):
        return None
    left, widths = _taken_off(c, cut, axis), pad.widths(c, len(sliced.shape))
    if left is None or widths is None or any(width != (0, 0) for i, width in enumerate(widths) if i != axis):
        return None
    offset = left[0] or -left[1]
    return Shift(tokens, offset, float(fill[0]) if fill else 0.0) if tuple(widths[axis]) == left[::-1] else None


def _taken_off(c: Infer, cut: Node, axis: int) -> tuple[int, int] | None:
    """How many tokens a Slice takes off before and after the others, where that is one: every sequence has so many."""
    op, x = registry.get(cut.op), cut.inputs[0]
    source, left = shape_of(x), shape_of(cut.output)
    assert isinstance(op, Slice)
    ranges = op.ranges(Infer(op, cut, c.known), len(source)) if source is not None else None
    if source is None or left is None or ranges is None or axis not in ranges:
        return None
    start, _, step = ranges[axis]
    if step != 1 or start not in (0, 1) or left != (*source[:axis], source[axis] - 1, *source[axis + 1 :]):
        return None
    return (1, 0) if start == 1 else (0, 1)


def shifted(editor: Editor, node: Node, axis: int, shift: Shift, places: Places) -> Value:
    windows = _windows(editor, node, shift.tokens, axis, (shift.offset,), places, shift.fill)
    rest = [i for i in range(len(shift.tokens.shape)) if i != axis]
    moved = editor.reshaped(node, windows, (windows.shape[0], *windows.shape[2:]))
    return editor.emit(node, "Transpose", moved, attrs={"perm": inverse((axis, *rest))})


def _windows(
    editor: Editor, node: Node, x: Value, axis: int, offsets: Sequence[int], places: Places, fill: float
) -> Value:
    """[n, offsets, the axes of x but `axis`]: of each token along `axis` those at such offsets from it, or `fill`."""
    rest = [i for i in range(len(x.shape)) if i != axis]
    tokens = editor.emit(node, "Transpose", x, attrs={"perm": (axis, *rest)})
    n, *extents = tokens.shape
    if tuple(offsets) == (0,):
        return editor.reshaped(node, tokens, (n, 1, *extents))
    own, first, last = (editor.reshaped(node, value, (n, 1)) for value in (places.own, places.first, places.last))
    wanted = editor.emit(node, "Add", own, editor.constant(np.array(offsets, np.int64)))
    there = editor.emit(node, "Min", editor.emit(node, "Max", wanted, first), last)
    taken = editor.emit(node, "Gather", tokens, there, attrs={"axis": 0})
    inside = editor.reshaped(node, editor.emit(node, "Equal", wanted, there), (n, len(offsets), *(1 for _ in rest)))
    return editor.emit(node, "Where", inside, taken, editor.constant(np.array(fill, x.dtype.numpy)))
