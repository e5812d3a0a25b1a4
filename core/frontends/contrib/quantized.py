"""Quantized operators, as DequantizeLinear of their inputs, a float operator, and QuantizeLinear of the result.

Passes may turn these into integer kernels again. Scales and zero points are per tensor, or per column of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.contrib.lowering_table import emit_output, lowers, present_attrs, refuse_attributes
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Value
from lathe.core.ir.types import DType


def _dequantize_input(e: Emitter, node: OnnxNode, at: int, **attrs: Any) -> Value:
    """The quantized input at index `at`, dequantized. Its scale and zero point are the next two inputs."""
    return e("DequantizeLinear", node.required(at), node.required(at + 1), node.input(at + 2), **attrs)


def _quantize_output(e: Emitter, node: OnnxNode, y: Value, at: int) -> list[Value]:
    """Emit the node's first output: `y` quantized with the scale in input `at` and the zero point in the next."""
    return emit_output(e, node, "QuantizeLinear", y, node.required(at), node.input(at + 1))


@lowers("QuantizeLinear", "DequantizeLinear")
def _same_as_onnx(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """ONNX's operator of the same name. ONNX Runtime contributed its own before ONNX's took types of 16 and 4 bits."""
    return emit_output(e, node, node.op, *node.inputs, **present_attrs(node, "axis", "block_size", "saturate"))


@lowers("QLinearAdd", "QLinearMul")
def _arithmetic(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    a, b = (_dequantize_input(e, node, at) for at in (0, 3))
    return _quantize_output(e, node, e(node.op.removeprefix("QLinear"), a, b), 6)


@lowers("QLinearSigmoid", "QLinearLeakyRelu")
def _activation(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    x = _dequantize_input(e, node, 0)
    return _quantize_output(e, node, e(node.op.removeprefix("QLinear"), x, **present_attrs(node, "alpha")), 3)


@lowers("QLinearSoftmax")
def _softmax(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    axis: Any = node.attrs.get("axis", -1)
    opset: Any = node.attrs.get("opset", 13)
    if opset < 13 and axis % node.rank(0) != node.rank(0) - 1:
        raise UnsupportedError(f"axis is {axis} of opset {opset}, expected the last axis", where=node.where)
    return _quantize_output(e, node, e("Softmax", _dequantize_input(e, node, 0), axis=axis), 3)


@lowers("QLinearGlobalAveragePool", "QLinearAveragePool")
def _pool(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Average pooling, windowed or global. Channels are in axis 1, or last with the attribute `channels_last`."""
    attrs = present_attrs(node, "auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
    rank, is_last = node.rank(0), bool(node.attrs.get("channels_last"))
    x = _dequantize_input(e, node, 0)
    x = e("Transpose", x, perm=(0, rank - 1, *range(1, rank - 1))) if is_last else x
    y = e(node.op.removeprefix("QLinear"), x, **attrs)
    return _quantize_output(e, node, e("Transpose", y, perm=(0, *range(2, rank), 1)) if is_last else y, 3)


@lowers("QLinearConcat")
def _concat(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Concat of quantized tensors.

    Inputs: scale and zero point of the result, then tensor, scale and zero point of each part.
    """
    parts = [_dequantize_input(e, node, at) for at in range(2, len(node.inputs), 3)]
    return _quantize_output(e, node, e("Concat", *parts, axis=node.attrs["axis"]), 0)


@lowers("QLinearWhere")
def _where(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    x, y = (_dequantize_input(e, node, at) for at in (1, 4))
    return _quantize_output(e, node, e("Where", node.required(0), x, y), 7)


@lowers("QGemm")
def _gemm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """alpha * (A @ B + C), where C is int32 in units of scale_A * scale_B.

    The result is quantized if the node has an output scale (input 7), otherwise float32.
    """
    b = _dequantize_input(e, node, 3, axis=0 if node.attrs.get("transB") else 1)
    y = e("Gemm", _dequantize_input(e, node, 0), b, **present_attrs(node, "transA", "transB"))
    if (c := node.input(6)) is not None:
        unit = e("Mul", node.required(1), node.required(4))
        y = e("Add", y, e("Mul", e("Cast", c, to=DType.FLOAT32.onnx_code), unit))
    y = e("Mul", y, e.constant(node.attrs.get("alpha", 1.0), dtype=DType.FLOAT32))
    return emit_output(e, node, "Identity", y) if node.input(7) is None else _quantize_output(e, node, y, 7)


@lowers("MatMulIntegerToFloat")
def _integer_product(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """A @ B + bias for quantized A and B, as floats. Inputs: A, B, their scales, their zero points, bias."""
    return _add_bias(e, node, integer_product(e, node, (0, 2, 4), (1, 3, 5)), 6)


@lowers("DynamicQuantizeMatMul")
def _dynamic_product(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """A @ B + bias as floats, for a float A, which is quantized to uint8 by its range in the run, and a quantized B.

    Inputs: A, B, scale of B, zero point of B, bias.
    """
    a, scale, zero = quantize_dynamically(e, node.required(0))
    return _add_bias(e, node, _product(e, a, scale, zero, *_quantized_input(node, (1, 2, 3))), 4)


_INT8_ROWS = 4  # of the attribute `accuracy_level`; 1 to 3 are floats of 32, 16 and 16 bits

_Quantized: TypeAlias = tuple[Value, Value, Value | None]  # a tensor, its scale, its zero point


def integer_product(e: Emitter, node: OnnxNode, a: Sequence[int], b: Sequence[int]) -> Value:
    """The matrix product of two quantized inputs of the node, as float32.

    `a` and `b` are three input indices each: of the tensor, its scale, and its zero point (the input may be absent).
    """
    return _product(e, *_quantized_input(node, a), *_quantized_input(node, b))


def _quantized_input(node: OnnxNode, at: Sequence[int]) -> _Quantized:
    return node.required(at[0]), node.required(at[1]), node.input(at[2])


def _product(
    e: Emitter, a: Value, a_scale: Value, a_zero: Value | None, b: Value, b_scale: Value, b_zero: Value | None
) -> Value:
    product = e("Cast", e("MatMulInteger", a, b, a_zero, b_zero), to=DType.FLOAT32.onnx_code)
    return e("Mul", product, e("Mul", a_scale, b_scale))


def _add_bias(e: Emitter, node: OnnxNode, y: Value, bias_at: int) -> list[Value]:
    bias = node.input(bias_at)
    return emit_output(e, node, "Identity", y) if bias is None else emit_output(e, node, "Add", y, bias)


def dequantize(e: Emitter, x: Value, scale: Value, zero: Value) -> Value:
    """(x - zero) * scale as floats. `scale` and `zero` are per tensor: scalars, or vectors of one element."""
    scale, zero = (e("Reshape", each, e.constant([], dtype=DType.INT64)) for each in (scale, zero))
    return e("DequantizeLinear", x, scale, zero)


def quantize_dynamically(e: Emitter, x: Value) -> tuple[Value, Value, Value]:
    """`x` quantized to uint8, with its scale and zero point (DynamicQuantizeLinear)."""
    names = [e.session.fresh(f"{e.label}.{name}") for name in ("quantized", "scale", "zero_point")]
    y, scale, zero = e.emit("DynamicQuantizeLinear", [x], {}, names, names[0])
    return y, scale, zero


@lowers("MatMulNBits")
def _packed_product(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """A [..,K] times the transpose of a constant weight [N,K] of 4 or 8 bits, quantized in blocks along K, plus bias.

    The weight is uint8 [N,blocks,bytes per block]; each block has a scale. Zero points are packed like the weights, or
    floats. Without them, the middle of the range represents zero. With the accuracy level 4, rows of A may be rounded
    to int8. UnsupportedError unless weight and zero points are constants, `bits` is 4 or 8, a block has at least 16
    elements, and input 4 (the group of each column) is absent.
    """
    refuse_attributes(node, "weight_prepacked")
    sizes = [node.attrs.get(name) for name in ("K", "N", "bits", "block_size")]
    k, n, bits, block = (size if isinstance(size, int) else 0 for size in sizes)
    packed = e.value_of(node.input(1))
    if packed is None or bits not in (4, 8) or block < 16 or node.input(4) is not None:
        raise UnsupportedError("needs constant weights of 4 or 8 bits, not reordered", where=node.where)
    weights = e.constant(unpack(packed.reshape(n, -1), bits)[:, :k])
    blocks = -(-k // block)
    known = e.value_of(node.input(2))
    if known is None:
        scales = e("Reshape", node.required(2), e.constant([n, blocks], dtype=DType.INT64))
    else:
        scales = e.constant(known.reshape(n, blocks))
    dense = _dequantize_blocks(e, node, weights, scales, bits, block)
    a = node.required(0)
    if node.attrs.get("accuracy_level", 0) == _INT8_ROWS:
        a = e("RoundableRows", a)
    y = (a, e("Transpose", dense, perm=(1, 0)))
    if (bias := node.input(5)) is None:
        return emit_output(e, node, "MatMul", *y)
    return emit_output(e, node, "Add", e("MatMul", *y), bias)


@lowers("MatMulBnb4")
def _bits_and_bytes_product(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """A times the transpose of a constant weight [N,K] in bitsandbytes' format of 4 bits, high half-byte first.

    Each number is the index of one of 16 floats, which is multiplied by the largest magnitude of its block: of
    `block_size` consecutive elements of the flattened weight. With `transB` 0 the weight is not transposed.
    UnsupportedError if the weight is no constant, or for other values of `quant_type` than 0 (FP4) and 1 (NF4).
    """
    given: dict[str, Any] = {"transB": 1, **node.attrs}
    n, k, block = (given[name] for name in ("N", "K", "block_size"))
    packed, floats = e.value_of(node.input(1)), _FLOATS.get(given["quant_type"])
    if packed is None or floats is None:
        raise UnsupportedError("needs a constant weight, and quant_type 0 or 1", where=node.where)
    codes = np.stack([packed >> 4, packed & 15], axis=-1).ravel()[: n * k].astype(np.int32)
    most = e("Gather", node.required(2), e.constant(np.arange(n * k, dtype=np.int32) // block))
    table = e.constant(floats, dtype=most.dtype)
    weight = e("Reshape", e("Mul", e("Gather", table, e.constant(codes)), most), e.constant([n, k], dtype=DType.INT64))
    b = e("Transpose", weight, perm=(1, 0)) if given["transB"] else weight
    return emit_output(e, node, "MatMul", node.required(0), b)


# The 16 floats of each type of bitsandbytes: FP4 (a sign, two bits of exponent, one of mantissa), and NF4 (for 16
# equally likely intervals of a normal distribution).
_MAGNITUDES = (0.0, 5.208333333e-03, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_FLOATS = {
    0: (*_MAGNITUDES, *(-number for number in _MAGNITUDES)),
    1: (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
}  # fmt: skip


def unpack(packed: Any, bits: int) -> Any:
    """Numbers of 4 bits from bytes, lower half first: a last axis twice as long. If `bits` is 8, `packed` itself."""
    if bits == 8:
        return packed
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def _dequantize_blocks(e: Emitter, node: OnnxNode, weights: Value, scales: Value, bits: int, block: int) -> Value:
    """The weights [N,K] of a MatMulNBits, of `bits` bits, as floats; each `block` along K has a scale of [N,blocks]."""
    (rows, blocks), (_, depth) = scales.tensor.evaluate({}), weights.tensor.evaluate({})
    value = node.input(3)
    points = None if value is None else e.value_of(value)
    if value is not None and points is None:
        raise UnsupportedError("needs constant zero points", where=node.where)
    if points is None:
        points = np.full((rows, blocks), 1 << (bits - 1), np.uint8)
    elif points.dtype == np.uint8:
        points = np.ascontiguousarray(unpack(points.reshape(rows, -1), bits)[:, :blocks])
    else:  # floats, which DequantizeLinear does not take
        least = e("Mul", e.constant(points.reshape(rows, blocks), dtype=scales.dtype), scales)
        block_indices = e.constant(np.arange(depth) // block)
        real = e("DequantizeLinear", weights, scales, axis=1, block_size=block)
        return e("Sub", real, e("Gather", least, block_indices, axis=1))
    return e("DequantizeLinear", weights, scales, e.constant(points), axis=1, block_size=block)
