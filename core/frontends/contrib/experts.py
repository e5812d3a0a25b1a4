"""Mixtures of experts: for each token, a router selects a few of the layers (experts).

All experts are computed for all tokens, as one wide layer, and results of experts that were not selected are multiplied
by zero. So tokens remain independent whatever the router selects, and matrix products are as large as possible; the
work is that of all experts.

Letters in shapes: T tokens, H elements per token, E experts, I elements inside an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.contrib.lowering_table import constant, emit_output, int64s, lowers, refuse_attributes
from lathe.core.frontends.contrib.quantized import unpack
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Value
from lathe.core.ir.types import DType

_BITS = {number: f"fc{number}_expert_weight_bits" for number in (1, 2, 3)}
_LAST_INPUT = 14  # router_weights; later inputs belong to weights in narrow floating-point types
_INTERLEAVED, _CONCATENATED = 1, 2  # `swiglu_fusion`: the order of gate and value rows in the first layer


@dataclass(frozen=True)
class _Layer:
    """One linear layer of all E experts: weight [E,out,in], bias [E,out] or None."""

    weight: Value
    bias: Value | None

    def sizes(self, node: OnnxNode) -> tuple[int, int, int]:
        """The extents E, out and in of the weight. UnsupportedError if they are unknown."""
        match self.weight.shape:
            case (int(experts), int(rows), int(columns)):
                return experts, rows, columns
        raise UnsupportedError(f"has weights {self.weight.type}, expected three known extents", where=node.where)


@lowers("MoE")
def _mixture(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """MoE: for each token, the sum of `k` selected experts fc2(activation(fc1(x))) times `_routing_weights`."""
    first, second, third = (_float_layer(node, at) for at in (2, 4, 6))
    return _mixture_output(e, node, first, second, third, None)


@lowers("QMoE")
def _quantized_mixture(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """QMoE: MoE with constant weights of 4 or 8 bits, which have a scale per row or per block of a row.

    The input `router_weights`, if present, has the weights with which the experts are summed; `router_probs` then only
    selects the experts.
    """
    kind = node.attrs.get("quant_type", "int")
    if kind != "int" or any(value is not None for value in node.inputs[_LAST_INPUT + 1 :]):
        raise UnsupportedError(f"quant_type is {kind!r}, expected 'int', without scales of floats", where=node.where)
    if node.attrs.get("weights_prepacked", -1) == 1:
        raise UnsupportedError("has weights in the order of one engine: weights_prepacked is 1", where=node.where)
    first, second, third = (_dequantized_layer(e, node, number) for number in (1, 2, 3))
    return _mixture_output(e, node, first, second, third, node.input(_LAST_INPUT))


def _float_layer(node: OnnxNode, at: int) -> _Layer | None:
    weight = node.input(at)
    return None if weight is None else _Layer(weight, node.input(at + 1))


def _dequantized_layer(e: Emitter, node: OnnxNode, number: int) -> _Layer | None:
    """Layer fc1, fc2 or fc3 (`number`) of all experts, with dequantized weight; None if the node has no such layer.

    UnsupportedError unless weights and zero points are constants of 4 or 8 bits, with scales per row or block.
    """
    at = 3 * number - 1
    weight, scales, points = node.input(at), node.input(at + 1), node.input(10 + number)
    if weight is None:
        return None
    given: dict[str, Any] = {"expert_weight_bits": 4, **node.attrs}
    bits = given.get(_BITS[number], given["expert_weight_bits"])
    packed, zeros = e.value_of(weight), e.value_of(points)
    if packed is None or scales is None or (points is not None and zeros is None) or bits not in (4, 8):
        raise UnsupportedError(f"needs constant weights of 4 or 8 bits with scales as fc{number}", where=node.where)
    numbers = unpack(packed, bits)
    experts, rows, columns = numbers.shape
    blocks = scales.shape[-1] if scales.tensor.rank == 3 else 1
    if not isinstance(blocks, int) or columns % blocks:
        raise UnsupportedError(f"has scales {scales.type} for rows of {columns} numbers", where=node.where)
    scale = e("Reshape", scales, int64s(e, experts, rows, blocks, 1))
    integers = e("Cast", e.constant(numbers.reshape(experts, rows, blocks, -1)), to=scales.dtype.onnx_code)
    zero = constant(e, 1 << (bits - 1), scale)
    if zeros is not None:
        shape = (experts, rows, blocks, 1)
        has_blocks = scales.tensor.rank == 3
        zero = constant(e, unpack(zeros, bits)[..., : blocks if has_blocks else rows].reshape(shape), scale)
    dense = e("Reshape", e("Mul", e("Sub", integers, zero), scale), int64s(e, experts, rows, columns))
    return _Layer(dense, node.input(at + 2))


def _mixture_output(
    e: Emitter,
    node: OnnxNode,
    first: _Layer | None,
    second: _Layer | None,
    third: _Layer | None,
    weights: Value | None,
) -> list[Value]:
    """The output of MoE or QMoE, from layers fc1, fc2 and fc3 of all experts.

    `weights` [T,E], if present, replace the softmax of the router's scores as the experts' weights. With `third`,
    `first` computes the gates only, and `third` the values that they multiply.
    """
    refuse_attributes(node, "use_sparse_mixer", "swiglu_limit_after_activation")
    if first is None or second is None:
        raise UnsupportedError("has no weights of fc1 or fc2", where=node.where)
    x = node.required(0)
    _, hidden, inside = second.sizes(node)
    experts = first.sizes(node)[0]
    tokens = e("Reshape", x, int64s(e, -1, hidden)) if node.rank(0) == 3 else x
    routing = _routing_weights(e, node, weights)
    routing3 = e("Unsqueeze", routing, int64s(e, 2))
    inner = _expert_activations(e, node, tokens, first, third)
    zero = constant(e, 0.0, x)
    weighted = e("Where", e("Equal", routing3, zero), zero, e("Mul", inner, routing3))
    flat = e("Reshape", weighted, int64s(e, -1, experts * inside))
    wide = e("Reshape", e("Transpose", second.weight, perm=(0, 2, 1)), int64s(e, experts * inside, hidden))
    y = e("MatMul", flat, wide)
    if second.bias is not None:
        y = e("Add", y, e("MatMul", routing, second.bias))
    return emit_output(e, node, "Reshape", y, e("Shape", x))


def _routing_weights(e: Emitter, node: OnnxNode, weights: Value | None) -> Value:
    """The weight of each expert in each token's result, [T,E]: zero except for the `k` with the highest router scores.

    By default it is the softmax of the scores over all experts, or over the selected ones if the attribute
    `normalize_routing_weights` is set. `weights` [T,E] replace the softmax; that attribute then divides the selected
    ones by their sum.
    """
    scores, count = node.required(1), node.attrs.get("k", 1)
    names = [e.session.fresh(f"{node.label}.{name}") for name in ("best", "chosen")]
    best, chosen = e.emit("TopK", [scores, e.constant([count])], {"axis": -1}, names, node.label)
    is_normalized = bool(node.attrs.get("normalize_routing_weights"))
    if weights is not None:
        selected = e("GatherElements", weights, chosen, axis=1)
        total = e("ReduceSum", selected, int64s(e, 1), keepdims=1)
        routing = e("Div", selected, total) if is_normalized else selected
    elif is_normalized:
        routing = e("Softmax", best, axis=-1)
    else:
        routing = e("GatherElements", e("Softmax", scores, axis=-1), chosen, axis=1)
    zeros = e("Expand", constant(e, 0.0, scores), e("Shape", scores))
    return e("ScatterElements", zeros, chosen, routing, axis=1)


def _expert_activations(e: Emitter, node: OnnxNode, x: Value, first: _Layer, third: _Layer | None) -> Value:
    """The outputs [T,E,I] of the first layers of all experts after the activation, for tokens x [T,H].

    With the activation "swiglu" it is swish(gate) * (value + `activation_beta`), where `_gate_and_value` gives the
    layers of gate and value.
    """
    kind: Any = node.attrs.get("activation_type", "relu")
    if kind != "swiglu":
        if third is not None:
            message = f"activation_type is {kind!r} with a third layer, expected 'swiglu'"
            raise UnsupportedError(message, where=node.where)
        return _activation(e, node, kind, _apply_layer(e, node, x, first))
    gates, values = (_apply_layer(e, node, x, layer) for layer in _gate_and_value(e, node, first, third))
    limit: Any = node.attrs.get("swiglu_limit")
    if limit is not None:
        gates = e("Min", gates, constant(e, limit, x))
        values = e("Clip", values, constant(e, -limit, x), constant(e, limit, x))
    swish = e("Swish", gates, alpha=node.attrs.get("activation_alpha", 1.0))
    return e("Mul", swish, e("Add", values, constant(e, node.attrs.get("activation_beta", 0.0), x)))


def _activation(e: Emitter, node: OnnxNode, kind: str, y: Value) -> Value:
    match kind:
        case "relu":
            return e("Relu", y)
        case "gelu":
            return e("Gelu", y, approximate="tanh")
        case "silu":
            return e("Swish", y)
        case "identity":
            return y
    message = f"activation_type is {kind!r}, expected relu, gelu, silu, swiglu or identity"
    raise UnsupportedError(message, where=node.where)


def _gate_and_value(e: Emitter, node: OnnxNode, first: _Layer, third: _Layer | None) -> tuple[_Layer, _Layer]:
    """The layers that compute gates and values for SwiGLU: `first` and `third`, or the two halves of `first`.

    Without `third`, `first` has the rows of both: alternating if `swiglu_fusion` is 1, gates first if it is 2. With
    `third`, `swiglu_fusion` must be 0. UnsupportedError for other combinations.
    """
    fusion = node.attrs.get("swiglu_fusion", 0)
    if third is not None and fusion == 0:
        return first, third
    if third is not None or fusion not in (_INTERLEAVED, _CONCATENATED):
        message = f"swiglu_fusion is {fusion!r} {'without' if third is None else 'with'} a third layer"
        raise UnsupportedError(message, where=node.where)
    experts, rows, columns = first.sizes(node)
    pair = (rows // 2, 2) if fusion == _INTERLEAVED else (2, rows // 2)
    axis = 2 if fusion == _INTERLEAVED else 1

    def part(x: Value, index: int, *tail: int) -> Value:
        return e("Gather", e("Reshape", x, int64s(e, experts, *pair, *tail)), e.constant(np.int64(index)), axis=axis)

    gate, value = (
        _Layer(part(first.weight, index, columns), None if first.bias is None else part(first.bias, index))
        for index in (0, 1)
    )
    return gate, value


def _apply_layer(e: Emitter, node: OnnxNode, x: Value, layer: _Layer) -> Value:
    """The results [T,E,out] of a layer of all experts, bias included, for x [T,in]."""
    experts, rows, columns = layer.sizes(node)
    weight = e("Transpose", e("Reshape", layer.weight, int64s(e, experts * rows, columns)), perm=(1, 0))
    y = e("MatMul", x, weight)
    if layer.bias is not None:
        y = e("Add", y, e("Reshape", layer.bias, int64s(e, experts * rows)))
    return e("Reshape", y, int64s(e, -1, experts, rows))


@lowers("MoEGroupRouter")
def _router(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """MoEGroupRouter: the logarithm of the sigmoid for each selected expert, `router_sentinel` for the others.

    The `top_k` experts with the highest sigmoid plus bias are selected, among those of the `topk_group` best groups;
    the score of a group is the sum over its `group_topk` best experts. If the node has further outputs, output 0 has
    the sigmoids of all experts instead, output 1 sigmoid plus bias, and output 2 the sigmoids again.
    """
    if node.input(2) is not None:
        raise UnsupportedError("projects its tokens itself: input 2 (projection_weight)", where=node.where)
    logits, bias = node.required(0), node.required(1)
    experts = bias.shape[0]
    if not isinstance(experts, int):
        raise UnsupportedError("needs to know the number of experts", where=node.where)
    sigmoids = e("Sigmoid", e("Reshape", logits, int64s(e, -1, experts)))
    scores = e("Add", sigmoids, bias)
    if len(node.outputs) > 1:
        pair = zip((scores, sigmoids), node.outputs[1:3], strict=False)
        return [sigmoids, *(e.emit("Identity", [value], {}, [name], node.label)[0] for value, name in pair)]
    chosen = _is_in_top(e, node, _mask_groups(e, node, scores, experts), int(_attr(node, "top_k", 1)))
    logs = e("Log", e("Max", sigmoids, constant(e, 1e-20, sigmoids)))
    return emit_output(e, node, "Where", chosen, logs, constant(e, _attr(node, "router_sentinel", -10000.0), sigmoids))


def _attr(node: OnnxNode, name: str, default: float) -> Any:
    return node.attrs.get(name, default)


def _mask_groups(e: Emitter, node: OnnxNode, scores: Value, experts: int) -> Value:
    """The scores [T,E], with -infinity for experts outside the `topk_group` best of the `n_group` equal groups.

    The score of a group is the sum of its `group_topk` (default 2) highest scores.
    """
    count, selected = int(_attr(node, "n_group", 1)), int(_attr(node, "topk_group", 1))
    if selected >= count:
        return scores
    size = experts // count
    parts = e("Reshape", scores, int64s(e, -1, count, size))
    names = [e.session.fresh(f"{node.label}.group{index}") for index in range(2)]
    most = min(int(_attr(node, "group_topk", 2)), size)
    best, _ = e.emit("TopK", [parts, int64s(e, most)], {"axis": -1}, names, node.label)
    is_selected = _is_in_top(e, node, e("ReduceSum", best, int64s(e, -1), keepdims=0), selected)
    parts = e("Where", e("Unsqueeze", is_selected, int64s(e, 2)), parts, constant(e, -np.inf, scores))
    return e("Reshape", parts, int64s(e, -1, experts))


def _is_in_top(e: Emitter, node: OnnxNode, scores: Value, count: int) -> Value:
    """Whether each of the scores, a matrix, is among the `count` highest of its row: bool of the same shape."""
    names = [e.session.fresh(f"{node.label}.best{index}") for index in range(2)]
    _, indices = e.emit("TopK", [scores, int64s(e, count)], {"axis": -1}, names, node.label)
    shape = e("Shape", scores)
    zeros, ones = (e("Expand", constant(e, number, scores), shape) for number in (0.0, 1.0))
    updates = e("GatherElements", ones, indices, axis=1)
    return e("Cast", e("ScatterElements", zeros, indices, updates, axis=1), to=DType.BOOL.onnx_code)
