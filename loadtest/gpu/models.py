"""ResNet-50 and MiniLM, written once: a writer turns them into ONNX, or runs them in PyTorch (pytorch_peers.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import onnx

from loadtest import model_builder as build

LENGTH, WIDTH, HEADS, LAYERS = 128, 384, 12, 6  # of MiniLM-L6


class Writer(Protocol):
    """The operators that a model is written with. The type of the values is up to the writer."""

    def conv(self, x: Any, inputs: int, outputs: int, k: int, stride: int = 1) -> Any: ...
    def batchnorm(self, x: Any, channels: int) -> Any: ...
    def relu(self, x: Any) -> Any: ...
    def add(self, x: Any, y: Any) -> Any: ...
    def pool(self, x: Any) -> Any:
        """Max pooling of 3 x 3 windows with stride 2."""
        ...

    def pool_and_classify(self, x: Any, channels: int, classes: int) -> Any: ...
    def linear(self, x: Any, inputs: int, outputs: int) -> Any: ...
    def layernorm(self, x: Any, width: int) -> Any: ...
    def gelu(self, x: Any) -> Any: ...
    def attend(self, query: Any, key: Any, value: Any, heads: int) -> Any:
        """Scaled dot-product attention of [rows, length, width], head by head."""
        ...


def resnet50(b: Writer, x: Any) -> Any:
    """50 layers, 224 x 224 pixels, the stride in the 3 x 3 convolutions (He et al. 2015, as torchvision has it)."""
    x = b.pool(b.relu(b.batchnorm(b.conv(x, 3, 64, 7, 2), 64)))
    channels = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            x = _bottleneck(b, x, channels, width, stride if index == 0 else 1)
            channels = 4 * width
    return b.pool_and_classify(x, channels, 1000)


def _bottleneck(b: Writer, x: Any, inputs: int, width: int, stride: int) -> Any:
    y = b.relu(b.batchnorm(b.conv(x, inputs, width, 1), width))
    y = b.relu(b.batchnorm(b.conv(y, width, width, 3, stride), width))
    y = b.batchnorm(b.conv(y, width, 4 * width, 1), 4 * width)
    if inputs != 4 * width:
        x = b.batchnorm(b.conv(x, inputs, 4 * width, 1, stride), 4 * width)
    return b.relu(b.add(x, y))


def minilm(b: Writer, x: Any) -> Any:
    """The encoder of all-MiniLM-L6 (Wang et al. 2020) over embedded tokens."""
    for _ in range(LAYERS):
        query, key, value = (b.linear(x, WIDTH, WIDTH) for _ in range(3))
        mixed = b.linear(b.attend(query, key, value, HEADS), WIDTH, WIDTH)
        x = b.layernorm(b.add(x, mixed), WIDTH)
        hidden = b.linear(b.gelu(b.linear(x, WIDTH, 4 * WIDTH)), 4 * WIDTH, WIDTH)
        x = b.layernorm(b.add(x, hidden), WIDTH)
    return x


@dataclass(frozen=True)
class Large:
    """A model: its writer function, and the shapes of its input and output without the batch."""

    write: Callable[[Any, Any], Any]
    shape: tuple[int, ...]
    output: tuple[int, ...]


def small(b: Writer, x: Any) -> Any:
    """A model of one convolution, to test the run itself."""
    return b.pool_and_classify(b.relu(b.conv(x, 3, 4, 3)), 4, 2)


LARGE = {
    "small": Large(small, (3, 8, 8), (2,)),
    "resnet50": Large(resnet50, (3, 224, 224), (1000,)),
    "minilm": Large(minilm, (LENGTH, WIDTH), (LENGTH, WIDTH)),
}


class OnnxWriter(build.Builder):
    """Writes ONNX operators the way exporters do."""

    def relu(self, x: str) -> str:
        return self.op("Relu", x)

    def add(self, x: str, y: str) -> str:
        return self.op("Add", x, y)

    def pool(self, x: str) -> str:
        return self.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)

    def attend(self, query: str, key: str, value: str, heads: int) -> str:
        def split(x: str, perm: list[int]) -> str:
            return self.op("Transpose", self.reshape(x, 0, LENGTH, heads, WIDTH // heads), perm=perm)

        scores = self.op("MatMul", split(query, [0, 2, 1, 3]), split(key, [0, 2, 3, 1]))
        weights = self.op("Softmax", self.op("Mul", scores, self.scalar(1 / math.sqrt(WIDTH / heads))), axis=-1)
        mixed = self.op("Transpose", self.op("MatMul", weights, split(value, [0, 2, 1, 3])), perm=[0, 2, 1, 3])
        return self.reshape(mixed, 0, LENGTH, WIDTH)


def onnx_of(name: str) -> onnx.ModelProto:
    """The ONNX model of this name, with random weights."""
    large = LARGE[name]
    return build.build(name, build.Entry(large.shape, large.write, large.output), OnnxWriter())
