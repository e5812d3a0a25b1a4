"""Models to train with Lathe and PyTorch: `nn` is `lathe.core.nn` or `torch.nn`; the code is the same."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

STEPS = 8
RATE, MOMENTUM = 0.05, 0.9


class Model(NamedTuple):
    """A factory, and the shape and type of the input ("2,3", or "i5:2,3" for integers below 5)."""

    make: Callable[[Any], Any]
    x: str
    classes: int = 3

    def weight(self, name: str, shape: tuple[int, ...]) -> Any:
        """The first value of a parameter or buffer."""
        if name.endswith("num_batches_tracked"):
            return np.zeros(shape, np.int64)
        array = _rng(f"{self.make.__name__}/{name}").normal(0, 0.3, shape).astype(np.float32)
        return np.abs(array) + np.float32(0.5) if name.endswith("running_var") else array

    def batches(self) -> list[tuple[Any, Any]]:
        """Inputs and classes of every step."""
        rng = _rng(self.make.__name__)
        kind, _, shape = self.x.rpartition(":")
        sizes = tuple(map(int, shape.split(",")))
        return [(_drawn(rng, kind, sizes), rng.integers(0, self.classes, sizes[0])) for _ in range(STEPS)]


def _rng(label: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(label.encode()))


def _drawn(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Any:
    if kind:
        return rng.integers(0, int(kind[1:]), shape)
    return rng.normal(0, 1, shape).astype(np.float32)


def convolutional(nn: Any) -> Any:
    # the gradient of a bias before a normalization is only rounding errors
    first = [nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(4, 6, 3, groups=2), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(6, 3))


def generator(nn: Any) -> Any:
    grown = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1)
    return nn.Sequential(grown, nn.GroupNorm(1, 3), nn.LeakyReLU(0.2), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(12, 3))


def encoder(nn: Any) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8))
    return nn.Sequential(nn.Embedding(7, 8, padding_idx=0), layers, nn.Flatten(), nn.Linear(40, 3))


def recurrent(nn: Any) -> Any:
    class Recurrent(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True, bidirectional=True)
            self.gru = nn.GRU(10, 6, batch_first=True)
            self.head = nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 3))

        def forward(self, x: Any) -> Any:
            y, _ = self.lstm(x)
            _, last = self.gru(y)
            return self.head(last[0])

    return Recurrent()


MODELS = [
    Model(convolutional, "6,2,8,7"),
    Model(generator, "5,2,3,3"),
    Model(encoder, "i7:4,5"),
    Model(recurrent, "4,6,4"),
]
