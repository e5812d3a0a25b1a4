"""ONNX operators whose function bodies need shapes, in a form that does without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from core.errors import ModelError
from core.frontends.opsets import OnnxNode
from core.frontends.scope import Emitter
from core.ir.graph import Value
from core.ir.types import Dim, DType

Lowering: TypeAlias = Callable[[Emitter, OnnxNode], Sequence[Value]]

_ACTIVATIONS = {"none": False, "silu": True, "swish": True}


def shapeless(domain: str, op: str) -> Lowering | None:
    """What emits an operator whose inputs have unknown shapes, and returns the values of its outputs."""
    return _LOWERINGS.get(op) if domain == "" else None


def of_rank(e: Emitter, x: Value, rank: int) -> Value:
    """`x`, whose rank is not known, as a value of this rank; a run in which it has another one fails."""
    shape = e("Reshape", e("Shape", x), e.constant([rank], dtype=DType.INT64))
    return e("Reshape", x, shape, allowzero=1)


def _causal_conv(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """CausalConvWithState: x [B,C,T] behind a state [B,C,k-1], each channel convolved with its row of W [C,1,k].

    Outputs: y [B,C,T] and the last k-1 positions, which are the next state. ONNX's body is a Conv with C groups. Where
    C is not known, the windows of the convolution are a tensor [B,C,T,k].
    """
    x, w, bias = of_rank(e, node.required(0), 3), of_rank(e, node.required(1), 3), node.input(2)
    activation: Any = node.attrs.get("activation", "none")
    if activation not in _ACTIVATIONS:
        message = f"activation is {activation!r}, expected one of {', '.join(_ACTIVATIONS)}"
        raise ModelError(message, where=node.where)
    kept = e("Sub", e("Shape", w, start=2, end=3), _vector(e, 1))
    past = node.input(3)
    if past is None:
        shape = e("Concat", e("Shape", x, start=0, end=2), kept, axis=0)
        past = e("ConstantOfShape", shape, value=np.zeros(1, x.dtype.numpy))
    padded = e("Concat", past, x, axis=2)
    channels = _channels(node)
    if channels is None:
        y = _summed_windows(e, x, padded, w, bias)
    else:
        y = e("Conv", padded, w, bias, group=channels)
    if _ACTIVATIONS[activation]:
        y = e("Cast", y, to=DType.FLOAT32.onnx_code)
        y = e("Mul", y, e("Sigmoid", y))
    results = e.emit("Cast", [y], {"to": x.dtype.onnx_code}, node.outputs[:1], node.label)
    end = e("Shape", padded, start=2, end=3)
    state = [padded, e("Sub", end, kept), end, _vector(e, 2)]
    return [*results, *(e.emit("Slice", state, {}, [name], node.label)[0] for name in node.outputs[1:2])]


def _channels(node: OnnxNode) -> int | None:
    """The number of channels, which the input and the weight show."""
    for index, axis in ((0, 1), (1, 0)):
        shape: tuple[Dim, ...] = node.required(index).tensor.shape or ()
        extent = shape[axis] if len(shape) == 3 else None
        if isinstance(extent, int):
            return extent
    return None


def _summed_windows(e: Emitter, x: Value, padded: Value, w: Value, bias: Value | None) -> Value:
    """The convolution as sums of products, in float32."""
    starts, offsets = _counted(e, e("Shape", x, start=2, end=3)), _counted(e, e("Shape", w, start=2, end=3))
    places = e("Add", e("Unsqueeze", starts, _vector(e, 1)), offsets)
    windows, weight = (_float32(e, value) for value in (e("Gather", padded, places, axis=2), w))
    y = e("ReduceSum", e("Mul", windows, weight), _vector(e, -1), keepdims=0)
    return y if bias is None else e("Add", y, e("Unsqueeze", _float32(e, bias), _vector(e, 1)))


def _counted(e: Emitter, count: Value) -> Value:
    """0, 1 .. up to `count` (int64[1]), which is left out."""
    zero, one = (e.constant(number, dtype=DType.INT64) for number in (0, 1))
    return e("Range", zero, e("Squeeze", count), one)


def _float32(e: Emitter, x: Value) -> Value:
    return e("Cast", x, to=DType.FLOAT32.onnx_code)


def _vector(e: Emitter, number: int) -> Value:
    return e.constant([number], dtype=DType.INT64)


_LOWERINGS: dict[str, Lowering] = {"CausalConvWithState": _causal_conv}
