"""Mixtures of experts: layers of which a router picks a few for each token.

All experts are computed for all tokens, as one wide layer; what the router did not pick counts as zero. So tokens stay
apart, whatever the router picks, and the products are as large as they can be; the work is that of all experts.

Letters in shapes: T tokens, H numbers per token, E experts, I numbers inside an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.errors import UnsupportedError
from core.frontends.contrib.quantized import unpacked
from core.frontends.contrib.table import constant, int64s, last, lowers, refuse
from core.frontends.opsets import OnnxNode
from core.frontends.scope import Emitter
from core.ir.graph import Value
from core.ir.types import DType

_BITS = {number: f"fc{number}_expert_weight_bits" for number in (1, 2, 3)}
_LAST_INPUT = 14  # router_weights; what follows is of weights that are floats of few bits
_INTERLEAVED, _BESIDE = 1, 2  # how `swiglu_fusion` says that gates and values lie in the rows of the first layer


@dataclass(frozen=True)
class _Layer:
    """A layer of all experts: weights [E,out,in], bias [E,out]."""

    weight: Value
    bias: Value | None

    def sizes(self, node: OnnxNode) -> tuple[int, int, int]:
        """E, out, in."""
        match self.weight.shape:
            case (int(experts), int(rows), int(columns)):
                return experts, rows, columns
        raise UnsupportedError(f"has weights {self.weight.type}, expected three known extents", where=node.where)


@lowers("MoE")
def _mixture(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Each token through its `k` experts, fc2(activation(fc1(x))), weighted by the router's softmax."""
    first, second, third = (_plain_layer(node, at) for at in (2, 4, 6))
    return _mixed(e, node, first, second, third, None)


