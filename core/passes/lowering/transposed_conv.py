"""Rewrites transposed convolutions as plain convolutions followed by a depth-to-space rearrangement.

With stride s, each pixel of the input yields s results along an axis (s*s in an image). Each result is a sum over a few
neighbouring pixels, so together they are a convolution of stride 1 with s (s*s) times as many channels, whose results
are then rearranged as pixels (Shi et al. 2016, "Is the deconvolution layer the same as a convolutional layer?"). Where
windows do not overlap, it is a matrix product that writes the pixels in their final order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from lathe.core.ir.dim import floor_div
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import Dim
from lathe.core.ops.nn.conv import transposed_cuts
from lathe.core.ops.opdef import registry
from lathe.core.passes.layout.channels_last import first_perm, last_perm
from lathe.core.passes.rewrite.base import PassResult, has_ranks, reshape_attrs
from lathe.core.passes.rewrite.editor import Editor

_MOST_GROWTH = 16  # the most growth of the weights, by zeros where the kernel is smaller than the stride


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
    """One image axis: result `stride*j + q` (phase q) sums x[j + at] * w[q + cut - stride*at] over `at` in `reach`.

    `size` pixels give `count` results; `kernel` is the number of weights.
    """

    size: Dim
    count: Dim
    kernel: int
    stride: int
    cut: int  # results that `pads` removes before the first

    @property
    def reach(self) -> range:
        first = -((self.kernel - 1 - self.cut) // self.stride)
        return range(first, (self.stride - 1 + self.cut) // self.stride + 1)

    @property
    def steps(self) -> Dim:
        """The number of input positions j that yield results; the last may yield more than `count` needs."""
        return floor_div(self.count + (self.stride - 1), self.stride)

    @property
    def pads(self) -> tuple[int, Dim]:
        """The padding (before, after) of the plain convolution; numbers even if `count` is computed from a symbol."""
        return -self.reach[0], self.steps - self.size + self.reach[-1]

    def tap(self, q: int, at: int) -> int | None:
        """The index of the weight that multiplies pixel `j + at` in result `stride*j + q`; None if no weight does."""
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
    """The geometry of each image axis; None if the kernel is dilated, or the results that pads remove are not known."""
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
    """The weights [C, M/g, K..] rearranged by phase: [g, s.., M/g, C/g, reach..], zeros where a phase has no tap.

    C and M are the numbers of input and output channels, K the extents of the kernel. There are g groups, and along
    each axis s phases (the stride).
    """
    channels, columns = weight.shape[:2]
    strides, reaches = [axis.stride for axis in axes], [axis.reach for axis in axes]
    per_group = weight.reshape(groups, channels // groups, *weight.shape[1:])
    phases = np.zeros((groups, *strides, columns, channels // groups, *map(len, reaches)), weight.dtype)
    for phase in np.ndindex(*strides):
        for place in np.ndindex(*map(len, reaches)):
            taps = [axis.tap(q, axis.reach[i]) for axis, q, i in zip(axes, phase, place, strict=True)]
            if all(tap is not None for tap in taps):
                phases[(slice(None), *phase, ..., *place)] = per_group[(..., *taps)].swapaxes(1, 2)
    return phases


def _as_product(
    editor: Editor, node: Node, x: Value, weight: Array, bias: Array | None, axes: Sequence[_Axis]
) -> Value:
    """All results, computed from channels-last `x` by one matrix product, for windows that do not overlap.

    [n, h, 1, w, C] times [sh, C, sw*M] is [n, h, sh, w, sw*M]: the pixels in row-major order. The images of `x` have h
    times w pixels and C channels; sh and sw are the strides, M the number of output channels.
    """
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
    """All results, computed from channels-last `x` by a convolution with output channels [g, s.., M/g].

    They are rearranged to [n, steps, s, .., g, M/g], the pixels in row-major order; the letters are those of `_phases`.
    """
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
    """`y` reshaped to images [n, steps*stride.., channels]: more than `count` where the stride does not divide it."""
    shape: tuple[Dim, ...] = (y.shape[0], *(axis.steps * axis.stride for axis in axes), channels)
    return editor.emit(node, "Reshape", y, attrs=reshape_attrs(shape))


def _trimmed(editor: Editor, node: Node, y: Value, axes: Sequence[_Axis]) -> Value:
    if all(axis.steps * axis.stride == axis.count for axis in axes):
        return y
    rank = len(axes)
    attrs: dict[str, Attr] = {
        "starts": (0,) * rank, "ends": tuple(axis.count for axis in axes), "axes": tuple(range(1, rank + 1)),
    }  # fmt: skip
    return editor.emit(node, "Slice", y, attrs=attrs)
