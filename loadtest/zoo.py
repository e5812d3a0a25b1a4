"""Models for measurements: those that Lathe's kernels were tuned for, and others from `loadtest.models`.

Every model has an input `x` and one output `y` with a dynamic batch dimension. Weights are random.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from loadtest import model_builder as build
from loadtest import models
from loadtest.model_builder import Builder, Entry


def lenet(b: Builder, x: str) -> str:
    x = b.op("Relu", b.conv(x, 1, 6, 5))
    x = b.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = b.op("Relu", b.conv(x, 6, 16, 5, pad=0))
    x = b.op("Flatten", b.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]))
    x = b.op("Relu", b.dense(x, 400, 120))
    x = b.op("Relu", b.dense(x, 120, 84))
    return b.dense(x, 84, 10)


def mlp(b: Builder, x: str) -> str:
    x = b.op("Relu", b.dense(x, 256, 512))
    x = b.op("Relu", b.dense(x, 512, 512))
    return b.dense(x, 512, 10)


def resnet(b: Builder, x: str) -> str:
    """ResNet-18 for 64 x 64 pixels (He et al. 2015)."""
    x = b.op("Relu", b.batchnorm(b.conv(x, 3, 64, 3, stride=2), 64))
    channels = 64
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        x = residual_block(b, x, channels, width, stride)
        channels = width
    return b.pool_and_classify(x, channels, 100)


def residual_block(b: Builder, x: str, inputs: int, outputs: int, stride: int) -> str:
    y = b.op("Relu", b.batchnorm(b.conv(x, inputs, outputs, 3, stride), outputs))
    y = b.batchnorm(b.conv(y, outputs, outputs, 3), outputs)
    if stride != 1 or inputs != outputs:
        x = b.batchnorm(b.conv(x, inputs, outputs, 1, stride), outputs)
    return b.op("Relu", b.op("Add", x, y))


def mobilenet(b: Builder, x: str) -> str:
    """Inverted residuals with depthwise convolutions, 96 x 96 pixels (Sandler et al. 2018)."""
    x = relu6(b, b.batchnorm(b.conv(x, 3, 32, 3, stride=2), 32))
    channels = 32
    for expansion, width, stride in (
        (1, 16, 1),
        (6, 24, 2),
        (6, 24, 1),
        (6, 32, 2),
        (6, 32, 1),
        (6, 64, 2),
        (6, 96, 1),
    ):
        x = inverted_residual(b, x, channels, expansion, width, stride)
        channels = width
    return b.pool_and_classify(relu6(b, b.batchnorm(b.conv(x, channels, 640, 1), 640)), 640, 100)


def inverted_residual(b: Builder, x: str, inputs: int, expansion: int, outputs: int, stride: int) -> str:
    hidden, y = inputs * expansion, x
    if expansion != 1:
        y = relu6(b, b.batchnorm(b.conv(y, inputs, hidden, 1), hidden))
    y = relu6(b, b.batchnorm(b.conv(y, hidden, hidden, 3, stride, group=hidden), hidden))
    y = b.batchnorm(b.conv(y, hidden, outputs, 1), outputs)
    return b.op("Add", x, y) if stride == 1 and inputs == outputs else y


def relu6(b: Builder, x: str) -> str:
    return b.op("Clip", x, b.scalar(0), b.scalar(6))


def transformer(b: Builder, x: str, layers: int = 2, width: int = 256, heads: int = 8, length: int = 64) -> str:
    """Post-norm encoder layers (Vaswani et al. 2017), with GELU as primitive operators."""
    for _ in range(layers):
        x = b.layernorm(b.op("Add", x, attention(b, x, width, heads, length)), width)
        x = b.layernorm(b.op("Add", x, feed_forward(b, x, width)), width)
    return b.op("ReduceMean", x, axes=[1], keepdims=0)


def attention(b: Builder, x: str, width: int, heads: int, length: int) -> str:
    split = b.constant(np.array([0, length, heads, width // heads], np.int64))

    def head(axes: list[int]) -> str:
        return b.op("Transpose", b.op("Reshape", b.linear(x, width, width), split), perm=axes)

    query, key, value = head([0, 2, 1, 3]), head([0, 2, 3, 1]), head([0, 2, 1, 3])
    scale = b.constant(np.array(1 / math.sqrt(width / heads), np.float32))
    weights = b.op("Softmax", b.op("Mul", b.op("MatMul", query, key), scale), axis=-1)
    mixed = b.op("Transpose", b.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    joined = b.op("Reshape", mixed, b.constant(np.array([0, length, width], np.int64)))
    return b.linear(joined, width, width)


def feed_forward(b: Builder, x: str, width: int) -> str:
    return b.linear(b.gelu(b.linear(x, width, 4 * width)), 4 * width, width)


def heavy(b: Builder, x: str) -> str:
    """2 GFLOP per 200-byte row: overloads a server before it overloads the load generator on the same machine."""
    image = b.op("Reshape", b.dense(x, 49, 56 * 56), b.constant(np.array([0, 1, 56, 56], np.int64)))
    x = b.op("Relu", b.conv(image, 1, 64, 3))
    for _ in range(8):
        x = b.op("Relu", b.conv(x, 64, 64, 3))
    return b.pool_and_classify(x, 64, 10)


def convolution_stack(depth: int) -> onnx.ModelProto:
    """A model whose run time `depth` sets: a small convolution, then `depth` ones of 14 MFLOP per 200-byte row each."""

    def layers(b: Builder, x: str) -> str:
        x = b.op("Relu", b.conv(b.reshape(b.dense(x, 49, 14 * 14), 0, 1, 14, 14), 1, 64, 3))
        for _ in range(depth):
            x = b.op("Relu", b.conv(x, 64, 64, 3))
        return b.pool_and_classify(x, 64, 10)

    return build.build(f"burden-{depth}", Entry((49,), layers, (10,)))


TUNED = {
    "lenet": Entry((1, 28, 28), lenet, (10,)),
    "mlp": Entry((256,), mlp, (10,)),
    "resnet": Entry((3, 64, 64), resnet, (100,)),
    "mobilenet": Entry((3, 96, 96), mobilenet, (100,)),
    "transformer": Entry((64, 256), transformer, (256,)),
    "heavy": Entry((49,), heavy, (10,)),
}
ZOO = {**TUNED, **models.OTHERS}


def model(name: str) -> onnx.ModelProto:
    """Build the model of this name. KeyError if ZOO has none."""
    return build.build(name, ZOO[name])


def feeds(name: str, batch: int) -> build.Feeds:
    """Random inputs of `batch` rows, the same in every run."""
    return build.feeds(ZOO[name], batch)


def sample(name: str, batch: int) -> NDArray[Any]:
    """The input `x` of `batch` rows."""
    return feeds(name, batch)["x"]
