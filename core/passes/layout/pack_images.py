"""Lays out images of few channels for convolutions on a GPU.

A GPU copies 4 to 16 bytes at a time into shared memory without waiting. With 3 channels, as of colour images,
neighbouring pixels begin at odd places, so each number is loaded by itself. Two rewrites make numbers adjacent that a
window reads together:

- Channels of zeros are added, up to a multiple of 8 or 4. The weights of the added channels are 0.
- If the windows move by `block` pixels, each `block` x `block` pixels become one pixel with as many more channels, and
  the windows move by one of them. A window of 7 x 7 pixels then has 4 x 4 places. (For TPUs: Ying et al. 2018, "Image
  Classification at Supercomputer Scale", "space-to-depth".)

The zeros of such a window also meet pixels that the smaller window did not read, so an infinity or NaN there spreads.

One kernel (PackImage) does both, and also moves the channels behind the pixels, if they were before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.passes.rewrite.base import PassResult, has_ranks
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import perm_of

_MULTIPLES = (8, 4)  # of the channels of a pixel: with 8, narrow floats are copied 16 bytes at a time, with 4, 8 bytes
_MOST_ADDED = 3  # padding adds at most a third to the channels, so to the products
_FEW = 8  # channels that fill a copy of 16 bytes: from there on, blocks have no use
_CHANNELS_LAST = (0, 2, 3, 1)
_FLOATS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


@dataclass(frozen=True)
class PackImages:
    name: str = "pack_images"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op == "FusedConv" and has_ranks(node):
                _pack(editor, node)
        return editor.finish()


@dataclass(frozen=True)
class _Axis:
    """One spatial axis of the windows over blocks: `before` and `after` pad it, `front` and `back` pad the weights."""

    places: int
    before: int
    after: int
    front: int
    back: int


def _pack(editor: Editor, node: Node) -> None:
    x, weight = node.inputs[0], editor.array(node.input(1))
    if x is None or weight is None or node.attrs.get("layout") != "NHWC" or node.attrs.get("group", 1) != 1:
        return
    if x.dtype not in _FLOATS:
        return
    axes, block = _blocks(node, x, weight)
    channels = _padded_channels(weight.shape[1], block * block)
    if channels is None:
        axes, block, channels = [], 1, _padded_channels(weight.shape[1], 1)
    if channels is None or (block == 1 and channels == weight.shape[1]):
        return
    packed = _packed(editor, node, x, channels, block)
    weight = np.pad(weight, [(0, channels - weight.shape[1] if axis == 1 else 0) for axis in range(weight.ndim)])
    attrs = dict(node.attrs)
    if block > 1:
        weight = _weight_of_blocks(weight, axes, block)
        attrs.update(_windows_of_blocks(axes))
    weights = editor.constant(weight, "w")
    editor.replace(node.output, editor.emit(node, node.op, packed, weights, *node.inputs[2:], attrs=attrs))


def _blocks(node: Node, x: Value, weight: Array) -> tuple[list[_Axis], int]:
    """The windows over blocks and the extent of a block; no axes and 1 if blocks are of no use or not possible."""
    none: tuple[list[_Axis], int] = [], 1
    if weight.ndim != 4 or weight.shape[1] >= _FEW or node.attrs.get("auto_pad", "NOTSET") != "NOTSET":
        return none
    strides, dilations, pads = (_numbers(node, name) for name in ("strides", "dilations", "pads"))
    block = strides[0] if strides else 1
    if block < 2 or set(strides) != {block} or set(dilations) - {1}:
        return none
    axes = []
    for axis, kernel in enumerate(weight.shape[2:]):
        size, count = x.shape[1 + axis], node.output.shape[1 + axis]
        if not isinstance(size, int) or not isinstance(count, int) or size % block:
            return none
        pad = pads[axis] if pads else 0
        front = -pad % block
        before, places = (pad + front) // block, -(-(front + kernel) // block)
        after = count + places - 1 - size // block - before
        if after < 0:
            return none
        axes.append(_Axis(places, before, after, front, places * block - front - kernel))
    return axes, block


def _numbers(node: Node, name: str) -> tuple[int, ...]:
    given: Any = node.attrs.get(name) or ()
    return tuple(int(number) for number in given)


def _padded_channels(own: int, pixels: int) -> int | None:
    """The number of channels with which `pixels` of them are copied fast; None if too many would be added."""
    for multiple in _MULTIPLES:
        channels = own
        while channels * pixels % multiple:
            channels += 1
        if _MOST_ADDED * (channels - own) <= own:
            return channels
    return None


def _packed(editor: Editor, node: Node, x: Value, channels: int, block: int) -> Value:
    """The image with `channels` and blocks, from `x` or from what a Transpose makes `x` of."""
    moved = x.producer
    attrs = {"channels": channels, "block": block}
    if moved is not None and perm_of(moved) == _CHANNELS_LAST and editor.only_reader(x) is node:
        return editor.emit(node, "PackImage", moved.inputs[0], attrs=attrs)
    if len(x.shape) == 4:
        return editor.emit(node, "PackImage", x, attrs={**attrs, "layout": "NHWC"})
    axis = len(x.shape) - 1
    return editor.emit(node, "Pad", x, attrs={"pads": (0, channels - x.shape[axis]), "axes": (axis,)})


def _weight_of_blocks(weight: Array, axes: list[_Axis], block: int) -> Array:
    """[O, I, H, W] as [O, block * block * I, H / block, W / block], with its windows padded as `axes` say."""
    (rows, columns), (outputs, channels) = axes, weight.shape[:2]
    padded = np.pad(weight, [(0, 0), (0, 0), (rows.front, rows.back), (columns.front, columns.back)])
    apart = padded.reshape(outputs, channels, rows.places, block, columns.places, block)
    return apart.transpose(0, 3, 5, 1, 2, 4).reshape(outputs, block * block * channels, rows.places, columns.places)


def _windows_of_blocks(axes: list[_Axis]) -> dict[str, Attr]:
    """The attributes of the convolution whose windows slide over blocks."""
    rows, columns = axes
    return {
        "strides": (1, 1), "dilations": (1, 1), "kernel_shape": (rows.places, columns.places),
        "pads": (rows.before, columns.before, rows.after, columns.after),
    }  # fmt: skip


__all__ = ["PackImages"]
