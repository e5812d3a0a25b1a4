"""Normalizes integer products with any zero points to the form that kernels cover: uint8 times constant int8.

    sum (a - za) * (b - zb)  =  sum (a - za) * b'  -  r * sum (a - za),    where b - zb = b' - r and b' is int8

Here a are elements of the left operand A, za is its zero point, b are weights, and zb is their zero point. Usually
`b - zb` fits int8, and r is 0. Otherwise the second sum is computed as a product with ones. A zero point of A that is
known only in a run is subtracted by `lathe.core.passes.fusion.gemm`, that of an image by this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from lathe.core.ir.graph import Array, Attr, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.nn.conv import conv_pads
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.base import shape_of
from lathe.core.passes.rewrite.editor import Editor

OFFSET = 128
_QUAD = 4  # the number of bytes in one 32-bit word of a product
_MOST_TAPS = 512  # the most weights of a depthwise window: sums of 512 products of bytes are exact in float32


def normalize_integer_product(editor: Editor, node: Node, depthwise: bool) -> None:
    """Rewrites a MatMulInteger or ConvInteger with constant weights as products of uint8 by int8 with zero point 0.

    Any other node, and one without a kernel, stays as it is. `depthwise`: the target has depthwise kernels for bytes.
    """
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


def minus_zero_point(array: Array, zero: Array) -> Array | None:
    """Bytes minus their zero point, which broadcasts to them, as int8; None if a difference exceeds int8."""
    difference = array.astype(np.int32) - zero.astype(np.int32)
    fits = difference.min(initial=0) >= -OFFSET and difference.max(initial=0) < OFFSET
    return difference.astype(np.int8) if fits else None


def to_unsigned(editor: Editor, anchor: Node, value: Value) -> Value:
    """An int8 value plus 128 as uint8, computed by new nodes before `anchor`."""
    wide = editor.emit(anchor, "Cast", value, attrs={"to": DType.INT32.onnx_code})
    shifted = editor.emit(anchor, "Add", wide, editor.constant(np.array(OFFSET, np.int32), "offset"))
    return editor.emit(anchor, "Cast", shifted, attrs={"to": DType.UINT8.onnx_code})


def missing_bytes(extent: int) -> int:
    """The number of bytes that `extent` lacks to a multiple of four."""
    return -extent % _QUAD


def pad_with_zeros(array: Array, axis: int, count: int) -> Array:
    """An array with `count` zeros appended along an axis."""
    return np.pad(array, [(0, count if at == axis % array.ndim else 0) for at in range(array.ndim)])


def is_depthwise(node: Node, weight: Array) -> bool:
    """Whether a convolution is depthwise, with a window of one or two axes and at most 512 weights.

    The kernel for bytes needs this.
    """
    groups = node.attrs.get("group", 1)
    if groups == 1 or weight.shape[:2] != (groups, 1):
        return False
    return weight.ndim <= 4 and prod(weight.shape[2:]) <= _MOST_TAPS


def _product(editor: Editor, node: Node, weight: Array, point: Array) -> None:
    shape = shape_of(node.inputs[0])
    if shape is None or min(len(shape), weight.ndim) < 2 or shape[-1] != weight.shape[-2]:
        return
    missing = missing_bytes(weight.shape[-2])
    if _is_normal(node, weight) and not missing:
        return
    near, rest = _split_weight(weight, point)
    a, zero = _unsigned(editor, node)
    if missing:
        a = editor.emit(node, "Pad", a, attrs={"pads": (0, missing), "axes": (len(shape) - 1,)})
    kernels = [pad_with_zeros(each, -2, missing) for each in (near, np.ones((weight.shape[-2], 1), np.int8))]
    editor.replace(node.output, _difference(editor, node, a, zero, kernels, rest))


def _convolution(editor: Editor, node: Node, weight: Array, point: Array, depthwise: bool) -> None:
    shape, group = shape_of(node.inputs[0]), node.attrs.get("group", 1)
    missing = 0 if depthwise and is_depthwise(node, weight) else missing_bytes(weight.shape[1])
    if shape is None or shape[1:2] != (weight.shape[1] * group,) or (missing and group != 1):
        return
    if _has_computed_zero(editor, node):
        node = _with_known_zero(editor, node, weight, point)
    if (_is_normal(node, weight) and not missing) or _has_computed_zero(editor, node):
        return
    near, rest = _split_weight(weight, point)
    x, zero = _unsigned(editor, node)
    if missing:
        x = editor.emit(node, "Pad", x, attrs={"pads": (0, missing), "axes": (1,)})
    ones = np.ones_like(near if group != 1 else near[:1])
    kernels = [pad_with_zeros(each, 1, missing) for each in (near, ones)]
    rest = None if rest is None else rest.reshape(rest.shape[:-1]) if rest.ndim else rest
    editor.replace(node.output, _difference(editor, node, x, zero, kernels, rest))


def _difference(
    editor: Editor, node: Node, a: Value, zero: Value | None, kernels: Sequence[Array], rest: Array | None
) -> Value:
    """The product of `a` with the first of `kernels`, minus `rest` times the product with the second.

    Without a `rest` (None), the first product alone. `zero` is the zero point of `a`.
    """
    total = editor.emit(node, node.op, a, editor.constant(kernels[0], "weight"), zero, attrs=node.attrs)
    if rest is None:
        return total
    other = editor.emit(node, node.op, a, editor.constant(kernels[1], "ones"), zero, attrs=node.attrs)
    return editor.emit(node, "Sub", total, editor.emit(node, "Mul", other, editor.constant(rest, "rest")))


def _split_weight(weight: Array, point: Array) -> tuple[Array, Array | None]:
    """The int8 weights b' and the int32 rest r with weight - point = b' - r; r is None where it is 0."""
    near = minus_zero_point(weight, point)
    if near is not None:
        return near, None
    if weight.dtype == np.int8:
        return weight, point.astype(np.int32)
    return (weight.astype(np.int32) - OFFSET).astype(np.int8), point.astype(np.int32) - OFFSET


def _is_normal(node: Node, weight: Array) -> bool:
    """Whether the left operand is uint8, and the weight int8 without a zero point."""
    left = node.inputs[0]
    return left is not None and left.dtype is DType.UINT8 and weight.dtype == np.int8 and node.input(3) is None


def _unsigned(editor: Editor, node: Node) -> tuple[Value, Value | None]:
    """The left operand as uint8 (int8 plus 128), and its zero point; None if it is uint8 and has none."""
    a, zero = node.inputs[0], node.input(2)
    assert a is not None, registry.describe(node)
    if a.dtype is DType.UINT8:
        return a, zero
    zero = editor.constant(np.array(0, np.int8), "zero") if zero is None else zero
    return to_unsigned(editor, node, a), to_unsigned(editor, node, zero)


def _per_channel(point: Array, rank: int) -> Array:
    """The zero points of a convolution's output channels, reshaped to broadcast to the weight."""
    return point.reshape(-1, *(1,) * (rank - 1)) if point.ndim else point


