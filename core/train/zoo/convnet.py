"""A family of convolutional networks whose depth, widths, kernels, blocks and head are settings: a space to search."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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

_MAX_STAGES = 8
Kernel = Annotated[int, Field(ge=1, le=15)]


class ConvNet(Settings):
    """Stages of convolutional blocks, then global pooling or flattening, an optional hidden layer and a linear layer.

    Each stage but the last ends in a pooling that halves height and width, rounded down. With `pool = "stride"` the
    first convolution of each stage but the first has stride 2 instead, which rounds up.
    """

    architecture: Literal["convnet"] = Field(
        "convnet", description="Stages of convolutional blocks, for images and for searches over architectures."
    )
    stages: Annotated[int, Field(ge=1, le=_MAX_STAGES)] | None = Field(
        None,
        description="Number of stages, for which the first entries of `channels` are used; by default all entries.",
    )
    channels: Annotated[tuple[Width, ...], Field(min_length=1, max_length=_MAX_STAGES)] = Field(
        (16, 32), strict=False, description="Channels of each stage."
    )
    kernels: Annotated[tuple[Kernel, ...], Field(min_length=1, max_length=_MAX_STAGES)] = Field(
        (3,), strict=False, description="Odd kernel size of each stage; a shorter list is extended by its last size."
    )
    depth: int = Field(1, ge=1, le=16, description="Blocks in each stage.")
    block: Literal["plain", "separable", "inverted"] = Field(
        "plain",
        description="Kind of all blocks but the first, which is `plain`: `plain` is a convolution, `separable` a "
        "depthwise and a 1 x 1 convolution, `inverted` an inverted bottleneck.",
    )
    expansion: int = Field(2, ge=1, le=8, description="Factor of the channels within inverted bottlenecks.")
    pool: Literal["max", "average", "stride"] = Field(
        "max",
        description="How the image is halved between stages: `max` or `average` pooling of 2 x 2 pixels, or `stride`, "
        "a convolution of stride 2.",
    )
    head: Literal["mean", "flatten"] = Field(
        "mean", description="Input of the linear layers: `mean`, one mean per channel; or `flatten`, all pixels."
    )
    hidden: int = Field(0, ge=0, le=65536, description="Width of the hidden layer before the last one; 0: none.")
    activation: ActivationName = Field("relu", description=AFTER_LAYERS)
    dropout: Probability = Field(0.0, description="Dropout probability before the last layer.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stages is not None and self.stages > len(self.channels):
            raise ValueError(f"stages is {self.stages}, expected at most the {len(self.channels)} of channels")
        for kernel in self.kernels:
            if kernel % 2 == 0:
                raise ValueError(f"kernels has {kernel}, expected odd sizes")
        return self

    def module(self, row: Row, outputs: int) -> nn.Module:
        channels, *sizes = image_shape("convnet", row)
        widths = self.channels[: self.stages]
        least = 2 ** (len(widths) - 1)
        if min(sizes) < least:
            raise row_error("convnet", f"images of at least {least} pixels each way for {len(widths)} stages", row)
        layers: list[nn.Module] = [InputLayer(channels, *sizes)]
        for stage, width in enumerate(widths):
            layers += self._stage(stage, channels, width)
            channels = width
            if stage + 1 < len(widths):
                sizes = [(size + 1) // 2 if self.pool == "stride" else size // 2 for size in sizes]
                layers += self._pooling()
        return nn.Sequential(*layers, *self._head(channels, sizes, outputs))

    def _stage(self, stage: int, in_channels: int, width: int) -> list[nn.Module]:
        kernel = self.kernels[min(stage, len(self.kernels) - 1)]
        layers = []
        for block in range(self.depth):
            is_first = block == 0
            stride = 2 if self.pool == "stride" and stage and is_first else 1
            kind = "plain" if is_first and not stage else self.block
            layers += self._block(kind, in_channels if is_first else width, width, kernel, stride)
        return layers

    def _block(self, kind: str, in_channels: int, width: int, kernel: int, stride: int) -> list[nn.Module]:
        act = self.activation
        if kind == "plain":
            return [*_conv(in_channels, width, kernel, stride), activation(act)]
        if kind == "separable":
            depthwise = _conv(in_channels, in_channels, kernel, stride, in_channels)
            return [*depthwise, activation(act), *_conv(in_channels, width, 1), activation(act)]
        return [InvertedBlock(in_channels, width, self.expansion * in_channels, kernel, stride, act)]

    def _pooling(self) -> list[nn.Module]:
        match self.pool:
            case "max":
                return [nn.MaxPool2d(2)]
            case "average":
                return [nn.AvgPool2d(2)]
        return []

    def _head(self, channels: int, sizes: list[int], outputs: int) -> list[nn.Module]:
        is_flat = self.head == "flatten"
        width = channels * sizes[0] * sizes[1] if is_flat else channels
        layers: list[nn.Module] = [nn.Flatten()] if is_flat else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        if self.hidden:
            layers += [nn.Linear(width, self.hidden), activation(self.activation)]
            width = self.hidden
        return [*layers, nn.Dropout(self.dropout), nn.Linear(width, outputs)]


class InvertedBlock(nn.Module):
    """An inverted bottleneck (Sandler et al., 2018: MobileNetV2): 1x1 wider, depthwise, 1x1 without an activation.

    The input is added to the result where both have the same shape.
    """

    def __init__(
        self, in_channels: int, out_channels: int, inner: int, kernel: int, stride: int, act: ActivationName
    ) -> None:
        self.layers = nn.Sequential(
            *_conv(in_channels, inner, 1),
            activation(act),
            *_conv(inner, inner, kernel, stride, inner),
            activation(act),
            *_conv(inner, out_channels, 1),
        )
        self.adds = in_channels == out_channels and stride == 1

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y: nn.Tensor = self.layers(x)
        return x + y if self.adds else y


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution with He initialization, padded to keep the size, and batch normalization in place of a bias."""
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out" if groups == 1 else "fan_in", nonlinearity="relu")
    return [conv, nn.BatchNorm2d(out_channels)]
