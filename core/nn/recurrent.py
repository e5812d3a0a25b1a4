"""Recurrent layers with PyTorch's parameter names.

Layer 0 has `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0` and `bias_hh_l0`; names of the reverse direction end in
`_reverse`. ONNX orders the gates differently, so the rows of the weights are reordered in the graph. The compiler folds
this away when the weights are constants.
"""

from __future__ import annotations

from typing import ClassVar

from lathe.core.nn import functional as F
from lathe.core.nn import init
from lathe.core.nn.module import Module
from lathe.core.nn.parameter import Parameter
from lathe.core.nn.tensor import Tensor, cat


class _Recurrent(Module):
    """The base class of recurrent layers.

    Inputs are [L, N, input_size] for L time steps of N rows, with `batch_first` [N, L, input_size]. The last axis of
    the results is `D * hidden_size` for D directions. Initial and final states are [num_layers * D, N, hidden_size]. In
    training, `dropout` applies to the results of all layers but the last.
    """

    op: ClassVar[str]
    order: ClassVar[tuple[int, ...]]  # for each gate of ONNX, its index in PyTorch's order
    states: ClassVar[int] = 1  # number of final states

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout, self.bidirectional = bias, batch_first, dropout, bidirectional
        rows = len(self.order) * hidden_size
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * len(self._directions)
            for suffix in self._suffixes(layer):
                self._add("weight_ih", suffix, rows, width)
                self._add("weight_hh", suffix, rows, hidden_size)
                if bias:
                    self._add("bias_ih", suffix, rows)
                    self._add("bias_hh", suffix, rows)

    def _add(self, name: str, suffix: str, *shape: int) -> None:
        setattr(self, name + suffix, init.new_uniform(self.hidden_size, *shape))

    @property
    def _directions(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}{direction}" for direction in self._directions]

    def run(self, x: Tensor, initial: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        """The results of the last layer, and for each kind of state the final states of all layers, concatenated.

        `initial` has the initial states of all layers, one tensor per kind of state; empty for zeros.
        """
        where = "N, L" if self.batch_first else "L, N"
        self.expect(x.ndim == 3 and x.shape[2] == self.input_size, f"[{where}, {self.input_size}]", x)
        y = x.transpose(0, 1) if self.batch_first else x
        finals: list[list[Tensor]] = []
        for layer in range(self.num_layers):
            y, *final = self._layer(layer, y if layer == 0 else F.dropout(y, self.dropout, self.training), initial)
            finals.append(final)
        return y.transpose(0, 1) if self.batch_first else y, [cat(each) for each in zip(*finals, strict=True)]

    def _layer(self, layer: int, x: Tensor, initial: tuple[Tensor, ...]) -> list[Tensor]:
        """A list: results [L, N, D * hidden_size] of layer number `layer`, then its final states [D, N, hidden_size].

        `initial` has the initial states of all layers.
        """
        count, suffixes = len(self._directions), self._suffixes(layer)
        weights = [self._gates("weight_ih", suffixes), self._gates("weight_hh", suffixes)]
        bias = None
        if self.bias:
            bias = cat([self._gates("bias_ih", suffixes), self._gates("bias_hh", suffixes)], 1)
        states = [state[layer * count : (layer + 1) * count] for state in initial]
        attrs = {"hidden_size": self.hidden_size, "direction": "bidirectional" if count == 2 else "forward"}
        inputs = (*weights, bias, None, *states)
        y, *final = x.ops(self.op, *inputs, outputs=1 + self.states, **attrs, **self.attrs())
        return [y.transpose(1, 2).flatten(2), *final]

    def _gates(self, name: str, suffixes: list[str]) -> Tensor:
        """The parameters `name` + suffix of all directions, stacked, with gates in ONNX's order.

        The result is [D, gates * hidden_size, ...].
        """
        directions = []
        for suffix in suffixes:
            parameter: Parameter = getattr(self, name + suffix)
            gates = parameter.split(self.hidden_size)
            directions.append(cat([gates[place] for place in self.order]).unsqueeze(0))
        return directions[0] if len(directions) == 1 else cat(directions)

    def attrs(self) -> dict[str, int]:
        """Attributes of the ONNX operator besides hidden size and direction; none by default."""
        return {}

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"
        return f"{text}, batch_first={self.batch_first}, bidirectional={self.bidirectional}"


class GRU(_Recurrent):
    """GRU layers. `forward` returns the results of the last layer and the final hidden states of all layers."""

    op = "GRU"
    order = (1, 0, 2)  # ONNX: update, reset, new; PyTorch: reset, update, new

    def attrs(self) -> dict[str, int]:
        return {"linear_before_reset": 1}

    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, (h,) = self.run(x, () if hx is None else (hx,))
        return y, h


class LSTM(_Recurrent):
    """LSTM layers. `forward` returns the results of the last layer, and all final (hidden, cell) states."""

    op = "LSTM"
    order = (0, 3, 1, 2)  # ONNX: input, output, forget, cell; PyTorch: input, forget, cell, output
    states = 2

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, (h, c) = self.run(x, () if hx is None else hx)
        return y, (h, c)
