"""Windows of neighbouring tokens in packed sequences: convolutions along the tokens, and shifts by one token.

The window of a token holds the tokens at given offsets from it, and a fill value where its sequence has no such token.
In a convolution, the window of each token becomes an image of its own, as large as the kernel along the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lathe.core.ir.graph import Node, Value
from lathe.core.ops.nn.conv_gradient import flat_pads
from lathe.core.ops.nn.spatial import kernel_of, window_of
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Infer
from lathe.core.ops.tensor.slicing import Pad, Slice
from lathe.core.passes.rewrite.base import shape_of
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import inverse

_MOST_COPIES = 16  # numbers copied into windows for each output channel that multiplies them, see `packed_convolution`


@dataclass(frozen=True, slots=True)
class TokenIndices:
    """int64[n] each: for each token its own index, and those of the first and the last token of its sequence."""

    own: Value
    first: Value
    last: Value


@dataclass(frozen=True, slots=True)
class Shift:
    """A shift of `tokens`: each becomes the token `offset` places further on in its sequence, or `fill` without one."""

    tokens: Value
    offset: int
    fill: float


def packed_convolution(editor: Editor, c: Infer, axis: int, places: Callable[[], TokenIndices]) -> Value | None:
    """A convolution `c` of one sequence along `axis`, rewritten for packed sequences; None if it stays as it is.

    The convolution must give one result per token (stride 1, same padding), with batch extent 1 and channels first. It
    stays if the kernel is large compared with the number of output channels: copying the windows would take longer than
    the products. `places` is called only if the convolution is rewritten.
    """
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
    order = [0, *range(2, axis + 2), 1, *range(axis + 2, rank + 1)]  # n becomes the batch, taps replace the tokens
    moved = editor.emit(c.node, "Transpose", windows, attrs={"perm": tuple(order)})
    images = editor.reshaped(c.node, moved, (moved.shape[0], *moved.shape[2:]))
    attrs = {**c.node.attrs, "auto_pad": "NOTSET", "pads": flat_pads(tuple(pads)), "dilations": tuple(dilations)}
    sums = editor.emit(c.node, "Conv", images, *parameters, attrs=attrs)
    back = (axis, *range(1, axis), 0, *range(axis + 1, rank))
    return editor.emit(c.node, "Transpose", sums, attrs={"perm": back})


def shift_of(c: Infer, axis: int) -> Shift | None:
    """The shift that a Pad (`c`) after a Slice performs: one token is cut off at one end, and one added at the other.

    None for any other Pad.
    """
    pad, sliced = c.op, c.node.inputs[0]
    cut = sliced.producer if sliced is not None else None
    if not isinstance(pad, Pad) or cut is None or cut.op != "Slice" or c.attr("mode") != "constant":
        return None
    tokens, fill = cut.inputs[0], c.param("constant_value")
    assert tokens is not None
    if sliced is None or (c.has_param("constant_value") and fill is None):
        return None
    removed, widths = _removed_tokens(c, cut, axis), pad.widths(c, len(sliced.shape))
    if removed is None or widths is None or any(width != (0, 0) for i, width in enumerate(widths) if i != axis):
        return None
    offset = removed[0] or -removed[1]
    return Shift(tokens, offset, float(fill[0]) if fill else 0.0) if tuple(widths[axis]) == removed[::-1] else None


def _removed_tokens(c: Infer, cut: Node, axis: int) -> tuple[int, int] | None:
    """The numbers of tokens that a Slice removes at the start and at the end; None unless it removes one token in all.

    More than one would exceed sequences of one token.
    """
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


def packed_shift(editor: Editor, node: Node, axis: int, shift: Shift, places: TokenIndices) -> Value:
    """The tokens along `axis`, shifted within their sequences, computed by new nodes before `node`."""
    windows = _windows(editor, node, shift.tokens, axis, (shift.offset,), places, shift.fill)
    rest = [i for i in range(len(shift.tokens.shape)) if i != axis]
    moved = editor.reshaped(node, windows, (windows.shape[0], *windows.shape[2:]))
    return editor.emit(node, "Transpose", moved, attrs={"perm": inverse((axis, *rest))})


def _windows(
    editor: Editor, node: Node, x: Value, axis: int, offsets: Sequence[int], places: TokenIndices, fill: float
) -> Value:
    """The windows [n, offsets, axes of x without `axis`]: for each token the tokens at `offsets` from it, or `fill`."""
    rest = [i for i in range(len(x.shape)) if i != axis]
    tokens = editor.emit(node, "Transpose", x, attrs={"perm": (axis, *rest)})
    n, *extents = tokens.shape
    if tuple(offsets) == (0,):
        return editor.reshaped(node, tokens, (n, 1, *extents))
    own, first, last = (editor.reshaped(node, value, (n, 1)) for value in (places.own, places.first, places.last))
    wanted = editor.emit(node, "Add", own, editor.constant(np.array(offsets, np.int64)))
    clamped = editor.emit(node, "Min", editor.emit(node, "Max", wanted, first), last)
    gathered = editor.emit(node, "Gather", tokens, clamped, attrs={"axis": 0})
    inside = editor.reshaped(node, editor.emit(node, "Equal", wanted, clamped), (n, len(offsets), *(1 for _ in rest)))
    return editor.emit(node, "Where", inside, gathered, editor.constant(np.array(fill, x.dtype.numpy)))
