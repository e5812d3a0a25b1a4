"""Quantized graphs: rewrites products of dequantized numbers as products of integers, whose results are scaled.

Exporters write DequantizeLinear before an operator and QuantizeLinear after it (QDQ). This pass moves the conversions
after nodes that only move elements, and cancels inverse pairs. It rewrites a convolution or matrix product of a
dequantized input with a quantized weight as an integer product. The remaining conversions become elementwise nodes,
which other passes fuse into the epilogues of the products. Activations are uint8: int8 activations are stored plus 128.

Integer sums are exact. QLinearConv and QLinearMatMul give the results of ONNX Runtime. A product of dequantized numbers
is within one quantization step of ONNX's definition, whose float32 sum rounds more often. Where a product has no
integer kernel (groups of few channels, computed weights), the same graph computes it in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.passes.precision.scales import Dequantized, dequantization_of, dequantized_from, lower
from lathe.core.passes.precision.zero_points import (
    OFFSET,
    is_depthwise,
    minus_zero_point,
    missing_bytes,
    normalize_integer_product,
    pad_with_zeros,
    to_unsigned,
)
from lathe.core.passes.rewrite.base import PassResult, has_ranks, shape_of
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import perm_of

MOVING = frozenset({
    "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose", "Slice", "DepthToSpace", "SpaceToDepth",
    "MaxPool",
})  # fmt: skip


@dataclass(frozen=True)
class Quantized:
    """Rewrites quantized operators for a target.

    `integers`: the target multiplies bytes faster than floats; otherwise products of dequantized numbers stay float32.
    Operators that are integer products by definition get integer kernels in any case. `depthwise`: the target has
    depthwise kernels for bytes.
    """

    integers: bool = True
    depthwise: bool = True
    name: str = "quantized"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        steps: list[Callable[[Editor, Node], None]] = [_expand_qlinear, _make_unsigned, _quantize_before_pooling, _move]
        if self.integers:
            steps.append(partial(_multiply, depthwise=self.depthwise))
        steps += [partial(normalize_integer_product, depthwise=self.depthwise), lower]
        for step in steps:
            for node in editor.nodes():
                step(editor, node)
        integers = sum(node.op in ("ConvInteger", "MatMulInteger") for node in editor.nodes())
        if integers:
            editor.notes.append(f"{integers} products of bytes")
        return editor.finish()


# QLinear operators


def _expand_qlinear(editor: Editor, node: Node) -> None:
    """Rewrites QLinearConv and QLinearMatMul as a product of numbers dequantized with scale 1, times one factor.

    The result is quantized with scale 1. A later step makes the product one of integers. As in ONNX Runtime the factor
    is x_scale * w_scale / y_scale. Separate factors would round twice, which can give another integer.
    """
    if node.op not in ("QLinearConv", "QLinearMatMul") or not _has_full_bias(node, node.input(8)):
        return
    x, _, x_zero, w, _, w_zero, _, y_zero = node.inputs[:8]
    scales = [editor.array(node.input(index)) for index in (1, 4, 6)]
    w_shape = shape_of(w)
    if w_shape is None or any(scale is None or scale.dtype != np.float32 for scale in scales):
        return
    x_scale, w_scale, y_scale = (np.asarray(scale) for scale in scales)
    if x_scale.size != 1 or y_scale.size != 1:
        return
    is_conv, one = node.op == "QLinearConv", editor.constant(np.ones((), np.float32), "one")
    ones = editor.constant(np.ones_like(w_scale), "ones")
    left = editor.emit(node, "DequantizeLinear", x, one, x_zero)
    right = editor.emit(node, "DequantizeLinear", w, ones, w_zero, attrs={"axis": 0 if is_conv else len(w_shape) - 1})
    bias = node.input(8)
    if is_conv:
        bias = editor.emit(node, "DequantizeLinear", bias, one) if bias is not None else None
        y = editor.emit(node, "Conv", left, right, bias, attrs=node.attrs)
    else:
        y = editor.emit(node, "MatMul", left, right)
    factor = x_scale.reshape(()) * (w_scale if w_scale.size > 1 else w_scale.reshape(())) / y_scale.reshape(())
    y = editor.emit(node, "Mul", y, editor.constant(_per_channel(node, factor), "factor"))
    editor.replace(node.output, editor.emit(node, "QuantizeLinear", y, one, y_zero))


# Moving conversions


def _make_unsigned(editor: Editor, node: Node) -> None:
    """Makes a QuantizeLinear to int8 quantize to uint8, plus 128, for the readers that dequantize the integers again.

    Other readers keep the int8 result.
    """
    zero = editor.array(node.input(2))
    if node.op != "QuantizeLinear" or node.output.dtype is not DType.INT8 or zero is None or zero.size != 1:
        return
    readers = [reader for reader in editor.readers(node.output) if _dequantizes_per_tensor(editor, reader)]
    if not readers:
        return
    unsigned_zero = editor.constant(_plus_offset(zero), "zero")
    attrs = {name: value for name, value in node.attrs.items() if name != "output_dtype"}
    y = editor.emit(node, "QuantizeLinear", node.inputs[0], node.inputs[1], unsigned_zero, attrs=attrs)
    for reader in readers:
        own = editor.array(reader.input(2))
        point = editor.constant(_plus_offset(np.zeros((), np.int8) if own is None else own), "zero")
        editor.replace(reader.output, editor.emit(reader, "DequantizeLinear", y, reader.inputs[1], point))


def _dequantizes_per_tensor(editor: Editor, reader: Node) -> bool:
    """Whether a node is a DequantizeLinear with one constant scale and zero point for the whole tensor."""
    real = dequantization_of(editor, reader) if reader.op == "DequantizeLinear" else None
    return real is not None and real.scale.size == 1


def _plus_offset(zero: Array) -> Array:
    """An int8 zero point of one element, plus 128, as a uint8 scalar."""
    return (zero.astype(np.int32) + OFFSET).astype(np.uint8).reshape(())


def _move(editor: Editor, node: Node) -> None:
    """Moves a DequantizeLinear after `node` if `node` only moves elements; cancels one if `node` is its inverse."""
    if node.op == "QuantizeLinear":
        _cancel(editor, node)
    elif node.op in MOVING and len(node.outputs) == 1:
        real = dequantized_from(editor, node.input(0))
        if real is not None and real.scale.size == 1 and (node.op != "MaxPool" or float(real.scale.reshape(())) > 0):
            moved = editor.emit(node, node.op, real.whole, *node.inputs[1:], attrs=node.attrs)
            editor.replace(node.output, real.again(editor, node, moved))
    elif node.op == "Concat":
        reals = [dequantized_from(editor, value) for value in node.inputs]
        first = reals[0]
        if first is not None and all(real is not None and real.is_like(first) for real in reals):
            moved = editor.emit(node, "Concat", *(real.whole for real in reals if real), attrs=node.attrs)
            editor.replace(node.output, first.again(editor, node, moved))


def _quantize_before_pooling(editor: Editor, node: Node) -> None:
    """Moves the QuantizeLinear of a MaxPool's result before the MaxPool, which then reads and writes bytes.

    Rounding keeps the order of numbers, so the maximum is the same; NaN is not, so the numbers must be results of a
    product of dequantized numbers.
    """
    pool = node.inputs[0].producer if node.op == "QuantizeLinear" and node.inputs[0] is not None else None
    if pool is None or pool.op != "MaxPool" or len(pool.outputs) > 1 or editor.only_reader(pool.output) is not node:
        return
    scale, x = editor.array(node.input(1)), pool.required_input(0)
    if scale is None or scale.size != 1 or float(scale.item()) <= 0 or not _is_product_of_integers(editor, x):
        return
    whole = editor.emit(node, "QuantizeLinear", x, *node.inputs[1:], attrs=node.attrs)
    editor.replace(node.output, editor.emit(node, "MaxPool", whole, attrs=pool.attrs))


def _is_product_of_integers(editor: Editor, value: Value) -> bool:
    """Whether a Conv, MatMul or Gemm of dequantized 8-bit numbers gives a value, perhaps through a Relu or Clip."""
    node = value.producer
    while node is not None and node.op in ("Relu", "Clip"):
        node = node.required_input(0).producer
    if node is None or node.op not in ("Conv", "MatMul", "Gemm"):
        return False
    left = dequantized_from(editor, node.inputs[0])
    return left is not None and left.whole.dtype in (DType.UINT8, DType.INT8)


def _cancel(editor: Editor, node: Node) -> None:
    real, y = dequantized_from(editor, node.inputs[0]), dequantization_of(editor, node)
    if real is not None and y is not None and real.whole.dtype is node.output.dtype and real.is_like(y):
        editor.replace(node.output, real.whole)


# Products


def _multiply(editor: Editor, node: Node, depthwise: bool) -> None:
    """Rewrites a product of dequantized numbers as the product of the integers, times both scales, plus the bias.

    Nothing is done unless the node is a Conv, MatMul or Gemm whose left operand has one scale and 8-bit integers, whose
    weight is constant, and which an integer kernel covers.
    """
    if node.op not in ("Conv", "MatMul", "Gemm") or not has_ranks(node) or not _has_full_bias(node, node.input(2)):
        return
    left = dequantized_from(editor, node.inputs[0])
    if left is None or left.scale.size != 1 or left.whole.dtype not in (DType.UINT8, DType.INT8):
        return
    weight = _weight(editor, node, depthwise)
    if weight is None or not _fits_kernel(node, left.whole, weight[0]):
        return
    integers, scale = weight
    x, zero = _as_unsigned(editor, node, left)
    if not is_depthwise(node, integers):
        x, integers = _pad_to_words(editor, node, x, integers)
    zero_value, right = editor.constant(zero, "zero"), editor.constant(integers, "weight")
    op = "ConvInteger" if node.op == "Conv" else "MatMulInteger"
    attrs = node.attrs if node.op == "Conv" else {}
    total = editor.emit(node, op, x, right, zero_value, attrs=attrs)
    y = editor.emit(node, "Cast", total, attrs={"to": DType.FLOAT32.onnx_code})
    alpha = np.float32(node.attrs.get("alpha", 1.0)) if node.op == "Gemm" else np.float32(1)  # type: ignore[arg-type]
    factor = left.scale.reshape(()) * scale * alpha
    if np.any(factor != 1):
        y = editor.emit(node, "Mul", y, editor.constant(_per_channel(node, factor), "scale"))
    editor.replace(node.output, _with_bias(editor, node, y))


def _fits_kernel(node: Node, x: Value, weight: Array) -> bool:
    """Whether kernels cover `x`, the left operand of a product: its rank is at least 2, its depth that of the weight.

    Rank and depth must be known. For a Conv, only the rank is checked.
    """
    shape = shape_of(x)
    if shape is None or len(shape) < 2:
        return False
    return node.op == "Conv" or shape[-1] == weight.shape[0]


def _pad_to_words(editor: Editor, node: Node, x: Value, weight: Array) -> tuple[Value, Array]:
    """Both operands of a product, padded with zeros along the summed axis to a multiple of four."""
    x_axis, axis = (1, 1) if node.op == "Conv" else (len(x.shape) - 1, 0)
    missing = missing_bytes(weight.shape[axis])
    if missing == 0:
        return x, weight
    wider = editor.emit(node, "Pad", x, attrs={"pads": (0, missing), "axes": (x_axis,)})
    return wider, pad_with_zeros(weight, axis, missing)


def _with_bias(editor: Editor, node: Node, y: Value) -> Value:
    bias = node.input(2)
    if bias is None:
        return y
    if node.op == "Conv":
        bias = editor.emit(node, "Reshape", bias, attrs={"shape": (*bias.shape, *(1,) * (len(node.output.shape) - 2))})
    elif node.attrs.get("beta", 1.0) != 1.0:
        beta = editor.constant(np.float32(node.attrs["beta"]).reshape(()), "beta")  # type: ignore[arg-type]
        bias = editor.emit(node, "Mul", bias, beta)
    return editor.emit(node, "Add", y, bias)


def _has_full_bias(node: Node, bias: Value | None) -> bool:
    """Whether the bias of a convolution, if any, provably has one element per output channel; true for other nodes.

    ONNX refuses any other bias, but the Add in its place would broadcast it.
    """
    shape = shape_of(node.output)
    return not node.op.endswith("Conv") or bias is None or (shape is not None and shape_of(bias) == shape[1:2])


def _per_channel(node: Node, values: Any) -> Array:
    """One number, or one per output channel, reshaped to broadcast to the output of the convolution or product."""
    values = np.asarray(values)
    if not node.op.endswith("Conv") or values.ndim == 0:
        return values
    return values.reshape(-1, *(1,) * (len(node.output.shape) - 2))


def _weight(editor: Editor, node: Node, depthwise: bool) -> tuple[Array, Array] | None:
    """The constant right operand of a product as int8 with zero point 0, and its scale: one, or one per channel.

    None if no integer kernel covers it.
    """
    swapped = bool(node.op == "Gemm" and node.attrs.get("transB", 0))
    if node.op == "Gemm" and node.attrs.get("transA", 0):
        return None
    found = _constant_weight(editor, node.inputs[1], swapped)
    if found is None:
        return None
    scale, array, axis = found
    channel, along = (0, 1) if node.op == "Conv" else (1, 0)
    if node.op != "Conv" and array.ndim != 2:
        return None
    if scale.size > 1 and axis != channel:
        return None
    grouped = node.op == "Conv" and node.attrs.get("group", 1) != 1
    if grouped and missing_bytes(array.shape[along]) and not (depthwise and is_depthwise(node, array)):
        return None
    return array, scale if scale.size > 1 else scale.reshape(())


def _constant_weight(editor: Editor, value: Value | None, swapped: bool) -> tuple[Array, Array, int] | None:
    """The scale, the integers, and the axis of the scale, of a dequantized constant weight that may be transposed.

    `swapped`: the product transposes it, too. The integers are int8 with zero point 0, in the axis order of the
    product. None for any other value.
    """
    real, moved = dequantized_from(editor, value), None
    if real is None and value is not None and value.producer is not None:
        moved = perm_of(value.producer)
        real = dequantized_from(editor, value.producer.inputs[0]) if moved is not None else None
    array = editor.array(real.whole) if real is not None else None
    centred = _minus_zero_point(array, real.zero, real.axis) if real is not None and array is not None else None
    if real is None or centred is None:
        return None
    axis = real.axis % centred.ndim
    for perm in (moved, (1, 0) if swapped else None):
        if perm is not None:
            centred, axis = np.transpose(centred, perm), perm.index(axis)
    return real.scale, centred, axis


def _minus_zero_point(array: Array, zero: Array, axis: int) -> Array | None:
    """Bytes minus `zero`, one zero point or one per index of `axis`, as int8; None if a difference exceeds int8.

    Integers of 2 and 4 bits become bytes. None also if the array is of another type.
    """
    dtype = DType.from_numpy(array.dtype)
    if not dtype.is_integer or dtype.bits > 8:
        return None
    if dtype.bits < 8:
        array, zero = array.astype(np.int8), zero.astype(np.int8)
    shape = [-1 if at == axis % array.ndim else 1 for at in range(array.ndim)]
    return minus_zero_point(array, zero.reshape(shape if zero.size > 1 else ()))


def _as_unsigned(editor: Editor, anchor: Node, real: Dequantized) -> tuple[Value, Array]:
    """The integers of a dequantized tensor as uint8, and their zero point; int8 integers are stored plus 128."""
    if real.whole.dtype is DType.UINT8:
        return real.whole, real.zero.astype(np.uint8).reshape(())
    return to_unsigned(editor, anchor, real.whole), _plus_offset(real.zero)
