"""Recurrent layers with PyTorch's parameters: of each layer and direction `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`,
`bias_hh_l0`, and with `_reverse` those of the other direction.

ONNX's operators have the gates in another order; the rows of the weights are rearranged in the graph, which costs
nothing once weights are constants.
"""

from __future__ import annotations

from typing import ClassVar

from core.nn import functional as F
from core.nn import init
from core.nn.module import Module
from core.nn.parameter import Parameter
from core.nn.tensor import Tensor, cat


class _Recurrent(Module):
    """Family base: inputs [L, N, input_size], with `batch_first` [N, L, input_size]; results the same with `D *
    hidden_size`, for D directions. Initial and final states are [num_layers * D, N, hidden_size]."""

    op: ClassVar[str]
    order: ClassVar[tuple[int, ...]]  # the places of ONNX's gates among PyTorch's
    states: ClassVar[int] = 1

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
        setattr(self, name + suffix, init.spread(self.hidden_size, *shape))

    @property
    def _directions(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}{direction}" for direction in self._directions]

    def run(self, x: Tensor, initial: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        """The results of the last layer, and the final states of all."""
        where = "N, L" if self.batch_first else "L, N"
        self.expect(x.ndim == 3 and x.shape[2] == self.input_size, f"[{where}, {self.input_size}]", x)
        y = x.transpose(0, 1) if self.batch_first else x
        finals: list[list[Tensor]] = []
        for layer in range(self.num_layers):
            y, *final = self._layer(layer, y if layer == 0 else F.dropout(y, self.dropout, self.training), initial)
            finals.append(final)
        return y.transpose(0, 1) if self.batch_first else y, [cat(each) for each in zip(*finals, strict=True)]

    def _layer(self, layer: int, x: Tensor, initial: tuple[Tensor, ...]) -> list[Tensor]:
        """Results [L, N, D * hidden_size] and final states [D, N, hidden_size] of one layer."""
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
        """Parameters of all directions, their gates in ONNX's order: [D, gates * hidden_size, ...]."""
        stacked = []
        for suffix in suffixes:
            parameter: Parameter = getattr(self, name + suffix)
            gates = parameter.split(self.hidden_size)
            stacked.append(cat([gates[place] for place in self.order]).unsqueeze(0))
        return stacked[0] if len(stacked) == 1 else cat(stacked)

    def attrs(self) -> dict[str, int]:
        """Further attributes of the operator."""
        return {}

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"
        return f"{text}, batch_first={self.batch_first}, bidirectional={self.bidirectional}"


class GRU(_Recurrent):
    """Returns the results, and the final states."""

    op = "GRU"
    order = (1, 0, 2)  # ONNX: update, reset, new; PyTorch: reset, update, new

    def attrs(self) -> dict[str, int]:
        return {"linear_before_reset": 1}

    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, (h,) = self.run(x, () if hx is None else (hx,))
        return y, h


class LSTM(_Recurrent):
    """Returns the results, and the final hidden and cell states."""

    op = "LSTM"
    order = (0, 3, 1, 2)  # ONNX: input, output, forget, cell; PyTorch: input, forget, cell, output
    states = 2

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, (h, c) = self.run(x, () if hx is None else hx)
        return y, (h, c)
