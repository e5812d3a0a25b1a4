"""Helpers for QuantizeLinear and DequantizeLinear: recognition, re-emission, and lowering to elementwise nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lathe.core.ir.graph import Array, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import NodeView
from lathe.core.passes.rewrite.base import shape_of
from lathe.core.passes.rewrite.editor import Editor

_UNSIGNED = (DType.UINT8, DType.UINT16)
_WHOLE = frozenset({DType.UINT8, DType.INT8, DType.UINT16, DType.INT16, DType.INT32})


@dataclass(frozen=True)
class Dequantized:
    """A dequantized tensor: (whole - zero) * scale.

    `whole` is the integer tensor. `scale` and `zero` are constant: single numbers, or vectors along `axis`. `node` is
    the QuantizeLinear or DequantizeLinear.
    """

    whole: Value
    scale: Array  # float32
    zero: Array  # of the integers' type
    axis: int
    node: Node

    def is_like(self, other: Dequantized) -> bool:
        """Whether both have the same single scale and zero point, of equal type."""
        if self.scale.size != 1 or other.scale.size != 1 or self.zero.dtype != other.zero.dtype:
            return False
        pairs = ((self.scale, other.scale), (self.zero, other.zero))
        return all(bool(a.reshape(()) == b.reshape(())) for a, b in pairs)

    def again(self, editor: Editor, anchor: Node, whole: Value) -> Value:
        """Emit another DequantizeLinear before `anchor`, and return its output, (`whole` - zero) * scale.

        The argument `whole` is an integer tensor in place of this object's; the output has its shape. Scale, zero point
        and attributes are those of `node`.
        """
        return editor.emit(anchor, "DequantizeLinear", whole, *self.node.inputs[1:], attrs=self.node.attrs)


def dequantized_from(editor: Editor, value: Value | None) -> Dequantized | None:
    """The integers, scale and zero point of the DequantizeLinear that computes a value; None if none does.

    None also where `dequantization_of` is None.
    """
    node = value.producer if value is not None else None
    return dequantization_of(editor, node) if node is not None and node.op == "DequantizeLinear" else None


def dequantization_of(editor: Editor, node: Node) -> Dequantized | None:
    """The integers, scale and zero point of a DequantizeLinear or QuantizeLinear.

    None for blocked scales, scales or zero points that are not constant, and real types other than float32. Integers of
    2 and 4 bits must be constant: kernels read no others.
    """
    op = NodeView(registry.get(node.op), node)
    scale, x, y = editor.array(node.input(1)), node.inputs[0], node.output
    whole, real = (x, y) if node.op == "DequantizeLinear" else (y, x)
    if x is None or whole is None or real is None or scale is None or op.attr("block_size"):
        return None
    is_narrow_weight = editor.array(whole) is not None and whole.dtype.is_integer and whole.dtype.bits < 8
    if scale.dtype != np.float32 or scale.ndim > 1 or real.dtype is not DType.FLOAT32:
        return None
    if whole.dtype not in _WHOLE and not is_narrow_weight:
        return None
    zero = editor.array(node.input(2))
    if node.input(2) is not None and zero is None:
        return None
    point = np.zeros((), whole.dtype.numpy) if zero is None else zero
    return Dequantized(whole, scale, point, int(op.attr("axis")), node)


def lower(editor: Editor, node: Node) -> None:
    """Rewrites a QuantizeLinear or DequantizeLinear as elementwise nodes, which can be fused; other nodes stay.

    Nodes of constants stay as well, and nodes with blocked scales, computed scales of several numbers, or element types
    other than float32 and integers of 8, 16 and 32 bits.
    """
    if node.op not in ("QuantizeLinear", "DequantizeLinear") or editor.array(node.inputs[0]) is not None:
        return
    broadcast = _broadcast_scale(editor, node)
    if broadcast is None:
        return
    scale, zero = broadcast
    emit = _dequantize if node.op == "DequantizeLinear" else _quantize
    editor.replace(node.output, emit(editor, node, scale, zero))


def _dequantize(editor: Editor, node: Node, scale: Value, zero: Value | None) -> Value:
    x = _cast(editor, node, node.inputs[0], DType.FLOAT32)
    if zero is not None and not _is_zero(editor, zero):
        x = editor.emit(node, "Sub", x, _cast(editor, node, zero, DType.FLOAT32))
    known = editor.array(scale)
    return x if known is not None and np.all(known == 1) else editor.emit(node, "Mul", x, scale)


def _quantize(editor: Editor, node: Node, scale: Value, zero: Value | None) -> Value:
    """Quantizes by Div, Round, Add and a Cast, which saturates and turns NaN into 0.

    The division must not become a multiplication with the reciprocal: where the quotient lies exactly halfway between
    two integers, the product may not, and would round to the other integer.
    """
    known, ratio = editor.array(scale), node.inputs[0]
    if known is not None and _saturates_at_zero(editor, node, zero) and np.all(known > 0):
        ratio = _before_relu(ratio)
    if known is None or np.any(known != 1):
        ratio = editor.emit(node, "Div", ratio, scale)
    y = editor.emit(node, "Round", ratio)
    if zero is not None and not _is_zero(editor, zero):
        y = editor.emit(node, "Add", y, _cast(editor, node, zero, DType.FLOAT32))
    return _cast(editor, node, y, node.output.dtype)


def _saturates_at_zero(editor: Editor, node: Node, zero: Value | None) -> bool:
    """Whether negative numbers become 0, as they do when they become unsigned integers without a zero point."""
    return node.output.dtype in _UNSIGNED and (zero is None or _is_zero(editor, zero))


def _before_relu(value: Value | None) -> Value | None:
    """The input of the Relu that computes a value; the value itself if another node does."""
    node = value.producer if value is not None else None
    return node.inputs[0] if node is not None and node.op == "Relu" else value


def _broadcast_scale(editor: Editor, node: Node) -> tuple[Value, Value | None] | None:
    """Scale and zero point, reshaped to broadcast to the input: constants, or computed single numbers.

    The zero point is None if a computed scale has none. The result is None for any other QuantizeLinear or
    DequantizeLinear.
    """
    x, scale, zero = node.inputs[0], node.inputs[1], node.input(2)
    if x is None or scale is None:
        return None
    real = dequantization_of(editor, node)
    if real is not None:
        axis, shape = real.axis, shape_of(x)
        if real.scale.ndim == 0 or (real.scale.size == 1 and real.zero.size == 1):
            return editor.constant(real.scale.reshape(()), "scale"), editor.constant(real.zero.reshape(()), "zero")
        if shape is None:
            return None
        tail = (1,) * (len(shape) - 1 - axis % len(shape))
        parts = [a if a.size == 1 else a.reshape(-1, *tail) for a in (real.scale, real.zero)]
        return editor.constant(parts[0], "scale"), editor.constant(parts[1], "zero")
    single = all(value is None or shape_of(value) == () for value in (scale, zero))
    plain = x.dtype in _WHOLE | {DType.FLOAT32} and node.output.dtype in _WHOLE | {DType.FLOAT32}
    known = NodeView(registry.get(node.op), node)
    return (scale, zero) if single and plain and scale.dtype is DType.FLOAT32 and not known.attr("block_size") else None


def _is_zero(editor: Editor, zero: Value) -> bool:
    array = editor.array(zero)
    return array is not None and not array.any()


def _cast(editor: Editor, anchor: Node, value: Value | None, dtype: DType) -> Value:
    known = editor.array(value)
    if known is not None:
        return editor.constant(known.astype(dtype.numpy), "c")
    return editor.emit(anchor, "Cast", value, attrs={"to": dtype.onnx_code})
