"""Experimental operators that the ONNX standard has removed. ONNX Runtime still runs them, and old files use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lathe.core.errors import ModelError
from lathe.core.frontends.contrib.lowering_table import constant, emit_output, int64s, lowers
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Value

_EXPERIMENTAL = ""


def _number(e: Emitter, node: OnnxNode, name: str, preset: float) -> Value:
    """The attribute `name`, or `preset` if it is absent, as a constant of the node's input element type."""
    return constant(e, node.attrs.get(name, preset), node.required(0))


@lowers("Affine", domain=_EXPERIMENTAL)
def _affine(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    scaled = e("Mul", node.required(0), _number(e, node, "alpha", 1.0))
    return emit_output(e, node, "Add", scaled, _number(e, node, "beta", 0.0))


@lowers("ScaledTanh", domain=_EXPERIMENTAL)
def _scaled_tanh(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """alpha * tanh(beta * x)"""
    y = e("Tanh", e("Mul", node.required(0), _number(e, node, "beta", 1.0)))
    return emit_output(e, node, "Mul", y, _number(e, node, "alpha", 1.0))


@lowers("ParametricSoftplus", domain=_EXPERIMENTAL)
def _parametric_softplus(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """alpha * log(1 + exp(beta * x))"""
    y = e("Softplus", e("Mul", node.required(0), _number(e, node, "beta", 1.0)))
    return emit_output(e, node, "Mul", y, _number(e, node, "alpha", 1.0))


@lowers("Scale", domain=_EXPERIMENTAL)
def _scale(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return emit_output(e, node, "Mul", node.required(0), _number(e, node, "scale", 1.0))


@lowers("ImageScaler", domain=_EXPERIMENTAL)
def _image_scaler(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Images [N,C,H,W] times the attribute `scale`, plus the number for each channel in the attribute `bias`."""
    bias: Any = node.attrs.get("bias", ())
    shift = constant(e, [[[number]] for number in bias], node.required(0))
    return emit_output(e, node, "Add", e("Mul", node.required(0), _number(e, node, "scale", 1.0)), shift)


@lowers("Crop", domain=_EXPERIMENTAL)
def _crop(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Images [N,C,H,W] without the numbers of pixels in `border` (left, top, right, bottom).

    With the attribute `scale` (height, width), the result has this size and begins after left and top; right and bottom
    are ignored. ModelError for other numbers of elements.
    """
    border: Any = node.attrs.get("border", ())
    size: Any = node.attrs.get("scale", ())
    if len(border) != 4 or len(size) not in (0, 2):
        message = f"border is {list(border)}, scale {list(size)}: expected four and two numbers"
        raise ModelError(message, where=node.where)
    left, top, right, bottom = border
    starts = int64s(e, top, left)
    if size:
        ends = int64s(e, top + size[0], left + size[1])
    else:
        ends = e("Sub", e("Shape", node.required(0), start=2, end=4), int64s(e, bottom, right))
    return emit_output(e, node, "Slice", node.required(0), starts, ends, int64s(e, 2, 3))


@lowers("DynamicSlice", domain=_EXPERIMENTAL)
def _dynamic_slice(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return emit_output(e, node, "Slice", *node.inputs)
