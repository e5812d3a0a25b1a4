"""Fused normalizations and gates of recent decoder models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.contrib.lowering_table import constant, emit_output, int64s, lowers
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Value

_EPSILON = 9.999999747378752e-06  # 1e-5 as float32


def _grouped_rms(e: Emitter, node: OnnxNode, x: Value, scale: Value) -> Value:
    """RMSNormalization of groups of the last axis, [..,G,C], where C is the number of elements of `scale`."""
    size = scale.shape[-1]
    if not isinstance(size, int):
        raise UnsupportedError(f"has a scale {scale.type}, expected a known extent", where=node.where)
    groups = e("Reshape", x, int64s(e, *(0,) * (x.tensor.rank - 1), -1, size))
    return e("RMSNormalization", groups, scale, epsilon=node.attrs.get("epsilon", _EPSILON))


@lowers("GatedRMSNorm")
def _gated_norm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """RMSNormalization of groups of the last axis, times silu or sigmoid (attribute `activation`) of a gate."""
    x, gate = node.required(0), node.required(2)
    kind: Any = node.attrs.get("activation", "silu")
    if kind not in ("silu", "swish", "sigmoid"):
        raise UnsupportedError(f"activation is {kind!r}, expected silu, swish or sigmoid", where=node.where)
    y = e("Reshape", _grouped_rms(e, node, x, node.required(1)), e("Shape", x))
    return emit_output(e, node, "Mul", y, e("Sigmoid" if kind == "sigmoid" else "Swish", gate))


@lowers("BranchwiseRMSNorm")
def _norm_of_branches(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """RMSNormalization of the last axis; with `num_branches`, of each of that number of equal parts of the axis.

    The optional scale has the size of one part, or of the whole axis.
    """
    x, scale = node.required(0), node.input(1)
    branches: Any = node.attrs.get("num_branches", 0)
    parts = e("Reshape", x, int64s(e, *(0,) * (x.tensor.rank - 1), branches, -1)) if branches else x
    size = parts.shape[-1]
    if not isinstance(size, int):
        raise UnsupportedError("needs to know the size of a branch", where=node.where)
    ones = e("Expand", constant(e, 1.0, x), int64s(e, size))
    y = e("RMSNormalization", parts, ones, epsilon=node.attrs.get("epsilon", _EPSILON))
    if scale is not None:
        y = e("Mul", y, e("Reshape", e("Cast", scale, to=x.dtype.onnx_code), int64s(e, -1, size)))
    return emit_output(e, node, "Reshape", y, e("Shape", x))


@lowers("GatedAdd")
def _gated_add(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """X + Y * gate, by ONNX broadcasting. UnsupportedError if the gate is to be computed from a `gate_weight`."""
    if node.input(3) is not None:
        raise UnsupportedError("computes its gate by weights: input 3 (gate_weight)", where=node.where)
    return emit_output(e, node, "Add", node.required(0), e("Mul", node.required(1), node.required(2)))


@lowers("ScaledSiLU")
def _scaled_silu(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """z * sigmoid(z) for z = scale * x, where the scale is an input or the attribute `alpha`."""
    x, scale = node.required(0), node.input(1)
    factor = constant(e, node.attrs.get("alpha", 1.0), x) if scale is None else e("Cast", scale, to=x.dtype.onnx_code)
    return emit_output(e, node, "Swish", e("Mul", x, factor))


@lowers("LinearAttentionGate")
def _decay_and_rate(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Output 0, the decay, is decay_scale * softplus(a + dt_bias); output 1, the rate, is sigmoid(b)."""
    decay = e("Softplus", e("Add", node.required(0), node.required(1)))
    found = emit_output(e, node, "Mul", decay, node.required(2))
    if len(node.outputs) < 2:
        return found
    return [*found, e.emit("Sigmoid", [node.required(3)], {}, node.outputs[1:2], node.label)[0]]
