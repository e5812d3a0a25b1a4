"""LeNet-5 (LeCun et al., 1998), with today's activation and pooling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from core import nn
from core.train.zoo.settings import ActivationName, Entry, Row, Settings, Share, Width, activation, image, refuse

_SMALLEST = 4  # pixels, of which pooling twice leaves one
_LEAST = 6  # pixels that a second valid convolution needs, to leave one pooled window


class LeNet5(Settings):
    """Two convolutions, each pooled, and a perceptron on top; for images from 4 pixels on."""

    architecture: Literal["lenet5"] = Field("lenet5", description="Two convolutions and a perceptron, for images.")
    channels: tuple[Width, Width] = Field((6, 16), strict=False, description="Channels of the two convolutions.")
    hidden: tuple[Width, ...] = Field((120, 84), strict=False, description="Widths of the layers before the last.")
    activation: ActivationName = Field("relu", description="The activation after each layer but the last.")
    pool: Literal["max", "average"] = Field("max", description="How two by two pixels become one.")
    dropout: Share = Field(0.0, description="The share of the hidden layers' results that training leaves out.")

    def module(self, row: Row, outputs: int) -> nn.Module:
        channels, *sizes = image("lenet5", row)
        if min(sizes) < _SMALLEST:
            raise refuse("lenet5", f"images of at least {_SMALLEST} pixels each way", row)
        padding = 0 if min(sizes) // 2 >= _LEAST else 2
        layers = [
            Entry(channels, *sizes),
            *self._block(channels, self.channels[0], 2),
            *self._block(*self.channels, padding),
            nn.Flatten(),
        ]
        width = self.channels[1]
        for size in sizes:
            width *= (size // 2 - 4 + 2 * padding) // 2
        for hidden in self.hidden:
            layers += [nn.Linear(width, hidden), activation(self.activation), nn.Dropout(self.dropout)]
            width = hidden
        return nn.Sequential(*layers, nn.Linear(width, outputs))

    def _block(self, inside: int, outside: int, padding: int) -> list[nn.Module]:
        pool = nn.MaxPool2d(2) if self.pool == "max" else nn.AvgPool2d(2)
        return [nn.Conv2d(inside, outside, 5, padding=padding), activation(self.activation), pool]
