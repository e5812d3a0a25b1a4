"""The dynamically quantized LSTM of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.contrib.lowering_table import int64s, lowers, refuse_attributes
from lathe.core.frontends.contrib.quantized import quantize_dynamically
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Attr, Graph, Value
from lathe.core.ir.types import DType, TensorType

_GATES = 4  # input, output, forget, cell
_ACTIVATIONS = ["sigmoid", "tanh", "tanh"]


@lowers("DynamicQuantizeLSTM")
def _dynamic_lstm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """DynamicQuantizeLSTM: ONNX's LSTM with quantized weights [directions,inputs,4*hidden size]; returns Y, Y_h, Y_c.

    ONNX Runtime quantizes the other factor of each product dynamically to uint8: X once, and the state of the whole
    batch in every step. So the rows of a batch depend on each other. UnsupportedError for `clip`, sequence lengths,
    peepholes, activations other than an LSTM's default, and an unknown hidden size.
    """
    refuse_attributes(node, "clip")
    if node.input(4) is not None or node.input(7) is not None:
        raise UnsupportedError("has sequence lengths or peepholes, expected neither", where=node.where)
    directions = {"forward": [False], "reverse": [True]}.get(str(node.attrs.get("direction", "forward")), [False, True])
    named: Any = node.attrs.get("activations", ())
    if named and [name.lower() for name in named] != _ACTIVATIONS * len(directions):
        raise UnsupportedError(f"activations are {', '.join(named)}, expected those of an LSTM", where=node.where)
    x = _DynamicallyQuantized(e, node.required(0))
    layers = [_direction(e, node, x, index, backward) for index, backward in enumerate(directions)]
    return [_stack(e, node, at, [layer[at] for layer in layers], axis) for at, axis in enumerate((1, 0, 0))][
        : len(node.outputs)
    ]


def _stack(e: Emitter, node: OnnxNode, at: int, parts: Sequence[Value], axis: int) -> Value:
    """Emit the node's output number `at`: `parts`, the results of all directions, stacked along the new axis `axis`."""
    axes = int64s(e, axis)
    names = node.outputs[at : at + 1] or [e.session.fresh(f"{e.label}.unused")]
    if len(parts) == 1:
        return e.emit("Unsqueeze", [parts[0], axes], {}, names)[0]
    return e.emit("Concat", [e("Unsqueeze", part, axes) for part in parts], {"axis": axis}, names)[0]


@dataclass(frozen=True)
class _Weight:
    """The quantized weight [K,N] of one direction; scale and zero point are per tensor or per column."""

    integers: Value
    scale: Value
    zero: Value | None


class _DynamicallyQuantized:
    """A float tensor quantized to uint8, with a scale and zero point computed from its range in the run."""

    def __init__(self, e: Emitter, x: Value) -> None:
        self.integers, self.scale, self.zero = quantize_dynamically(e, x)

    def times(self, e: Emitter, weight: _Weight) -> Value:
        """The matrix product of this tensor and `weight`, as float32."""
        total = e("MatMulInteger", self.integers, weight.integers, self.zero, weight.zero)
        return e("Mul", e("Cast", total, to=DType.FLOAT32.onnx_code), e("Mul", self.scale, weight.scale))


def _direction(
    e: Emitter, node: OnnxNode, x: _DynamicallyQuantized, index: int, backward: bool
) -> tuple[Value, Value, Value]:
    """All hidden states [T,B,H], last hidden state and last cell state [B,H] of direction `index`."""
    w, r = (_weight(e, node, at, scale, index) for at, scale in ((1, 8), (2, 10)))
    gates = x.times(e, w)
    if (bias := node.input(3)) is not None:
        halves = e("Reshape", _of_direction(e, bias, index), int64s(e, 2, -1))
        gates = e("Add", gates, e("ReduceSum", halves, int64s(e, 0), keepdims=0))
    hidden = r.integers.tensor.dims[0]
    if not isinstance(hidden, int):
        raise UnsupportedError(f"the hidden size is {hidden}, expected a number", where=node.where)
    initial = [_initial_state(e, node, at, index, hidden) for at in (5, 6)]
    body = _step(e, gates.tensor, hidden, r, bool(node.attrs.get("input_forget", 0)))
    order = (int(backward),)
    attrs: dict[str, Attr] = {
        "body": body,
        "num_scan_inputs": 1,
        "scan_input_directions": order,
        "scan_output_directions": order,
    }
    names = [e.session.fresh(f"{e.label}.{name}") for name in ("h", "c", "y")]
    h, c, y = e.emit("Scan", [*initial, gates], attrs, names)
    return y, h, c


def _step(e: Emitter, gates: TensorType, hidden: int, r: _Weight, input_forget: bool) -> Graph:
    """The body of the Scan over time: maps (h, c, the input's part of the gates) to (new h, new c, new h).

    `gates` is the type of the input's part [T,B,4*hidden], `r` the recurrent weight. With `input_forget`, the forget
    gate is 1 minus the input gate.
    """
    body = Graph("step")
    inner = Emitter(body, e.session, e.label)
    batch = gates.dims[1]
    types = [TensorType(DType.FLOAT32, (batch, hidden))] * 2 + [TensorType(DType.FLOAT32, gates.dims[1:])]
    body.inputs = [Value(e.session.fresh(f"{e.label}.{name}"), type_) for name, type_ in zip("hcx", types, strict=True)]
    state, cell, x = body.inputs
    total = inner("Add", x, _DynamicallyQuantized(inner, state).times(inner, r))
    names = [e.session.fresh(f"{e.label}.gate") for _ in range(_GATES)]
    i, o, f, c = inner.emit("Split", [total], {"axis": 1, "num_outputs": _GATES}, names)
    enter = inner("Sigmoid", i)
    forget = inner("Sub", inner.constant(1.0, dtype=DType.FLOAT32), enter) if input_forget else inner("Sigmoid", f)
    new_cell = inner("Add", inner("Mul", forget, cell), inner("Mul", enter, inner("Tanh", c)))
    h = inner("Mul", inner("Sigmoid", o), inner("Tanh", new_cell))
    body.outputs = [h, new_cell, inner("Identity", h)]
    return body


def _weight(e: Emitter, node: OnnxNode, at: int, scale_at: int, index: int) -> _Weight:
    """The quantized weight of direction `index`.

    Its integers are in input `at`, its scale in input `scale_at`, its zero point (optional) in the input after that.
    """
    zero = node.input(scale_at + 1)
    scale = _of_direction(e, node.required(scale_at), index)
    zero_point = _of_direction(e, zero, index) if zero is not None else None
    return _Weight(_of_direction(e, node.required(at), index), scale, zero_point)


def _of_direction(e: Emitter, x: Value, index: int) -> Value:
    """`x[index]`, the part of `x` for one direction: a constant if `x` is one, as kernels of integer products need."""
    if (known := e.value_of(x)) is not None:
        return e.constant(known[index])
    return e("Gather", x, e.constant(index, dtype=DType.INT64), axis=0)


def _initial_state(e: Emitter, node: OnnxNode, at: int, index: int, hidden: int) -> Value:
    """The initial state [batch, hidden] of direction `index`: from input `at`, or zeros if that is absent."""
    if (state := node.input(at)) is not None:
        return _of_direction(e, state, index)
    batch = e("Shape", node.required(0), start=1, end=2)
    shape = e("Concat", batch, int64s(e, hidden), axis=0)
    return e("Expand", e.constant(0.0, dtype=DType.FLOAT32), shape)
