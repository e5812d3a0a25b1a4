"""Recurrent layers: RNN, GRU and LSTM, in one or both directions.

Shapes with layout 0: X [T, B, I], W [D, G*H, I], R [D, G*H, H], B [D, 2*G*H], sequence_lens [B], initial states
[D, B, H], Y [T, D, B, H], final states [D, B, H], for D directions and G gates. With layout 1 the batch comes first:
X [B, T, I], Y [B, T, D, H], states [B, D, H].

The final states of a sequence of length 0 are zero, for any initial state: ONNX does not define them, and ONNX Runtime
returns zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType, TensorType, ValueType
from lathe.core.ops.nn.recurrent_definition import define, gru_step, lstm_step, rnn_step
from lathe.core.ops.opdef.backward import Rewrite
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, get, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import FLOAT, agree, as_computed, check_kind, expect_shape

Activation: TypeAlias = Callable[[Any], Any]
States: TypeAlias = tuple[Any, ...]  # the hidden state [B, H], and an LSTM's cell state

_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


def _sigmoid(x: Any, alpha: float, beta: float) -> Any:
    return 1 / (1 + np.exp(-x))


# By name: a function of x, alpha and beta, and the defaults of alpha and beta; None if it has no such parameter.
_ACTIVATIONS: dict[str, tuple[Callable[[Any, float, float], Any], float | None, float | None]] = {
    "relu": (lambda x, a, b: np.maximum(x, 0), None, None),
    "tanh": (lambda x, a, b: np.tanh(x), None, None),
    "sigmoid": (_sigmoid, None, None),
    "softsign": (lambda x, a, b: x / (1 + np.abs(x)), None, None),
    "softplus": (lambda x, a, b: np.logaddexp(x, 0), None, None),
    "elu": (lambda x, a, b: np.where(x < 0, a * np.expm1(x), x), 1.0, None),
    "leakyrelu": (lambda x, a, b: np.where(x < 0, a * x, x), 0.01, None),
    "thresholdedrelu": (lambda x, a, b: np.where(x > a, x, 0), 1.0, None),
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "hardsigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 0.2, 0.5),
    "scaledtanh": (lambda x, a, b: a * np.tanh(b * x), 1.0, 1.0),
}


@dataclass(frozen=True)
class Cell:
    """The parameters of one direction, with the gates side by side: r [H, G*H], bias [G*H] of the product with r."""

    r: Any
    bias: Any
    peepholes: Any  # [3, H] in the order i, o, f; None except for LSTM
    activations: Sequence[Activation]

    @property
    def hidden(self) -> int:
        return int(self.r.shape[0])

    def parts(self, gates: Any) -> list[Any]:
        """The columns [B, G*H] of all gates, split by gate: a list of [B, H]."""
        return np.split(gates, gates.shape[1] // self.hidden, axis=1)

    def sums(self, x: Any, h: Any) -> list[Any]:
        """The weighted sum of each gate, a list of [B, H]: the input's part x [B, G*H], plus h times r, plus bias."""
        return self.parts(x + h @ self.r + self.bias)


