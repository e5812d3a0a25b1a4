"""Transposed convolutions become plain ones that make all results between two neighbouring pixels at once.

With stride s, every pixel of the input has s results along an axis (s*s in an image). Each is a sum over a few pixels
around it, so all together they are a convolution of stride 1 with s (s*s) times as many channels, whose results are
then laid out as pixels (Shi et al. 2016, "Is the deconvolution layer the same as a convolutional layer?"). Where
windows do not overlap it is a matrix product that writes the pixels in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from core.ir.dim import floor_div
from core.ir.graph import Array, Attr, Graph, Node, Value
from core.ir.types import Dim
from core.ops import registry
from core.ops.conv import transposed_cuts
from core.passes.base import PassResult, has_ranks, reshape_attrs
from core.passes.edit import Editor
from core.passes.layout import first_perm, last_perm

_MOST_GROWTH = 16  # of the weights, which zeros fill up where a kernel is smaller than its stride


@dataclass(frozen=True)
class TransposedConvolutions:
    name: str = "transposed_conv"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op == "ConvTranspose" and has_ranks(node):
                _rewrite(editor, node)
        return editor.finish()


@dataclass(frozen=True)
class _Axis:
    """Along one axis: result `stride*j + q` is the sum of x[j + at] * w[q + cut - stride*at] over `at` in `reach`."""

    size: Dim
    count: Dim
    kernel: int
    stride: int
    cut: int  # results cut off before the first

    @property
    def reach(self) -> range:
        first = -((self.kernel - 1 - self.cut) // self.stride)
        return range(first, (self.stride - 1 + self.cut) // self.stride + 1)

    @property
    def steps(self) -> Dim:
        """Pixels that results are made for; the last may have more than are wanted."""
        return floor_div(self.count + (self.stride - 1), self.stride)

    @property
    def pads(self) -> tuple[int, Dim]:
        """They are numbers, whatever the size is, unless the number of results is not computed from it."""
        return -self.reach[0], self.steps - self.size + self.reach[-1]

    def tap(self, q: int, at: int) -> int | None:
        """The place in the kernel that takes pixel `j + at` to result `stride*j + q`, if there is one."""
        place = q + self.cut - self.stride * at
        return place if 0 <= place < self.kernel else None


def _rewrite(editor: Editor, node: Node) -> None:
    x, weight, bias = node.inputs[0], editor.array(node.inputs[1]), editor.array(node.input(2))
    if x is None or weight is None or (bias is None and node.input(2) is not None):
        return
    axes = _axes(node, x, weight) if x.dtype.is_float and node.attrs.get("layout", "NCHW") == "NCHW" else None
    pads = [pad for axis in axes or () for pad in axis.pads]
    if axes is None or not all(isinstance(pad, int) and pad >= 0 for pad in pads):
        return
    if prod(axis.stride * len(axis.reach) for axis in axes) > _MOST_GROWTH * prod(axis.kernel for axis in axes):
        return
    last = editor.emit(node, "Transpose", x, attrs={"perm": last_perm(len(x.shape))})
    if _group(node) == 1 and len(axes) <= 2 and all(len(axis.reach) == 1 and axis.pads == (0, 0) for axis in axes):
        y = _as_product(editor, node, last, weight, bias, axes)
    else:
        y = _as_convolution(editor, node, last, weight, bias, axes)
    y = _trimmed(editor, node, y, axes)
    editor.replace(node.output, editor.emit(node, "Transpose", y, attrs={"perm": first_perm(len(x.shape))}))


def _axes(node: Node, x: Value, weight: Array) -> list[_Axis] | None:
    """None where it is not known how much is cut off, or the kernel has holes."""
    sizes, counts, kernel = x.shape[2:], node.output.shape[2:], weight.shape[2:]
    strides, dilations = _steps(node, "strides", len(kernel)), _steps(node, "dilations", len(kernel))
    cuts = transposed_cuts(registry.Infer(registry.get(node.op), node, {}), sizes, kernel)
    if cuts is None or any(step != 1 for step in dilations):
        return None
    return [_Axis(*each) for each in zip(sizes, counts, kernel, strides, cuts, strict=True)]


def _steps(node: Node, name: str, rank: int) -> list[int]:
    given = node.attrs.get(name)
    return [int(step) for step in given] if isinstance(given, tuple) and given else [1] * rank  # type: ignore[arg-type]


def _group(node: Node) -> int:
    group = node.attrs.get("group", 1)
    return group if isinstance(group, int) else 1


def _phases(weight: Array, axes: Sequence[_Axis], groups: int) -> Array:
    """[C, M/g, K..] as the weights of all results between two pixels [g, s.., M/g, C/g, reach..]."""
    channels, columns = weight.shape[:2]
    strides, reaches = [axis.stride for axis in axes], [axis.reach for axis in axes]
    per_group = weight.reshape(groups, channels // groups, *weight.shape[1:])
    made = np.zeros((groups, *strides, columns, channels // groups, *map(len, reaches)), weight.dtype)
    for phase in np.ndindex(*strides):
        for place in np.ndindex(*map(len, reaches)):
            taps = [axis.tap(q, axis.reach[i]) for axis, q, i in zip(axes, phase, place, strict=True)]
            if all(tap is not None for tap in taps):
                made[(slice(None), *phase, ..., *place)] = per_group[(..., *taps)].swapaxes(1, 2)
    return made


def _as_product(
    editor: Editor, node: Node, x: Value, weight: Array, bias: Array | None, axes: Sequence[_Axis]
) -> Value:
    """[n, h, 1, w, C] times [sh, C, sw*M] is [n, h, sh, w, sw*M]: the pixels in order."""
    channels, columns = weight.shape[:2]
    phases = _phases(weight, axes, 1).reshape(*(axis.stride for axis in axes), columns, channels)
    matrices = np.moveaxis(phases, -1, -3).reshape(-1, channels, axes[-1].stride * columns)
    outer = [axis.size for axis in axes[:-1]]
    rows: tuple[Dim, ...] = (x.shape[0], *outer, 1, axes[-1].size, channels)
    spread = editor.emit(node, "Reshape", x, attrs=reshape_attrs(rows))
    y = editor.emit(node, "FusedMatMul", spread, editor.constant(np.ascontiguousarray(matrices), "w"))
    if bias is not None:
        y = editor.emit(node, "Add", y, editor.constant(np.tile(bias, axes[-1].stride), "b"))
    return _pixels(editor, node, y, axes, columns)


def _as_convolution(
    editor: Editor, node: Node, x: Value, weight: Array, bias: Array | None, axes: Sequence[_Axis]
) -> Value:
    """A convolution with channels [g, s.., M/g], which then go to [n, steps, s, .., g, M/g]."""
    groups, rank, columns, strides = _group(node), len(axes), weight.shape[1], tuple(axis.stride for axis in axes)
    phases = _phases(weight, axes, groups)
    kernel = phases.reshape(-1, *phases.shape[2 + rank :])
    shared = None
    if bias is not None:
        per_phase = np.broadcast_to(bias.reshape(groups, *(1,) * rank, columns), (groups, *strides, columns))
        shared = editor.constant(per_phase.reshape(-1), "b")
    befores, afters = zip(*(axis.pads for axis in axes), strict=True)
    attrs: dict[str, Attr] = {
        "strides": (1,) * rank, "dilations": (1,) * rank, "pads": (*befores, *afters), "group": groups,
        "layout": "NHWC",
    }  # fmt: skip
    y = editor.emit(node, "FusedConv", x, editor.constant(kernel, "w"), shared, attrs=attrs)
    steps: tuple[Dim, ...] = tuple(axis.steps for axis in axes)
    y = editor.emit(node, "Reshape", y, attrs=reshape_attrs((x.shape[0], *steps, groups, *strides, columns)))
    pairs = [axis for i in range(rank) for axis in (1 + i, 2 + rank + i)]
    perm: tuple[Attr, ...] = (0, *pairs, 1 + rank, 2 + 2 * rank)
    return _pixels(editor, node, editor.emit(node, "Transpose", y, attrs={"perm": perm}), axes, groups * columns)


def _pixels(editor: Editor, node: Node, y: Value, axes: Sequence[_Axis], channels: int) -> Value:
    """All results in order, more at the ends than are wanted where the stride does not divide their number."""
    made: tuple[Dim, ...] = (y.shape[0], *(axis.steps * axis.stride for axis in axes), channels)
    return editor.emit(node, "Reshape", y, attrs=reshape_attrs(made))


def _trimmed(editor: Editor, node: Node, y: Value, axes: Sequence[_Axis]) -> Value:
    if all(axis.steps * axis.stride == axis.count for axis in axes):
        return y
    rank = len(axes)
    attrs: dict[str, Attr] = {
        "starts": (0,) * rank, "ends": tuple(axis.count for axis in axes), "axes": tuple(range(1, rank + 1)),
    }  # fmt: skip
    return editor.emit(node, "Slice", y, attrs=attrs)
