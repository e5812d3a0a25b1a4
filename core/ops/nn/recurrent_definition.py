"""The definitions of recurrent layers as Scans over elementwise operators and products, for differentiation.

The shapes are those of `lathe.core.ops.nn.recurrent`, with the time first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lathe.core.ir.graph import Attr, Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.backward import Rewrite
from lathe.core.ops.opdef.terms import Term, Writer

Function: TypeAlias = Callable[[Term], Term]
_WITH_ALPHA = frozenset({"elu", "leakyrelu", "thresholdedrelu", "affine", "hardsigmoid", "scaledtanh"})
_WITH_BETA = frozenset({"affine", "hardsigmoid", "scaledtanh"})
_OPS = {
    "relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "softsign": "Softsign", "softplus": "Softplus", "elu": "Elu",
    "leakyrelu": "LeakyRelu", "thresholdedrelu": "ThresholdedRelu", "hardsigmoid": "HardSigmoid",
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One direction of a recurrent layer, with the weight `r` as products need it: [H, G*H]."""

    g: Rewrite
    writer: Writer
    r: Term
    bias: Term  # the bias of the product with the state, [G*H]
    peepholes: Term | None
    functions: Sequence[Function]

    @property
    def hidden(self) -> int:
        extent = self.r.shape[0]
        return extent if isinstance(extent, int) else self.g.unsupported(f"the hidden size is {extent}, not a number")

    def gate(self, term: Term, index: int) -> Term:
        """The columns of `term` that belong to gate number `index`."""
        return term.slice(term.rank - 1, index * self.hidden, (index + 1) * self.hidden)

    def peep(self, index: int, memory: Term) -> Term | float:
        return 0 if self.peepholes is None else self.gate(self.peepholes, index) * memory


def define(g: Rewrite, defaults: Sequence[str], states: int, step: Callable[..., list[Term]]) -> list[Term]:
    """Y and the final states of a recurrent layer, in the node's layout, as terms.

    `step(layer, x, *states)` returns the next states; x [B, G*H] is the product of X and W plus the input's bias.
    `defaults` are the activations of one direction, `states` is the number of states. UnsupportedError if the hidden
    size is not a number.
    """
    directions = {"forward": [False], "reverse": [True]}.get(g.attr("direction"), [False, True])
    x, lengths = g.x(0), g.x_or_none(4)
    x = x.transpose(1, 0, 2) if g.attr("layout") else x
    functions = _activation_functions(g, defaults, len(directions))
    found = []
    for direction, backward in enumerate(directions):
        mine = functions[direction * len(defaults) : (direction + 1) * len(defaults)]
        found.append(_direction(g, x, direction, backward, mine, states, lengths, step))
    y = _join_directions([rows.unsqueeze(1) for rows, _ in found], 1)
    finals = [_join_directions([final[i].unsqueeze(0) for _, final in found], 0) for i in range(states)]
    if g.attr("layout"):
        return [y.transpose(2, 0, 1, 3), *(final.transpose(1, 0, 2) for final in finals)]
    return [y, *finals]


def _direction(
    g: Rewrite,
    x: Term,
    direction: int,
    backward: bool,
    functions: Sequence[Function],
    states: int,
    lengths: Term | None,
    step: Callable[..., list[Term]],
) -> tuple[Term, list[Term]]:
    """Y [T, B, H] of one direction, and its final states [B, H]."""
    w, r = (_select_direction(g.x(index), direction).transpose(1, 0) for index in (1, 2))
    bias = g.x_or_none(3)
    width = w.shape[1]
    both = g.writer.fill(0, x.dtype, (2 * width,)) if bias is None else _select_direction(bias, direction)
    gates = x @ w + both.slice(0, 0, width)
    peepholes = g.x_or_none(7) if states == 2 else None
    along = None if peepholes is None else _select_direction(peepholes, direction)
    layer = Layer(g, g.writer, r, both.slice(0, width, 2 * width), along, functions)
    starts = [_start(g, 5 + i, direction, (x.shape[1], r.shape[0]), x.dtype) for i in range(states)]
    if lengths is not None:  # sequences of length 0 keep zeros to the end
        starts = [(lengths > 0).unsqueeze(1).where(start, 0) for start in starts]
    times = g.writer.fill(1, DType.INT32, (x.shape[0],)).op("CumSum", g.writer.array(0), exclusive=1)
    body = _body(layer, gates, starts, lengths, step)
    order = (int(backward),)
    values = [term.value for term in (*starts, times, gates)]
    attrs: dict[str, Attr] = {
        "body": body,
        "num_scan_inputs": 2,
        "scan_input_directions": order * 2,
        "scan_output_directions": order,
    }
    *finals, y = (Term(g.writer, value) for value in g.writer.emit("Scan", values, attrs, states + 1))
    return y, finals


