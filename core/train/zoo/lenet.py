"""LeNet-5 (LeCun et al., 1998), with ReLU and max pooling by default."""

from __future__ import annotations

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
    image_shape,
    row_error,
)

_MIN_PIXELS = 4  # pixels: two poolings by 2 leave one pixel
_MIN_PIXELS_UNPADDED = (
    6  # pixels before the second 5x5 convolution without padding, so that 2x2 pixels are left for pooling
)


class LeNet5(Settings):
    """Two convolutions, each followed by pooling, then linear layers. For images of at least 4 x 4 pixels."""

    architecture: Literal["lenet5"] = Field(
        "lenet5", description="LeNet-5: two convolutions, then linear layers, for images."
    )
    channels: tuple[Width, Width] = Field((6, 16), strict=False, description="Channels of the two convolutions.")
    hidden: tuple[Width, ...] = Field((120, 84), strict=False, description="Widths of the hidden layers.")
    activation: ActivationName = Field("relu", description=AFTER_LAYERS)
    pool: Literal["max", "average"] = Field("max", description="Pooling of 2 x 2 pixels: `max` or `average`.")
    dropout: Probability = Field(0.0, description="Dropout probability after each hidden layer.")

    def module(self, row: Row, outputs: int) -> nn.Module:
        channels, *sizes = image_shape("lenet5", row)
        if min(sizes) < _MIN_PIXELS:
            raise row_error("lenet5", f"images of at least {_MIN_PIXELS} pixels each way", row)
        padding = 0 if min(sizes) // 2 >= _MIN_PIXELS_UNPADDED else 2
        layers = [
            InputLayer(channels, *sizes),
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

    def _block(self, in_channels: int, out_channels: int, padding: int) -> list[nn.Module]:
        pool = nn.MaxPool2d(2) if self.pool == "max" else nn.AvgPool2d(2)
        return [nn.Conv2d(in_channels, out_channels, 5, padding=padding), activation(self.activation), pool]
