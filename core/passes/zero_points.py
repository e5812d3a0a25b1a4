"""Products of integers as kernels have them: uint8 by a constant int8, whatever the zero points are.

    sum (a - za) * (b - zb)  =  sum (a - za) * b'  -  r * sum (a - za),    where b - zb = b' - r and b' is int8

Weights around their zero point mostly are int8 already, and r is 0. Otherwise the second sum is a product, too: with
ones. A zero point of A that only a run shows is taken off by `core.passes.gemm`, that of an image here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from core.ir.graph import Array, Attr, Node, Value
from core.ir.types import DType
from core.ops import registry
from core.ops.conv import conv_pads
from core.passes.base import shape_of
from core.passes.edit import Editor

OFFSET = 128
_QUAD = 4  # bytes that one word of a product holds
_MOST_TAPS = 512  # of a depthwise window: sums of so many products of bytes are exact in float32, too


def normalize(editor: Editor, node: Node, depthwise: bool) -> None:
    """MatMulInteger and ConvInteger of constant weights; what has no kernel stays as it is. `depthwise`: whether the
    target's kernels convolve every channel of bytes for itself."""
    if node.op not in ("MatMulInteger", "ConvInteger"):
        return
    weight, point = editor.array(node.inputs[1]), editor.array(node.input(3))
    if weight is None or weight.size == 0 or (point is None and node.input(3) is not None):
        return
    if node.input(2) is not None and shape_of(node.input(2)) not in ((), (1,)):
        return
    point = np.zeros((), weight.dtype) if point is None else point
    if node.op == "MatMulInteger":
        _product(editor, node, weight, point)
    else:
        _convolution(editor, node, weight, _per_channel(point, weight.ndim), depthwise)


def centred(array: Array, zero: Array) -> Array | None:
    """Bytes minus their zero point, which broadcasts to them, as int8; None where they do not fit."""
    apart = array.astype(np.int32) - zero.astype(np.int32)
    fits = apart.min(initial=0) >= -OFFSET and apart.max(initial=0) < OFFSET
    return apart.astype(np.int8) if fits else None


def lifted(editor: Editor, anchor: Node, value: Value) -> Value:
    """An int8 value, 128 higher."""
    wide = editor.emit(anchor, "Cast", value, attrs={"to": DType.INT32.onnx_code})
    higher = editor.emit(anchor, "Add", wide, editor.constant(np.array(OFFSET, np.int32), "offset"))
    return editor.emit(anchor, "Cast", higher, attrs={"to": DType.UINT8.onnx_code})


def missing_words(extent: int) -> int:
    """How many bytes more make whole words."""
    return -extent % _QUAD


def padded(array: Array, axis: int, count: int) -> Array:
    """An array with so many zeros behind an axis."""
    return np.pad(array, [(0, count if at == axis % array.ndim else 0) for at in range(array.ndim)])


def is_depthwise(node: Node, weight: Array) -> bool:
    """Whether a convolution takes every channel for itself, in a way that has a kernel for bytes."""
    groups = node.attrs.get("group", 1)
    if groups == 1 or weight.shape[:2] != (groups, 1):
        return False
    return weight.ndim <= 4 and prod(weight.shape[2:]) <= _MOST_TAPS


def _product(editor: Editor, node: Node, weight: Array, point: Array) -> None:
    shape = shape_of(node.inputs[0])
    if shape is None or min(len(shape), weight.ndim) < 2 or shape[-1] != weight.shape[-2]:
        return
    missing = missing_words(weight.shape[-2])
    if _is_normal(node, weight) and not missing:
        return
    near, rest = _split(weight, point)
    a, zero = _unsigned(editor, node)
    if missing:
        a = editor.emit(node, "Pad", a, attrs={"pads": (0, missing), "axes": (len(shape) - 1,)})
    kernels = [padded(each, -2, missing) for each in (near, np.ones((weight.shape[-2], 1), np.int8))]
    editor.replace(node.output, _less_rest(editor, node, a, zero, kernels, rest))