def _body(
    layer: Layer, gates: Term, starts: Sequence[Term], lengths: Term | None, step: Callable[..., list[Term]]
) -> Graph:
    """The body of the Scan over time: maps (states, time, input's part of the gates) to (next states, hidden state).

    After the end of a sequence (`lengths`), the states stay, and the hidden state is given as zeros.
    """
    body = Graph("step")
    inner = layer.writer.nested(body)
    before = [inner.input("state", start.value.tensor) for start in starts]
    time = inner.input("time", TensorType(DType.INT32, ()))
    x = inner.input("gates", TensorType(gates.dtype, gates.shape[1:]))
    after = step(Layer(layer.g, inner, *_nested_layer(inner, layer), layer.functions), x, *before)
    seen = after[0]
    if lengths is not None:
        active = (time < inner.term(lengths.value)).unsqueeze(1)
        after = [active.where(new, old) for new, old in zip(after, before, strict=True)]
        seen = active.where(after[0], 0)
    body.outputs = [*(term.value for term in after), seen.op("Identity").value]
    return body


def _nested_layer(inner: Writer, layer: Layer) -> tuple[Term, Term, Term | None]:
    """The weight r, the bias and the peepholes (or None) of a layer as terms of the nested graph of `inner`."""
    along = layer.peepholes
    return inner.term(layer.r.value), inner.term(layer.bias.value), None if along is None else inner.term(along.value)


def _select_direction(term: Term, direction: int) -> Term:
    return term.slice(0, direction, direction + 1).squeeze(0)


def _start(g: Rewrite, index: int, direction: int, shape: tuple[object, ...], dtype: DType) -> Term:
    given = g.x_or_none(index)
    if given is None:
        return g.writer.fill(0, dtype, shape)  # type: ignore[arg-type]
    return _select_direction(given.transpose(1, 0, 2) if g.attr("layout") else given, direction)


def _join_directions(parts: Sequence[Term], axis: int) -> Term:
    return parts[0].op("Concat", *parts[1:], axis=axis)


def _activation_functions(g: Rewrite, defaults: Sequence[str], directions: int) -> list[Function]:
    """The activation functions of all directions, on terms.

    Alphas and betas are assigned, in order, to the activations that have such a parameter.
    """
    names = [name.lower() for name in g.attr("activations") or [*defaults] * directions]
    alphas, betas = iter(g.attr("activation_alpha") or ()), iter(g.attr("activation_beta") or ())
    return [_function(g, name, next(alphas, None) if name in _WITH_ALPHA else None,
                      next(betas, None) if name in _WITH_BETA else None) for name in names]  # fmt: skip


def _function(g: Rewrite, name: str, alpha: float | None, beta: float | None) -> Function:
    limit = g.attr("clip")

    def apply(x: Term) -> Term:
        if limit is not None:
            x = x.op("Max", -limit).op("Min", limit)
        if name == "affine":
            return x * (1.0 if alpha is None else alpha) + (0.0 if beta is None else beta)
        if name == "scaledtanh":
            return (x * (1.0 if beta is None else beta)).op("Tanh") * (1.0 if alpha is None else alpha)
        given = {key: value for key, value in (("alpha", alpha), ("beta", beta)) if value is not None}
        return x.op(_OPS[name], **given)

    return apply


def rnn_step(layer: Layer, x: Term, h: Term) -> list[Term]:
    return [layer.functions[0](x + h @ layer.r + layer.bias)]


def gru_step(layer: Layer, x: Term, h: Term) -> list[Term]:
    f, g = layer.functions
    r, bias = layer.gate(layer.r, 2), layer.gate(layer.bias, 2)
    total = x + h @ layer.r + layer.bias
    update, reset = f(layer.gate(total, 0)), f(layer.gate(total, 1))
    linear = layer.g.attr("linear_before_reset")
    recurrent = reset * (h @ r + bias) if linear else (reset * h) @ r + bias
    hidden = g(layer.gate(x, 2) + recurrent)
    return [(1 - update) * hidden + update * h]


def lstm_step(layer: Layer, x: Term, h: Term, memory: Term) -> list[Term]:
    f, g, out = layer.functions
    enter, leave, forget, candidate = (layer.gate(x + h @ layer.r + layer.bias, i) for i in range(4))
    enter = f(enter + layer.peep(0, memory))
    kept = 1 - enter if layer.g.attr("input_forget") else f(forget + layer.peep(2, memory))
    after = kept * memory + enter * g(candidate)
    return [f(leave + layer.peep(1, after)) * out(after), after]


__all__ = ["Layer", "define", "gru_step", "lstm_step", "rnn_step"]
