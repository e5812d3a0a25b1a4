"""The multi-layer perceptron."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from lathe import nn
from lathe.core.train.zoo.settings import (
    AFTER_LAYERS,
    ActivationName,
    InputLayer,
    Probability,
    Row,
    Settings,
    Width,
    activation,
    holds_numbers,
    row_error,
)


class MLP(Settings):
    """Linear layers with activations between them. Rows of any shape are flattened."""

    architecture: Literal["mlp"] = Field("mlp", description="Multi-layer perceptron, for rows of numbers.")
    hidden: tuple[Width, ...] = Field((128, 64), strict=False, description="Widths of the hidden layers.")
    activation: ActivationName = Field("relu", description=AFTER_LAYERS)
    dropout: Probability = Field(0.0, description="Dropout probability after each hidden layer.")
    batch_norm: bool = Field(False, description="Whether batch normalization follows each hidden layer.")

    def module(self, row: Row, outputs: int) -> nn.Module:
        if not holds_numbers(row):
            raise row_error("mlp", "numbers", row)
        width = math.prod(row.shape)
        layers: list[nn.Module] = [InputLayer(width)]
        for hidden in self.hidden:
            layers += [nn.Linear(width, hidden), *self._between(hidden)]
            width = hidden
        return nn.Sequential(*layers, nn.Linear(width, outputs))

    def _between(self, width: int) -> list[nn.Module]:
        normal = [nn.BatchNorm1d(width)] if self.batch_norm else []
        drop = [nn.Dropout(self.dropout)] if self.dropout else []
        return [*normal, activation(self.activation), *drop]