class Recurrent(OpDef):
    """Family base: recurrent layers, whose subclasses define `step`, one time step of one direction."""

    agreeing = True
    rounds_freely = True
    inputs = "X, W, R, B?, sequence_lens?, initial_h?"
    outputs = "Y, Y_h"
    attrs = {
        "activations": None, "activation_alpha": None, "activation_beta": None, "clip": None, "direction": "forward",
        "hidden_size": None, "layout": 0,
    }  # fmt: skip
    gates: ClassVar[int]
    defaults: ClassVar[tuple[str, ...]]  # the activations of one direction
    states: ClassVar[int] = 1

    def step(self, c: NodeView, cell: Cell, x: Any, states: States) -> States:
        """The next states [B, H] from the current states and the input's part of the gates, x [B, G*H].

        The input's part is the product of X and W plus the input's bias.
        """
        raise NotImplementedError

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = check_kind(c, 0, FLOAT)
        directions = _directions(c)
        _activations(c, self.defaults, directions)
        if c.attr("layout") not in (0, 1):
            c.fail(f"layout is {c.attr('layout')}, expected 0 or 1")
        if c.has_input(4) and c.dtype(4) is not DType.INT32:
            c.fail(f"sequence_lens is {c.tensor(4)}, expected int32")
        x, r = c.shape(0), c.shape(2)
        if x is None or r is None:
            return [TensorType(dtype, None)] * (1 + self.states)
        if len(x) != 3 or len(r) != 3:
            c.fail(f"X is {c.tensor(0)} and R is {c.tensor(2)}, expected rank 3")
        hidden = self._hidden_size(c, r[2])
        self._check_weights(c, directions, x[2], hidden)
        steps, batch = (x[1], x[0]) if c.attr("layout") else (x[0], x[1])
        state = (batch, directions, hidden) if c.attr("layout") else (directions, batch, hidden)
        expect_shape(c, 4, (batch,))
        for index in range(5, 5 + self.states):
            expect_shape(c, index, state)
        y = (batch, steps, directions, hidden) if c.attr("layout") else (steps, directions, batch, hidden)
        return [TensorType(dtype, y), *[TensorType(dtype, state)] * self.states]

    def _hidden_size(self, c: Infer, found: Dim) -> Dim:
        """The hidden size: `found` (of R), or the attribute if `found` is symbolic. ModelError if they differ."""
        declared = c.attr("hidden_size")
        if declared is not None and not c.agree(found, declared):
            c.fail(f"hidden_size is {declared}, R has {found}")
        return found if declared is None or isinstance(found, int) else int(declared)

    def _check_weights(self, c: Infer, directions: int, size: Dim, hidden: Dim) -> None:
        rows = self.gates * hidden
        expect_shape(c, 1, (directions, rows, size))
        expect_shape(c, 2, (directions, rows, hidden))
        expect_shape(c, 3, (directions, 2 * rows))
        if self.states == 2:
            expect_shape(c, 7, (directions, 3 * hidden))

    def reference(self, c: Call, *inputs: Array | None) -> tuple[Array, ...]:
        given: list[Any] = [*inputs, *[None] * (8 - len(inputs))]
        x, w, r, b, lengths, *initial = given
        batch_first = bool(c.attr("layout"))
        data = as_computed(x).swapaxes(0, 1) if batch_first else as_computed(x)
        bias = np.zeros((len(r), 2 * r.shape[1]), data.dtype) if b is None else as_computed(b)
        from_input = [data @ each.T + own[: len(each)] for each, own in zip(as_computed(w), bias, strict=True)]
        starts = [_initial_states(c, state, data, r) for state in initial[: self.states]]
        peepholes = initial[self.states] if self.states == 2 else None
        y, *states = self.steps(c, from_input, r, bias[:, r.shape[1] :], lengths, starts, peepholes)
        if batch_first:
            y, states = y.transpose(2, 0, 1, 3), [state.swapaxes(0, 1) for state in states]
        return tuple(array.astype(x.dtype) for array in (y, *states))

    def steps(
        self, c: NodeView, given: Any, r: Any, bias: Any, lengths: Array | None, starts: Sequence[Any], peepholes: Any
    ) -> tuple[Any, ...]:
        """Y [T, D, B, H] and the final states [D, B, H], by running all time steps of each direction.

        `given` has for each direction the product of X and W plus the input's bias, [T, B, G*H]. `bias` [D, G*H] is
        that of the products of the states and `r` [D, G*H, H]. `starts` are the initial states, [D, B, H] each.
        `peepholes` [D, 3*H] are those of an LSTM or None, `lengths` [B] is None if every sequence has T steps.
        """
        backwards = _backwards(c)
        functions = _activations(c, self.defaults, len(backwards))
        results = []
        for direction, backward in enumerate(backwards):
            along = None if peepholes is None else as_computed(peepholes)[direction].reshape(3, -1)
            mine = functions[direction * len(self.defaults) :][: len(self.defaults)]
            cell = Cell(as_computed(r)[direction].T, bias[direction], along, mine)
            states = tuple(_state_before_first_step(start[direction], lengths) for start in starts)
            results.append(self._run_direction(c, cell, given[direction], states, lengths, backward))
        y = np.stack([rows for rows, _ in results], axis=1)
        return (y, *(np.stack([final[i] for _, final in results]) for i in range(self.states)))

    def _run_direction(
        self, c: NodeView, cell: Cell, data: Any, states: States, lengths: Array | None, backward: bool
    ) -> tuple[Any, States]:
        """The hidden states [T, B, H] of one direction, zero after the end of a sequence, and the final states [B, H].

        `data` [T, B, G*H] is the product of X and W of this direction plus the input's bias. `states` are the initial
        states, [B, H] each. `lengths` [B] is None if every sequence has T steps.
        """
        order = range(len(data))
        y = np.zeros((len(data), *states[0].shape), data.dtype)
        for t in reversed(order) if backward else order:
            active = np.ones((data.shape[1], 1), bool) if lengths is None else (t < lengths)[:, None]
            following = self.step(c, cell, data[t], states)
            states = tuple(np.where(active, new, old) for new, old in zip(following, states, strict=True))
            y[t] = np.where(active, states[0], 0)
        return y, states

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        """Rows lie along the batch axis of X; sequence lengths and initial states, if present, must have rows too."""
        if all(axis is None for axis in axes):
            return [None] * len(c.node.outputs)
        batch = 0 if c.attr("layout") else 1
        given = (*axes, *(None,) * (8 - len(axes)))
        own = {0: batch, 4: 0, **{5 + i: batch for i in range(self.states)}}
        if any(given[i] != axis for i, axis in own.items() if c.has_input(i)) or any(
            axis is not None for i, axis in enumerate(given) if i not in own
        ):
            return MixesRows("its inputs do not all have their rows along the batch axis")
        return ([0, 0, 0] if batch == 0 else [2, 1, 1])[: len(c.node.outputs)]