def _has_computed_zero(editor: Editor, node: Node) -> bool:
    return node.input(2) is not None and editor.array(node.input(2)) is None


def _with_known_zero(editor: Editor, node: Node, weight: Array, point: Array) -> Node:
    """Replaces a convolution with computed zero point by one with zero point 0, minus the zero point's contribution.

    The image is padded with the zero point explicitly, so that the contribution is equal for all pixels. Returns the
    new convolution, or the node itself if the padding is not known.
    """
    pads, (x, w, zero) = conv_pads(registry.Infer(registry.get(node.op), node, {})), node.inputs[:3]
    if pads is None:
        return node
    axes = [axis for axis, pair in enumerate(pads) if pair != (0, 0)]
    if axes:
        widths = (*(pads[axis][0] for axis in axes), *(pads[axis][1] for axis in axes))
        x = editor.emit(node, "Pad", x, None, zero, attrs={"pads": widths, "axes": tuple(axis + 2 for axis in axes)})
    attrs: dict[str, Attr] = {name: value for name, value in node.attrs.items() if name not in ("pads", "auto_pad")}
    total = editor.emit(node, node.op, x, w, None, node.input(3), attrs=attrs)
    new = total.producer
    assert new is not None
    kernel = weight.astype(np.int32) - point.astype(np.int32)
    sums = kernel.sum(tuple(range(1, kernel.ndim)), dtype=np.int32).reshape(-1, *(1,) * (kernel.ndim - 2))
    wide = editor.emit(node, "Cast", zero, attrs={"to": DType.INT32.onnx_code})
    offset = editor.emit(node, "Mul", editor.constant(sums, "sums"), wide)
    editor.replace(node.output, editor.emit(node, "Sub", total, offset))
    return new
