"""Recurrent layers whose products ONNX Runtime computes with bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import UnsupportedError
from core.frontends.contrib.quantized import dynamically_quantized
from core.frontends.contrib.table import int64s, lowers, refuse
from core.frontends.opsets import OnnxNode
from core.frontends.scope import Emitter
from core.ir.graph import Attr, Graph, Value
from core.ir.types import DType, TensorType

_GATES = 4  # i, o, f, c
_ACTIVATIONS = ["sigmoid", "tanh", "tanh"]


@lowers("DynamicQuantizeLSTM")
def _dynamic_lstm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """LSTM of ONNX with weights [directions, inputs, gates] of bytes. ONNX Runtime quantizes the other factor of each
    product to uint8 by its own range: X once, and the state of the whole batch in every step. So the rows of a batch
    depend on each other."""
    refuse(node, "clip")
    if node.input(4) is not None or node.input(7) is not None:
        raise UnsupportedError("has sequence lengths or peepholes, expected neither", where=node.where)
    directions = {"forward": [False], "reverse": [True]}.get(str(node.attrs.get("direction", "forward")), [False, True])
    named: Any = node.attrs.get("activations", ())
    if named and [name.lower() for name in named] != _ACTIVATIONS * len(directions):
        raise UnsupportedError(f"activations are {', '.join(named)}, expected those of an LSTM", where=node.where)
    x = _Rounded(e, node.required(0))
    layers = [_direction(e, node, x, index, backward) for index, backward in enumerate(directions)]
    return [_stacked(e, node, at, [layer[at] for layer in layers], axis) for at, axis in enumerate((1, 0, 0))][
        : len(node.outputs)
    ]


def _stacked(e: Emitter, node: OnnxNode, at: int, parts: Sequence[Value], axis: int) -> Value:
    """An output, of what all directions give."""
    axes = int64s(e, axis)
    names = node.outputs[at : at + 1] or [e.session.fresh(f"{e.label}.unused")]
    if len(parts) == 1:
        return e.emit("Unsqueeze", [parts[0], axes], {}, names)[0]
    return e.emit("Concat", [e("Unsqueeze", part, axes) for part in parts], {"axis": axis}, names)[0]


@dataclass(frozen=True)
class _Weight:
    """Bytes [K, N] of a direction, and for all of them or by column: the size of a step, and which byte is zero."""

    steps: Value
    scale: Value
    zero: Value | None


class _Rounded:
    """A tensor as uint8: in whole steps of its range."""

    def __init__(self, e: Emitter, x: Value) -> None:
        self.steps, self.scale, self.zero = dynamically_quantized(e, x)

    def times(self, e: Emitter, weight: _Weight) -> Value:
        """The product with a weight, as floats."""
        total = e("MatMulInteger", self.steps, weight.steps, self.zero, weight.zero)
        return e("Mul", e("Cast", total, to=DType.FLOAT32.onnx_code), e("Mul", self.scale, weight.scale))


def _direction(e: Emitter, node: OnnxNode, x: _Rounded, index: int, backward: bool) -> tuple[Value, Value, Value]:
    """All hidden states of a direction [T, B, H], and its last states [B, H]."""
    w, r = (_weight(e, node, at, scale, index) for at, scale in ((1, 8), (2, 10)))
    gates = x.times(e, w)
    if (bias := node.input(3)) is not None:
        halves = e("Reshape", _one(e, bias, index), int64s(e, 2, -1))
        gates = e("Add", gates, e("ReduceSum", halves, int64s(e, 0), keepdims=0))
    hidden = r.steps.tensor.dims[0]
    if not isinstance(hidden, int):
        raise UnsupportedError(f"the hidden size is {hidden}, expected a number", where=node.where)
    starts = [_start(e, node, at, index, hidden) for at in (5, 6)]
    body = _step(e, gates.tensor, hidden, r, bool(node.attrs.get("input_forget", 0)))
    order = (int(backward),)
    attrs: dict[str, Attr] = {
        "body": body,
        "num_scan_inputs": 1,
        "scan_input_directions": order,
        "scan_output_directions": order,
    }
    names = [e.session.fresh(f"{e.label}.{name}") for name in ("h", "c", "y")]
    h, c, y = e.emit("Scan", [*starts, gates], attrs, names)
    return y, h, c


def _step(e: Emitter, gates: TensorType, hidden: int, r: _Weight, input_forget: bool) -> Graph:
    """(hidden state, memory, what the input gives to the gates) to (both, and the hidden state once more)."""
    body = Graph("step")
    inner = Emitter(body, e.session, e.label)
    batch = gates.dims[1]
    types = [TensorType(DType.FLOAT32, (batch, hidden))] * 2 + [TensorType(DType.FLOAT32, gates.dims[1:])]
    body.inputs = [Value(e.session.fresh(f"{e.label}.{name}"), type_) for name, type_ in zip("hcx", types, strict=True)]
    state, memory, x = body.inputs
    total = inner("Add", x, _Rounded(inner, state).times(inner, r))
    names = [e.session.fresh(f"{e.label}.gate") for _ in range(_GATES)]
    i, o, f, c = inner.emit("Split", [total], {"axis": 1, "num_outputs": _GATES}, names)
    enter = inner("Sigmoid", i)
    kept = inner("Sub", inner.constant(1.0, dtype=DType.FLOAT32), enter) if input_forget else inner("Sigmoid", f)
    after = inner("Add", inner("Mul", kept, memory), inner("Mul", enter, inner("Tanh", c)))
    h = inner("Mul", inner("Sigmoid", o), inner("Tanh", after))
    body.outputs = [h, after, inner("Identity", h)]
    return body


def _weight(e: Emitter, node: OnnxNode, at: int, scale_at: int, index: int) -> _Weight:
    """The weights of a direction."""
    zero = node.input(scale_at + 1)
    scale = _one(e, node.required(scale_at), index)
    return _Weight(_one(e, node.required(at), index), scale, _one(e, zero, index) if zero is not None else None)


def _one(e: Emitter, x: Value, index: int) -> Value:
    """What belongs to one direction. Of weights it is a constant: products of bytes have kernels for those."""
    if (known := e.value_of(x)) is not None:
        return e.constant(known[index])
    return e("Gather", x, e.constant(index, dtype=DType.INT64), axis=0)


def _start(e: Emitter, node: OnnxNode, at: int, index: int, hidden: int) -> Value:
    if (given := node.input(at)) is not None:
        return _one(e, given, index)
    batch = e("Shape", node.required(0), start=1, end=2)
    shape = e("Concat", batch, int64s(e, hidden), axis=0)
    return e("Expand", e.constant(0.0, dtype=DType.FLOAT32), shape)
