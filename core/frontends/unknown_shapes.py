"""Lowerings, for inputs of unknown shape, of ONNX operators whose function bodies need shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from lathe.core.errors import ModelError
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Value
from lathe.core.ir.types import Dim, DType

Lowering: TypeAlias = Callable[[Emitter, OnnxNode], Sequence[Value]]

_ACTIVATIONS = {"none": False, "silu": True, "swish": True}


def lowering_without_shapes(domain: str, op: str) -> Lowering | None:
    """The function that lowers an operator with inputs of unknown shape and returns the outputs; None if none does."""
    return _LOWERINGS.get(op) if domain == "" else None


def with_rank(e: Emitter, x: Value, rank: int) -> Value:
    """`x`, whose rank is unknown, as a value of this rank. A run in which `x` has another rank fails."""
    shape = e("Reshape", e("Shape", x), e.constant([rank], dtype=DType.INT64))
    return e("Reshape", x, shape, allowzero=1)


def _causal_conv(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """CausalConvWithState: the state [B,C,k-1] followed by x [B,C,T], each channel convolved with its row of W [C,1,k].

    Outputs: y [B,C,T], and the last k-1 positions, which are the next state. ONNX's function body is a Conv with C
    groups. If C is unknown, the convolution is a sum over windows, a tensor [B,C,T,k].
    """
    x, w, bias = with_rank(e, node.required(0), 3), with_rank(e, node.required(1), 3), node.input(2)
    activation: Any = node.attrs.get("activation", "none")
    if activation not in _ACTIVATIONS:
        message = f"activation is {activation!r}, expected one of {', '.join(_ACTIVATIONS)}"
        raise ModelError(message, where=node.where)
    state_length = e("Sub", e("Shape", w, start=2, end=3), _vector(e, 1))
    past = node.input(3)
    if past is None:
        shape = e("Concat", e("Shape", x, start=0, end=2), state_length, axis=0)
        past = e("ConstantOfShape", shape, value=np.zeros(1, x.dtype.numpy))
    padded = e("Concat", past, x, axis=2)
    channels = _channels(node)
    if channels is None:
        y = _conv_by_windows(e, x, padded, w, bias)
    else:
        y = e("Conv", padded, w, bias, group=channels)
    if _ACTIVATIONS[activation]:
        y = e("Cast", y, to=DType.FLOAT32.onnx_code)
        y = e("Mul", y, e("Sigmoid", y))
    results = e.emit("Cast", [y], {"to": x.dtype.onnx_code}, node.outputs[:1], node.label)
    end = e("Shape", padded, start=2, end=3)
    state = [padded, e("Sub", end, state_length), end, _vector(e, 2)]
    return [*results, *(e.emit("Slice", state, {}, [name], node.label)[0] for name in node.outputs[1:2])]


def _channels(node: OnnxNode) -> int | None:
    """The number of channels: axis 1 of input 0, or axis 0 of the weight (input 1); None if neither is known."""
    for index, axis in ((0, 1), (1, 0)):
        shape: tuple[Dim, ...] = node.required(index).tensor.shape or ()
        extent = shape[axis] if len(shape) == 3 else None
        if isinstance(extent, int):
            return extent
    return None


def _conv_by_windows(e: Emitter, x: Value, padded: Value, w: Value, bias: Value | None) -> Value:
    """The depthwise convolution of `padded` with `w` as a sum over its windows, in float32; `x` gives their number."""
    starts, offsets = _range(e, e("Shape", x, start=2, end=3)), _range(e, e("Shape", w, start=2, end=3))
    indices = e("Add", e("Unsqueeze", starts, _vector(e, 1)), offsets)
    windows, weight = (_float32(e, value) for value in (e("Gather", padded, indices, axis=2), w))
    y = e("ReduceSum", e("Mul", windows, weight), _vector(e, -1), keepdims=0)
    return y if bias is None else e("Add", y, e("Unsqueeze", _float32(e, bias), _vector(e, 1)))


def _range(e: Emitter, count: Value) -> Value:
    """The integers from 0 to `count` - 1, for a `count` of type int64[1]."""
    zero, one = (e.constant(number, dtype=DType.INT64) for number in (0, 1))
    return e("Range", zero, e("Squeeze", count), one)


def _float32(e: Emitter, x: Value) -> Value:
    return e("Cast", x, to=DType.FLOAT32.onnx_code)


def _vector(e: Emitter, number: int) -> Value:
    return e.constant([number], dtype=DType.INT64)


_LOWERINGS: dict[str, Lowering] = {"CausalConvWithState": _causal_conv}
