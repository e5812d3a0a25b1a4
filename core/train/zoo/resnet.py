"""Small residual networks (He et al., 2015, section 4.2: the networks for CIFAR-10)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lathe import nn
from lathe.core.train.zoo.settings import InputLayer, Probability, Row, Settings, Width, image_shape


class ResNetSmall(Settings):
    """Stages of residual blocks with two 3x3 convolutions. Each stage but the first halves height and width."""

    architecture: Literal["resnet-small"] = Field("resnet-small", description="Residual network, for images.")
    widths: Annotated[tuple[Width, ...], Field(min_length=1, max_length=8)] = Field(
        (16, 32, 64), strict=False, description="Channels of each stage."
    )
    blocks: int = Field(
        1, ge=1, le=64, description="Residual blocks in each stage; 3 in three stages make a ResNet-20."
    )
    dropout: Probability = Field(0.0, description="Dropout probability before the last layer.")

    def module(self, row: Row, outputs: int) -> nn.Module:
        channels, *sizes = image_shape("resnet-small", row)
        layers = [
            InputLayer(channels, *sizes),
            _conv(channels, self.widths[0]),
            nn.BatchNorm2d(self.widths[0]),
            nn.ReLU(),
        ]
        width_before = self.widths[0]
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                layers.append(Block(width_before, width, stride=2 if stage and not block else 1))
                width_before = width
        pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(self.dropout)]
        return nn.Sequential(*layers, *pooled, nn.Linear(width_before, outputs))


class Block(nn.Module):
    """relu(f(x) + x), where f is two convolutions with batch normalization.

    If input and output differ in shape, x goes through a 1x1 convolution with batch normalization.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        self.conv1, self.bn1 = _conv(in_channels, out_channels, stride), nn.BatchNorm2d(out_channels)
        self.conv2, self.bn2 = _conv(out_channels, out_channels), nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        same = in_channels == out_channels and stride == 1
        projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
        self.shortcut = nn.Identity() if same else nn.Sequential(projection, nn.BatchNorm2d(out_channels))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(inner + self.shortcut(x))


def _conv(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution with He initialization, without bias: the normalization that follows would cancel a bias."""
    conv = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
