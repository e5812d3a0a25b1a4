"""The multi-layer perceptron."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from core import nn
from core.train.zoo.settings import (
    ActivationName,
    Entry,
    Row,
    Settings,
    Share,
    Width,
    activation,
    holds_numbers,
    refuse,
)


class MLP(Settings):
    """Linear layers with activations between them; rows of any shape are taken as one vector."""

    architecture: Literal["mlp"] = Field("mlp", description="Linear layers, for rows of numbers.")
    hidden: tuple[Width, ...] = Field((128, 64), strict=False, description="Widths of the layers before the last.")
    activation: ActivationName = Field("relu", description="The activation after each layer but the last.")
    dropout: Share = Field(0.0, description="The share of each hidden layer's results that training leaves out.")
    batch_norm: bool = Field(False, description="Whether each hidden layer's sums are normalized over the batch.")

    def module(self, row: Row, outputs: int) -> nn.Module:
        if not holds_numbers(row):
            raise refuse("mlp", "numbers", row)
        width = math.prod(row.shape)
        layers: list[nn.Module] = [Entry(width)]
        for hidden in self.hidden:
            layers += [nn.Linear(width, hidden), *self._between(hidden)]
            width = hidden
        return nn.Sequential(*layers, nn.Linear(width, outputs))

    def _between(self, width: int) -> list[nn.Module]:
        normal = [nn.BatchNorm1d(width)] if self.batch_norm else []
        drop = [nn.Dropout(self.dropout)] if self.dropout else []
        return [*normal, activation(self.activation), *drop]