@lowers("QMoE")
def _quantized_mixture(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """The same with weights of 4 or 8 bits, which have a scale per row or block; `router_weights` may weigh the experts
    that `router_probs` picks."""
    kind = node.attrs.get("quant_type", "int")
    if kind != "int" or any(value is not None for value in node.inputs[_LAST_INPUT + 1 :]):
        raise UnsupportedError(f"quant_type is {kind!r}, expected 'int', without scales of floats", where=node.where)
    if node.attrs.get("weights_prepacked", -1) == 1:
        raise UnsupportedError("has weights in the order of one engine: weights_prepacked is 1", where=node.where)
    first, second, third = (_packed_layer(e, node, number) for number in (1, 2, 3))
    return _mixed(e, node, first, second, third, node.input(_LAST_INPUT))


def _plain_layer(node: OnnxNode, at: int) -> _Layer | None:
    weight = node.input(at)
    return None if weight is None else _Layer(weight, node.input(at + 1))


def _packed_layer(e: Emitter, node: OnnxNode, number: int) -> _Layer | None:
    """The layer fc1, fc2 or fc3, as floats."""
    at = 3 * number - 1
    weight, scales, points = node.input(at), node.input(at + 1), node.input(10 + number)
    if weight is None:
        return None
    given: dict[str, Any] = {"expert_weight_bits": 4, **node.attrs}
    bits = given.get(_BITS[number], given["expert_weight_bits"])
    packed, zeros = e.value_of(weight), e.value_of(points)
    if packed is None or scales is None or (points is not None and zeros is None) or bits not in (4, 8):
        raise UnsupportedError(f"needs constant weights of 4 or 8 bits with scales as fc{number}", where=node.where)
    numbers = unpacked(packed, bits)
    experts, rows, columns = numbers.shape
    blocks = scales.shape[-1] if scales.tensor.rank == 3 else 1
    if not isinstance(blocks, int) or columns % blocks:
        raise UnsupportedError(f"has scales {scales.type} for rows of {columns} numbers", where=node.where)
    scale = e("Reshape", scales, int64s(e, experts, rows, blocks, 1))
    whole = e("Cast", e.constant(numbers.reshape(experts, rows, blocks, -1)), to=scales.dtype.onnx_code)
    zero = constant(e, 1 << (bits - 1), scale)
    if zeros is not None:
        shape = (experts, rows, blocks, 1)
        per_row = scales.tensor.rank == 3
        zero = constant(e, unpacked(zeros, bits)[..., : blocks if per_row else rows].reshape(shape), scale)
    dense = e("Reshape", e("Mul", e("Sub", whole, zero), scale), int64s(e, experts, rows, columns))
    return _Layer(dense, node.input(at + 2))


def _mixed(
    e: Emitter,
    node: OnnxNode,
    first: _Layer | None,
    second: _Layer | None,
    third: _Layer | None,
    weights: Value | None,
) -> list[Value]:
    """The node's output. `third` makes the values of gates where `first` makes the gates alone."""
    refuse(node, "use_sparse_mixer", "swiglu_limit_after_activation")
    if first is None or second is None:
        raise UnsupportedError("has no weights of fc1 or fc2", where=node.where)
    x = node.required(0)
    _, hidden, inside = second.sizes(node)
    experts = first.sizes(node)[0]
    tokens = e("Reshape", x, int64s(e, -1, hidden)) if node.rank(0) == 3 else x
    shares = _shares(e, node, weights)
    shares3 = e("Unsqueeze", shares, int64s(e, 2))
    inner = _activated(e, node, tokens, first, third)
    zero = constant(e, 0.0, x)
    chosen = e("Where", e("Equal", shares3, zero), zero, e("Mul", inner, shares3))
    flat = e("Reshape", chosen, int64s(e, -1, experts * inside))
    wide = e("Reshape", e("Transpose", second.weight, perm=(0, 2, 1)), int64s(e, experts * inside, hidden))
    y = e("MatMul", flat, wide)
    if second.bias is not None:
        y = e("Add", y, e("MatMul", shares, second.bias))
    return last(e, node, "Reshape", y, e("Shape", x))


def _shares(e: Emitter, node: OnnxNode, weights: Value | None) -> Value:
    """The share of each expert in each token's result, [T,E]: zero but for the `k` that the router scores highest.
    A share is the softmax among all experts, or with `normalize_routing_weights` among the chosen ones; or it is what
    `weights` say, which that attribute divides by their sum."""
    scores, count = node.required(1), node.attrs.get("k", 1)
    names = [e.session.fresh(f"{node.label}.{name}") for name in ("best", "chosen")]
    best, chosen = e.emit("TopK", [scores, e.constant([count])], {"axis": -1}, names, node.label)
    normalized = bool(node.attrs.get("normalize_routing_weights"))
    if weights is not None:
        given = e("GatherElements", weights, chosen, axis=1)
        total = e("ReduceSum", given, int64s(e, 1), keepdims=1)
        shares = e("Div", given, total) if normalized else given
    elif normalized:
        shares = e("Softmax", best, axis=-1)
    else:
        shares = e("GatherElements", e("Softmax", scores, axis=-1), chosen, axis=1)
    nothing = e("Expand", constant(e, 0.0, scores), e("Shape", scores))
    return e("ScatterElements", nothing, chosen, shares, axis=1)


def _activated(e: Emitter, node: OnnxNode, x: Value, first: _Layer, third: _Layer | None) -> Value:
    """Return the inputs of the experts' second layers: the activated outputs of the first ones, [T,E,I]."""
    kind: Any = node.attrs.get("activation_type", "relu")
    if kind != "swiglu":
        if third is not None:
            message = f"activation_type is {kind!r} with a third layer, expected 'swiglu'"
            raise UnsupportedError(message, where=node.where)
        return _simple(e, node, kind, _through(e, node, x, first))
    gates, values = (_through(e, node, x, layer) for layer in _gate_and_value(e, node, first, third))
    limit: Any = node.attrs.get("swiglu_limit")
    if limit is not None:
        gates = e("Min", gates, constant(e, limit, x))
        values = e("Clip", values, constant(e, -limit, x), constant(e, limit, x))
    opened = e("Swish", gates, alpha=node.attrs.get("activation_alpha", 1.0))
    return e("Mul", opened, e("Add", values, constant(e, node.attrs.get("activation_beta", 0.0), x)))


def _simple(e: Emitter, node: OnnxNode, kind: str, y: Value) -> Value:
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
    """The layers of gates and of values, which `swiglu_fusion` may have put into one."""
    fusion = node.attrs.get("swiglu_fusion", 0)
    if third is not None and fusion == 0:
        return first, third
    if third is not None or fusion not in (_INTERLEAVED, _BESIDE):
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


def _through(e: Emitter, node: OnnxNode, x: Value, layer: _Layer) -> Value:
    """x [T,in] through a layer of all experts: [T,E,out]."""
    experts, rows, columns = layer.sizes(node)
    weight = e("Transpose", e("Reshape", layer.weight, int64s(e, experts * rows, columns)), perm=(1, 0))
    y = e("MatMul", x, weight)
    if layer.bias is not None:
        y = e("Add", y, e("Reshape", layer.bias, int64s(e, experts * rows)))
    return e("Reshape", y, int64s(e, -1, experts, rows))


@lowers("MoEGroupRouter")
def _router(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Scores for MoE or QMoE: the logarithm of the sigmoid of each chosen expert, `router_sentinel` for the others.

    The experts of a token are the best of a few groups, by sigmoid plus bias; a group counts as much as its best ones.
    With outputs 1 and 2 the node gives those sums and sigmoids of all experts instead.
    """
    if node.input(2) is not None:
        raise UnsupportedError("projects its tokens itself: input 2 (projection_weight)", where=node.where)
    logits, bias = node.required(0), node.required(1)
    experts = bias.shape[0]
    if not isinstance(experts, int):
        raise UnsupportedError("needs to know the number of experts", where=node.where)
    plain = e("Sigmoid", e("Reshape", logits, int64s(e, -1, experts)))
    scores = e("Add", plain, bias)
    if len(node.outputs) > 1:
        pair = zip((scores, plain), node.outputs[1:3], strict=False)
        return [plain, *(e.emit("Identity", [value], {}, [name], node.label)[0] for value, name in pair)]
    chosen = _best(e, node, _in_best_groups(e, node, scores, experts), int(_given(node, "top_k", 1)))
    logs = e("Log", e("Max", plain, constant(e, 1e-20, plain)))
    return last(e, node, "Where", chosen, logs, constant(e, _given(node, "router_sentinel", -10000.0), plain))


def _given(node: OnnxNode, name: str, preset: float) -> Any:
    return node.attrs.get(name, preset)


def _in_best_groups(e: Emitter, node: OnnxNode, scores: Value, experts: int) -> Value:
    """The scores [T,E] of the `topk_group` best groups; those of other experts are below all."""
    count, kept = int(_given(node, "n_group", 1)), int(_given(node, "topk_group", 1))
    if kept >= count:
        return scores
    size = experts // count
    parts = e("Reshape", scores, int64s(e, -1, count, size))
    names = [e.session.fresh(f"{node.label}.group{index}") for index in range(2)]
    most = min(int(_given(node, "group_topk", 2)), size)
    best, _ = e.emit("TopK", [parts, int64s(e, most)], {"axis": -1}, names, node.label)
    within = _best(e, node, e("ReduceSum", best, int64s(e, -1), keepdims=0), kept)
    parts = e("Where", e("Unsqueeze", within, int64s(e, 2)), parts, constant(e, -np.inf, scores))
    return e("Reshape", parts, int64s(e, -1, experts))


def _best(e: Emitter, node: OnnxNode, scores: Value, count: int) -> Value:
    """Which of each row's scores are among the `count` best, as bool."""
    names = [e.session.fresh(f"{node.label}.best{index}") for index in range(2)]
    _, places = e.emit("TopK", [scores, int64s(e, count)], {"axis": -1}, names, node.label)
    shape = e("Shape", scores)
    zeros, ones = (e("Expand", constant(e, number, scores), shape) for number in (0.0, 1.0))
    picked = e("GatherElements", ones, places, axis=1)
    return e("Cast", e("ScatterElements", zeros, places, picked, axis=1), to=DType.BOOL.onnx_code)