def _convolution(editor: Editor, node: Node, weight: Array, point: Array, depthwise: bool) -> None:
    shape, group = shape_of(node.inputs[0]), node.attrs.get("group", 1)
    missing = 0 if depthwise and is_depthwise(node, weight) else missing_words(weight.shape[1])
    if shape is None or shape[1:2] != (weight.shape[1] * group,) or (missing and group != 1):
        return
    if _has_computed_zero(editor, node):
        node = _with_known_zero(editor, node, weight, point)
    if (_is_normal(node, weight) and not missing) or _has_computed_zero(editor, node):
        return
    near, rest = _split(weight, point)
    x, zero = _unsigned(editor, node)
    if missing:
        x = editor.emit(node, "Pad", x, attrs={"pads": (0, missing), "axes": (1,)})
    ones = np.ones_like(near if group != 1 else near[:1])
    kernels = [padded(each, 1, missing) for each in (near, ones)]
    rest = None if rest is None else rest.reshape(rest.shape[:-1]) if rest.ndim else rest
    editor.replace(node.output, _less_rest(editor, node, x, zero, kernels, rest))


def _less_rest(
    editor: Editor, node: Node, a: Value, zero: Value | None, kernels: Sequence[Array], rest: Array | None
) -> Value:
    """The product with the first kernel, less `rest` times that with the second one."""
    total = editor.emit(node, node.op, a, editor.constant(kernels[0], "weight"), zero, attrs=node.attrs)
    if rest is None:
        return total
    other = editor.emit(node, node.op, a, editor.constant(kernels[1], "ones"), zero, attrs=node.attrs)
    return editor.emit(node, "Sub", total, editor.emit(node, "Mul", other, editor.constant(rest, "rest")))


def _split(weight: Array, point: Array) -> tuple[Array, Array | None]:
    """Weights less their zero point as int8, less an int32 that is None where it is 0: b' and r."""
    near = centred(weight, point)
    if near is not None:
        return near, None
    if weight.dtype == np.int8:
        return weight, point.astype(np.int32)
    return (weight.astype(np.int32) - OFFSET).astype(np.int8), point.astype(np.int32) - OFFSET


def _is_normal(node: Node, weight: Array) -> bool:
    """Whether the left operand is uint8 and the weight int8 around zero."""
    left = node.inputs[0]
    return left is not None and left.dtype is DType.UINT8 and weight.dtype == np.int8 and node.input(3) is None


def _unsigned(editor: Editor, node: Node) -> tuple[Value, Value | None]:
    """The left operand as uint8, and its zero point."""
    a, zero = node.inputs[0], node.input(2)
    assert a is not None, registry.describe(node)
    if a.dtype is DType.UINT8:
        return a, zero
    zero = editor.constant(np.array(0, np.int8), "zero") if zero is None else zero
    return lifted(editor, node, a), lifted(editor, node, zero)


def _per_channel(point: Array, rank: int) -> Array:
    """A zero point of each output channel of a convolution, as it broadcasts to the weight."""
    return point.reshape(-1, *(1,) * (rank - 1)) if point.ndim else point


def _has_computed_zero(editor: Editor, node: Node) -> bool:
    return node.input(2) is not None and editor.array(node.input(2)) is None


def _with_known_zero(editor: Editor, node: Node, weight: Array, point: Array) -> Node:
    """The same convolution around 0, less what its computed zero point adds up to. That is the same in every place once
    the zero point pads the image for all to see. The node itself where the padding is not known."""
    pads, (x, w, zero) = conv_pads(registry.Infer(registry.get(node.op), node, {})), node.inputs[:3]
    if pads is None:
        return node
    axes = [axis for axis, pair in enumerate(pads) if pair != (0, 0)]
    if axes:
        widths = (*(pads[axis][0] for axis in axes), *(pads[axis][1] for axis in axes))
        x = editor.emit(node, "Pad", x, None, zero, attrs={"pads": widths, "axes": tuple(axis + 2 for axis in axes)})
    attrs: dict[str, Attr] = {name: value for name, value in node.attrs.items() if name not in ("pads", "auto_pad")}
    total = editor.emit(node, node.op, x, w, None, node.input(3), attrs=attrs)
    made = total.producer
    assert made is not None
    apart = weight.astype(np.int32) - point.astype(np.int32)
    sums = apart.sum(tuple(range(1, apart.ndim)), dtype=np.int32).reshape(-1, *(1,) * (apart.ndim - 2))
    wide = editor.emit(node, "Cast", zero, attrs={"to": DType.INT32.onnx_code})
    offset = editor.emit(node, "Mul", editor.constant(sums, "sums"), wide)
    editor.replace(node.output, editor.emit(node, "Sub", total, offset))
    return made
