"""Activations, normalizations, matrix products and convolutions, as ONNX Runtime's optimizer fuses them."""

from __future__ import annotations

from collections.abc import Sequence

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.contrib.lowering_table import constant, emit_activation, emit_output, lowers, present_attrs
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Value
from lathe.core.ir.types import DType

_EPSILON = 9.999999960041972e-13  # 1e-12 as float32


def _with_bias(e: Emitter, node: OnnxNode) -> Value:
    """The node's first input, plus its second input if that is present."""
    bias = node.input(1)
    return node.required(0) if bias is None else e("Add", node.required(0), bias)


@lowers("Gelu")
def _gelu(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return emit_output(e, node, "Gelu", node.required(0))


@lowers("BiasGelu")
def _bias_gelu(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return emit_output(e, node, "Gelu", _with_bias(e, node))


@lowers("FastGelu")
def _fast_gelu(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return emit_output(e, node, "Gelu", _with_bias(e, node), approximate="tanh")


@lowers("QuickGelu")
def _quick_gelu(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return emit_output(e, node, "Swish", node.required(0), alpha=node.attrs.get("alpha", 1.702))


@lowers("SkipLayerNormalization")
def _skip_layer_norm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """LayerNormalization of input + skip (+ bias). The sum is the fourth output."""
    total = e("Add", node.required(0), node.required(1))
    if (bias := node.input(4)) is not None:
        total = e("Add", total, bias)
    epsilon = node.attrs.get("epsilon", _EPSILON)
    y = emit_output(e, node, "LayerNormalization", total, node.required(2), node.input(3), epsilon=epsilon)
    return _with_sum(e, node, y, total)


@lowers("SkipSimplifiedLayerNormalization")
def _skip_rms_norm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    total = e("Add", node.required(0), node.required(1))
    if (bias := node.input(3)) is not None:
        total = e("Add", total, bias)
    y = emit_output(e, node, "RMSNormalization", total, node.required(2), epsilon=node.attrs.get("epsilon", _EPSILON))
    return _with_sum(e, node, y, total)


def _with_sum(e: Emitter, node: OnnxNode, y: list[Value], total: Value) -> Sequence[Value]:
    """The node's outputs: `y`, and if it has four, two placeholders for mean and deviation, and `total`, the sum.

    UnsupportedError if the model uses mean or deviation, which are for training.
    """
    if not {1, 2} & set(range(len(node.outputs))) <= node.unnamed:
        raise UnsupportedError("returns its mean or deviation, which are for training", where=node.where)
    if len(node.outputs) < 4:
        return y
    return [*y, total, total, e.emit("Identity", [total], {}, node.outputs[3:4], node.label)[0]]


@lowers("SimplifiedLayerNormalization", domain="")
def _rms_norm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    if len(node.outputs) > 1:
        raise UnsupportedError("returns its deviations, which are for training", where=node.where)
    attrs = present_attrs(node, "axis", "epsilon")
    return emit_output(e, node, "RMSNormalization", node.required(0), node.required(1), **attrs)


@lowers("FusedConv")
def _fused_conv(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """A convolution, plus the optional fourth input, followed by the attribute `activation`."""
    attrs = present_attrs(node, "auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    y = e("Conv", *node.inputs[:3], **attrs)
    if (residual := node.input(3)) is not None:
        y = e("Add", y, residual)
    return emit_activation(e, node, y)


@lowers("FusedGemm")
def _fused_gemm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return emit_activation(
        e, node, e("Gemm", *node.inputs[:3], **present_attrs(node, "alpha", "beta", "transA", "transB"))
    )


@lowers("NhwcMaxPool")
def _nhwc_max_pool(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """MaxPool of images with channels last: a MaxPool between two transposes."""
    attrs = present_attrs(node, "auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
    rank = node.rank(0)
    x = e("Transpose", node.required(0), perm=(0, rank - 1, *range(1, rank - 1)))
    return emit_output(e, node, "Transpose", e("MaxPool", x, **attrs), perm=(0, *range(2, rank), 1))


@lowers("ExpandDims")
def _expand_dims(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    axis = e("Reshape", e("Cast", node.required(1), to=DType.INT64.onnx_code), e.constant([1], dtype=DType.INT64))
    return emit_output(e, node, "Unsqueeze", node.required(0), axis)


@lowers("FusedMatMul", "TransposeMatMul")
def _scaled_matmul(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """alpha * A @ B, where A and B may have their last two axes transposed; UnsupportedError for other transposes."""
    operands = [_operand(e, node, index, name) for index, name in ((0, "transA"), (1, "transB"))]
    if node.attrs.get("transBatchA") or node.attrs.get("transBatchB"):
        raise UnsupportedError("transposes its batch axes", where=node.where)
    alpha = node.attrs.get("alpha", 1.0)
    if alpha == 1.0:
        return emit_output(e, node, "MatMul", *operands)
    return emit_output(e, node, "Mul", e("MatMul", *operands), constant(e, alpha, operands[0]))


def _operand(e: Emitter, node: OnnxNode, index: int, attribute: str) -> Value:
    if not node.attrs.get(attribute):
        return node.required(index)
    rank = node.rank(index)
    return e("Transpose", node.required(index), perm=(*range(rank - 2), rank - 1, rank - 2))