@register
class RNN(Recurrent):
    gates = 1
    defaults = ("Tanh",)

    def step(self, c: NodeView, cell: Cell, x: Any, states: States) -> States:
        (gate,) = cell.sums(x, states[0])
        return (cell.activations[0](gate),)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        return define(g, self.defaults, self.states, rnn_step)


@register
class GRU(Recurrent):
    """Gated recurrent unit, with gates in the order z (update), r (reset), h (hidden)."""

    attrs = {**Recurrent.attrs, "linear_before_reset": 0}
    gates = 3
    defaults = ("Sigmoid", "Tanh")

    def step(self, c: NodeView, cell: Cell, x: Any, states: States) -> States:
        (h,), (f, g) = states, cell.activations
        update, reset, _ = cell.sums(x, h)
        update, reset = f(update), f(reset)
        last = slice(2 * cell.hidden, None)
        r, bias = cell.r[:, last], cell.bias[last]
        if c.attr("linear_before_reset"):
            recurrent = reset * (h @ r + bias)
        else:
            recurrent = (reset * h) @ r + bias
        hidden = g(x[:, last] + recurrent)
        return ((1 - update) * hidden + update * h,)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        return define(g, self.defaults, self.states, gru_step)


@register
class LSTM(Recurrent):
    """Long short-term memory, with gates in the order i, o, f, c (input, output, forget, cell).

    `input_forget` makes f = 1 - i.
    """

    inputs = f"{Recurrent.inputs}, initial_c?, P?"
    outputs = "Y, Y_h, Y_c"
    attrs = {**Recurrent.attrs, "input_forget": 0}
    gates = 4
    defaults = ("Sigmoid", "Tanh", "Tanh")
    states = 2

    def step(self, c: NodeView, cell: Cell, x: Any, states: States) -> States:
        (h, memory), (f, g, out) = states, cell.activations
        peep_in, peep_out, peep_forget = (0, 0, 0) if cell.peepholes is None else cell.peepholes
        enter, leave, forget, candidate = cell.sums(x, h)
        enter = f(enter + peep_in * memory)
        forget = 1 - enter if c.attr("input_forget") else f(forget + peep_forget * memory)
        memory = forget * memory + enter * g(candidate)
        return f(leave + peep_out * memory) * out(memory), memory

    def definition(self, g: Rewrite) -> Sequence[Term]:
        return define(g, self.defaults, self.states, lstm_step)


