"""Random models of lathe.core.nn's layers: from images or sequences to the scores of four classes.

They grow by running eagerly: if a layer raises an error for the current shape, another one is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from lathe import nn
from lathe.core.errors import ModelError
from lathe.core.ir.types import Dim

CLASSES = 4
_MOST_ELEMENTS = 3000  # of one row

Choose: TypeAlias = Callable[..., Any]  # one of its arguments
Maker: TypeAlias = Callable[[Choose, tuple[int, ...]], nn.Module]


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y: nn.Tensor = self.inner(x)
        return x + y


class First(nn.Module):
    """The results of a layer that also returns its states."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y: nn.Tensor = self.inner(x)[0]
        return y


class Pixels(nn.Module):
    """Images [N, C, H, W] as sequences [N, H * W, C]."""

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x.flatten(2).transpose(1, 2)


class Mean(nn.Module):
    """Sequences [N, L, C] as their means [N, C]."""

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x.mean(1)


def activation(choose: Choose, shape: tuple[int, ...]) -> nn.Module:
    kinds = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Softplus, nn.Hardswish)
    made: nn.Module = choose(*kinds)()
    return made


def conv(choose: Choose, shape: tuple[int, ...]) -> nn.Module:
    groups = choose(1, 1, 1, shape[1])
    outside = groups * choose(1, 2, 3) if groups > 1 else choose(1, 3, 5, 8, 17)
    kernel = choose(1, 2, 3, 5, (1, 3), (3, 2))
    padding, stride, dilation = choose(0, 1, 2, (1, 0)), choose(1, 1, 2, 3, (2, 1)), choose(1, 1, 1, 2)
    return nn.Conv2d(shape[1], outside, kernel, stride, padding, dilation, groups, bias=choose(True, False))


def conv_transpose(choose: Choose, shape: tuple[int, ...]) -> nn.Module:
    groups = choose(1, 1, shape[1])
    return nn.ConvTranspose2d(
        shape[1], groups * choose(1, 2, 4), choose(2, 3), choose(1, 2), choose(0, 1), groups=groups
    )


def residual(choose: Choose, shape: tuple[int, ...]) -> nn.Module:
    channels = shape[1]
    inner = [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), activation(choose, shape)]
    return Residual(nn.Sequential(*inner[: choose(1, 2, 3)]))


def encoder(choose: Choose, shape: tuple[int, ...]) -> nn.Module:
    heads = choose(*(n for n in (1, 2, 3, 4) if shape[2] % n == 0))
    width, norm_first = choose(3, 8, 19), choose(True, False)
    act = choose("relu", "gelu")
    return nn.TransformerEncoderLayer(shape[2], heads, width, 0.0, act, batch_first=True, norm_first=norm_first)


def recurrent(choose: Choose, shape: tuple[int, ...]) -> nn.Module:
    kind = choose(nn.GRU, nn.LSTM)
    return First(kind(shape[2], choose(2, 5, 8), batch_first=True, bidirectional=choose(True, False)))


IMAGES: tuple[Maker, ...] = (
    conv, conv, conv, conv_transpose, residual, activation, activation,
    lambda choose, _: nn.MaxPool2d(choose((1, 2), (2, 1)), choose(None, 1, 2)),
    lambda choose, _: nn.MaxPool2d(choose(2, 3), choose(None, 1, 2), choose(0, 0, 1)),
    lambda choose, _: nn.AvgPool2d(choose(2, 3), choose(None, 1, 2), choose(0, 0, 1)),
    lambda choose, _: nn.AdaptiveAvgPool2d(choose(1, 2, (3, 2))),
    lambda choose, shape: nn.BatchNorm2d(shape[1], affine=choose(True, True, False)),
    lambda choose, shape: nn.GroupNorm(choose(1, shape[1]), shape[1]),
    lambda choose, shape: nn.InstanceNorm2d(shape[1], affine=choose(True, False)),
    lambda choose, shape: nn.PReLU(choose(1, shape[1])),
    lambda choose, _: nn.Upsample(scale_factor=2, mode=choose("nearest", "bilinear")),
    lambda choose, _: nn.ZeroPad2d(choose(1, (0, 1, 2, 0))),
)  # fmt: skip

SEQUENCES: tuple[Maker, ...] = (
    encoder, recurrent, activation,
    lambda choose, shape: nn.Linear(shape[2], choose(1, 4, 9, 16), bias=choose(True, False)),
    lambda choose, shape: nn.LayerNorm(shape[2]),
    lambda choose, shape: nn.RMSNorm(shape[2]),
    lambda choose, shape: Residual(nn.Linear(shape[2], shape[2])),
)  # fmt: skip

ROWS: tuple[Maker, ...] = (
    activation,
    lambda choose, shape: nn.Linear(shape[1], choose(2, 7, 16, 33)),
    lambda choose, shape: nn.BatchNorm1d(shape[1]),
    lambda choose, shape: nn.LayerNorm(shape[1]),
)


class Growing:
    """A model under construction, and its output for two rows."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.layers: list[nn.Module] = []
        self.row = self.choose((3, 9, 8), (1, 12, 7), (5, 6, 6), (6, 5), (1, 16))
        self._x = nn.tensor(self._rng.normal(0, 1, (2, *self.row)).astype(np.float32))

    def choose(self, *options: Any) -> Any:
        return options[int(self._rng.integers(len(options)))]

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self._x.shape

    def append(self, layer: nn.Module) -> bool:
        """Append a layer. False if it does not fit."""
        try:
            y = layer(self._x)
        except ModelError:
            return False
        size = y.numpy().size
        if not 0 < size <= 2 * _MOST_ELEMENTS:
            return False
        self._x = y
        self.layers.append(layer)
        return True

    def grow(self, makers: tuple[Maker, ...], most: int) -> None:
        for _ in range(int(self._rng.integers(1, most + 1))):
            self.append(self.choose(*makers)(self.choose, self.shape))


def model(seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    """A module, the same for the same seed, and the shape of a row of its input."""
    with nn.seeded(seed):
        growing = Growing(seed)
        if len(growing.row) == 3:
            growing.grow(IMAGES, 7)
            growing.append(growing.choose(Pixels(), nn.Flatten()))
        if len(growing.shape) == 3:
            growing.grow(SEQUENCES, 3)
            growing.append(growing.choose(Mean(), nn.Flatten()))
        growing.grow(ROWS, 2)
        width = growing.shape[1]
        assert isinstance(width, int)
        return nn.Sequential(*growing.layers, nn.Linear(width, CLASSES)), growing.row
