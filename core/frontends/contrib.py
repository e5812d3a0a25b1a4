"""Operators of the domain `com.microsoft` that exporters and optimizers write, in terms of ONNX's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from core.errors import UnsupportedError
from core.frontends.opsets import OnnxNode
from core.frontends.scope import Emitter
from core.ir.graph import Value

DOMAIN = "com.microsoft"
_EPSILON = 9.999999960041972e-13  # 1e-12 as float32

Lowering: TypeAlias = Callable[[Emitter, OnnxNode], Sequence[Value]]
_LOWERINGS: dict[str, Lowering] = {}


def find_lowering(op: str) -> Lowering | None:
    """What emits the ONNX form of a contributed operator, and returns the values of its outputs."""
    return _LOWERINGS.get(op)


def _lowers(op: str) -> Callable[[Lowering], Lowering]:
    def add(lowering: Lowering) -> Lowering:
        _LOWERINGS[op] = lowering
        return lowering

    return add


def _last(e: Emitter, node: OnnxNode, op: str, *inputs: Value | None, **attrs: Any) -> list[Value]:
    """The node that gives the first output its name."""
    return e.emit(op, inputs, attrs, node.outputs[:1], node.label)


def _biased(e: Emitter, node: OnnxNode) -> Value:
    """The first input plus the second, where there is one."""
    bias = node.input(1)
    return node.required(0) if bias is None else e("Add", node.required(0), bias)


@_lowers("Gelu")
def _gelu(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return _last(e, node, "Gelu", node.required(0))


@_lowers("BiasGelu")
def _bias_gelu(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return _last(e, node, "Gelu", _biased(e, node))


@_lowers("FastGelu")
def _fast_gelu(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return _last(e, node, "Gelu", _biased(e, node), approximate="tanh")


@_lowers("QuickGelu")
def _quick_gelu(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return _last(e, node, "Swish", node.required(0), alpha=node.attrs.get("alpha", 1.702))


@_lowers("SkipLayerNormalization")
def _skip_layer_norm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """LayerNormalization of input + skip (+ bias); the sum may be an output of its own, the fourth."""
    total = e("Add", node.required(0), node.required(1))
    if (bias := node.input(4)) is not None:
        total = e("Add", total, bias)
    epsilon = node.attrs.get("epsilon", _EPSILON)
    y = _last(e, node, "LayerNormalization", total, node.required(2), node.input(3), epsilon=epsilon)
    return _with_sum(e, node, y, total)


@_lowers("SkipSimplifiedLayerNormalization")
def _skip_rms_norm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    total = e("Add", node.required(0), node.required(1))
    if (bias := node.input(3)) is not None:
        total = e("Add", total, bias)
    y = _last(e, node, "RMSNormalization", total, node.required(2), epsilon=node.attrs.get("epsilon", _EPSILON))
    return _with_sum(e, node, y, total)


def _with_sum(e: Emitter, node: OnnxNode, y: list[Value], total: Value) -> Sequence[Value]:
    """The outputs (normalized, mean, deviation, sum), of which the statistics are for training."""
    if len(node.outputs) < 4:
        return y
    return [*y, total, total, e.emit("Identity", [total], {}, node.outputs[3:4], node.label)[0]]


@_lowers("FusedMatMul")
def _scaled_matmul(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """alpha * A @ B, each possibly with its last two axes exchanged."""
    operands = [_exchanged(e, node, index, name) for index, name in ((0, "transA"), (1, "transB"))]
    if node.attrs.get("transBatchA") or node.attrs.get("transBatchB"):
        raise UnsupportedError("transposes its batch axes", where=node.where)
    alpha = node.attrs.get("alpha", 1.0)
    if alpha == 1.0:
        return _last(e, node, "MatMul", *operands)
    return _last(e, node, "Mul", e("MatMul", *operands), e.constant(alpha, dtype=operands[0].dtype))


def _exchanged(e: Emitter, node: OnnxNode, index: int, attribute: str) -> Value:
    if not node.attrs.get(attribute):
        return node.required(index)
    rank = node.rank(index)
    return e("Transpose", node.required(index), perm=(*range(rank - 2), rank - 1, rank - 2))