@register
class RecurrentSteps(OpDef):
    """The steps of a recurrent layer whose product of X and W has been computed for all steps before.

    `cell` names the operator: RNN, GRU or LSTM, with g gates. The input G [T, B, D*g*H] is X times W plus the input's
    biases; R [D, g*H, H]; B [D, g*H] holds the biases of the state's products. Y [T, D, B, H] and the final states
    [D, B, H] are the same for both layouts; `layout` concerns the initial states only. The rest is as in the operator
    itself.
    """

    agreeing = True
    domain = "lathe"
    inputs = "G, R, B?, sequence_lens?, initial_h?, initial_c?, P?"
    outputs = "Y, Y_h, Y_c"
    attrs = {**GRU.attrs, **LSTM.attrs, "cell": Required("name")}
    no_gradient = "only passes emit it, after differentiation"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        gates, r, op = c.tensor(0).dims, c.tensor(1).dims, _cell(c)
        directions, rows, hidden = _directions(c), r[1], r[2]
        expected = (directions, op.gates * hidden, hidden)
        if not agree(c, gates, ("T", "B", directions * rows)) or not agree(c, r, expected):
            c.fail(f"G is {c.tensor(0)} and R is {c.tensor(1)}, expected those of {directions} {op.name} directions")
        state = TensorType(c.dtype(0), (directions, gates[1], hidden))
        expect_shape(c, 2, (directions, rows))
        expect_shape(c, 3, (gates[1],))
        for index in range(4, 4 + op.states):
            expect_shape(c, index, (state.dims[1], directions, hidden) if c.attr("layout") else state.dims)
        expect_shape(c, 6, (directions, 3 * hidden))
        return [TensorType(c.dtype(0), (gates[0], *state.dims)), *[state] * op.states]

    def reference(self, c: Call, *inputs: Array | None) -> tuple[Array, ...]:
        given: list[Any] = [*inputs, *[None] * (7 - len(inputs))]
        gates, r, b, lengths, *initial, peepholes = given
        op, data = _cell(c), as_computed(gates)
        from_input = np.split(data, len(r), axis=2)
        bias = np.zeros(r.shape[:2], data.dtype) if b is None else as_computed(b)
        starts = [_initial_states(c, state, data, r) for state in initial[: op.states]]
        results = op.steps(c, from_input, r, bias, lengths, starts, peepholes)
        return tuple(array.astype(gates.dtype) for array in results)


def _cell(c: NodeView) -> Recurrent:
    op = get(c.attr("cell"))
    return op if isinstance(op, Recurrent) else c.fail(f"cell is {op.name}, expected RNN, GRU or LSTM")


def _directions(c: NodeView) -> int:
    direction = c.attr("direction")
    if direction not in _DIRECTIONS:
        c.fail(f"direction is {direction!r}, expected one of {', '.join(_DIRECTIONS)}")
    return _DIRECTIONS[direction]


def _backwards(c: NodeView) -> tuple[bool, ...]:
    """For each direction, whether it processes time backwards."""
    return {"forward": (False,), "reverse": (True,)}.get(c.attr("direction"), (False, True))


def _initial_states(c: Call, state: Array | None, data: Any, r: Array) -> Any:
    """Initial states as [D, B, H]; zeros if `state` is None. `data` [T, B, ..] and `r` give the extents."""
    if state is None:
        return np.zeros((r.shape[0], data.shape[1], r.shape[2]), data.dtype)
    return as_computed(state).swapaxes(0, 1) if c.attr("layout") else as_computed(state)


def _state_before_first_step(state: Any, lengths: Array | None) -> Any:
    """The state [B, H] before the first step: zero for sequences of length 0, which keep it to the end."""
    return state if lengths is None else np.where((lengths > 0)[:, None], state, 0)


def _activations(c: NodeView, defaults: tuple[str, ...], directions: int) -> list[Activation]:
    """The activation functions of all directions, with their alphas, betas and clipping.

    Alphas and betas are assigned, in order, to the activations that have such a parameter. ModelError for unknown
    names, or too few.
    """
    names = c.attr("activations") or defaults * directions
    if len(names) < len(defaults) * directions:
        c.fail(f"has {len(names)} activations, expected {len(defaults) * directions}")
    alphas, betas = iter(c.attr("activation_alpha") or ()), iter(c.attr("activation_beta") or ())
    return [_activation(c, name, alphas, betas) for name in names[: len(defaults) * directions]]


def _activation(c: NodeView, name: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    if name.lower() not in _ACTIVATIONS:
        c.fail(f"activation {name!r} is not known, expected one of {', '.join(_ACTIVATIONS)}")
    function, alpha, beta = _ACTIVATIONS[name.lower()]
    a = 0.0 if alpha is None else next(alphas, alpha)
    b = 0.0 if beta is None else next(betas, beta)
    limit = c.attr("clip")
    if limit is None:
        return lambda x: function(x, a, b)
    return lambda x: function(np.clip(x, -limit, limit), a, b)
