"""Small residual networks (He et al., 2015, section 4.2: those for CIFAR-10)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from core import nn
from core.train.zoo.settings import Entry, Row, Settings, Share, Width, image


class ResNetSmall(Settings):
    """Stages of residual blocks of two 3x3 convolutions; from one stage to the next images become half as large."""

    architecture: Literal["resnet-small"] = Field("resnet-small", description="Residual blocks, for images.")
    widths: Annotated[tuple[Width, ...], Field(min_length=1, max_length=8)] = Field(
        (16, 32, 64), strict=False, description="Channels of each stage."
    )
    blocks: int = Field(1, ge=1, le=64, description="Residual blocks in each stage; 3 make a ResNet-20.")
    dropout: Share = Field(0.0, description="The share of the pooled features that training leaves out.")

    def module(self, row: Row, outputs: int) -> nn.Module:
        channels, *sizes = image("resnet-small", row)
        layers = [Entry(channels, *sizes), _conv(channels, self.widths[0]), nn.BatchNorm2d(self.widths[0]), nn.ReLU()]
        before = self.widths[0]
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                layers.append(Block(before, width, stride=2 if stage and not block else 1))
                before = width
        pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(self.dropout)]
        return nn.Sequential(*layers, *pooled, nn.Linear(before, outputs))


class Block(nn.Module):
    """relu(x + f(x)), of two normalized convolutions; where sizes differ, x goes through a 1x1 convolution."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        self.conv1, self.bn1 = _conv(inside, outside, stride), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = _conv(outside, outside), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU()
        same = inside == outside and stride == 1
        projection = nn.Conv2d(inside, outside, 1, stride, bias=False)
        self.shortcut = nn.Identity() if same else nn.Sequential(projection, nn.BatchNorm2d(outside))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(inner + self.shortcut(x))


def _conv(inside: int, outside: int, stride: int = 1) -> nn.Conv2d:
    """3x3 without a bias, which the normalization behind it would take away; weights as He et al. draw them."""
    conv = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
