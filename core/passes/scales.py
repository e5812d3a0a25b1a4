"""Conversions between numbers and their quantized form: recognized, moved, and spelled out elementwise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.ir.graph import Array, Node, Value
from core.ir.types import DType
from core.ops import registry
from core.ops.registry import NodeView
from core.passes.base import shape_of
from core.passes.edit import Editor

_WHOLE = frozenset({DType.UINT8, DType.INT8, DType.UINT16, DType.INT16, DType.INT32})


@dataclass(frozen=True)
class Real:
    """(whole - zero) * scale, with scale and zero point known: one number each, or a vector along `axis`."""

    whole: Value
    scale: Array  # float32
    zero: Array  # of the integers' type
    axis: int
    node: Node

    def is_like(self, other: Real) -> bool:
        """Whether both mean the same number by the same integer."""
        if self.scale.size != 1 or other.scale.size != 1 or self.zero.dtype != other.zero.dtype:
            return False
        pairs = ((self.scale, other.scale), (self.zero, other.zero))
        return all(bool(a.reshape(()) == b.reshape(())) for a, b in pairs)

    def again(self, editor: Editor, anchor: Node, whole: Value) -> Value:
        """Other integers, dequantized the same way."""
        return editor.emit(anchor, "DequantizeLinear", whole, *self.node.inputs[1:], attrs=self.node.attrs)


def dequantized(editor: Editor, value: Value | None) -> Real | None:
    """What a value was dequantized from."""
    node = value.producer if value is not None else None
    return real_of(editor, node) if node is not None and node.op == "DequantizeLinear" else None


def real_of(editor: Editor, node: Node) -> Real | None:
    """What DequantizeLinear or QuantizeLinear says of its integers; None for scales in blocks, unknown scales, and
    other types than float32."""
    op = NodeView(registry.get(node.op), node)
    scale, x, y = editor.array(node.input(1)), node.inputs[0], node.output
    whole, real = (x, y) if node.op == "DequantizeLinear" else (y, x)
    if x is None or whole is None or real is None or scale is None or op.attr("block_size"):
        return None
    if scale.dtype != np.float32 or scale.ndim > 1 or real.dtype is not DType.FLOAT32 or whole.dtype not in _WHOLE:
        return None
    zero = editor.array(node.input(2))
    if node.input(2) is not None and zero is None:
        return None
    point = np.zeros((), whole.dtype.numpy) if zero is None else zero
    return Real(whole, scale, point, int(op.attr("axis")), node)


def lower(editor: Editor, node: Node) -> None:
    """QuantizeLinear or DequantizeLinear as elementwise operators: kernels compute and fuse those."""
    if node.op not in ("QuantizeLinear", "DequantizeLinear") or editor.array(node.inputs[0]) is not None:
        return
    spread = _spread(editor, node)
    if spread is None:
        return
    scale, zero = spread
    emit = _dequantize if node.op == "DequantizeLinear" else _quantize
    editor.replace(node.output, emit(editor, node, scale, zero))


def _dequantize(editor: Editor, node: Node, scale: Value, zero: Value | None) -> Value:
    x = _cast(editor, node, node.inputs[0], DType.FLOAT32)
    if zero is not None and not _is_zero(editor, zero):
        x = editor.emit(node, "Sub", x, _cast(editor, node, zero, DType.FLOAT32))
    known = editor.array(scale)
    return x if known is not None and np.all(known == 1) else editor.emit(node, "Mul", x, scale)


def _quantize(editor: Editor, node: Node, scale: Value, zero: Value | None) -> Value:
    """Conversion to integers saturates, and turns NaN into 0. The quotient is rounded, so it must be one: the product
    with a reciprocal lies beside a number halfway between two integers where the quotient is that number."""
    known, ratio = editor.array(scale), node.inputs[0]
    if known is None or np.any(known != 1):
        ratio = editor.emit(node, "Div", ratio, scale)
    y = editor.emit(node, "Round", ratio)
    if zero is not None and not _is_zero(editor, zero):
        y = editor.emit(node, "Add", y, _cast(editor, node, zero, DType.FLOAT32))
    return _cast(editor, node, y, node.output.dtype)


def _spread(editor: Editor, node: Node) -> tuple[Value, Value | None] | None:
    """Scale and zero point as they broadcast to the input: constants in its shape, or computed single numbers."""
    x, scale, zero = node.inputs[0], node.inputs[1], node.input(2)
    if x is None or scale is None:
        return None
    real = real_of(editor, node)
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
