"""Models to measure with, written node by node through onnx.helper: no framework, no download.

Weights are random but seeded and scaled so that activations stay near 1: these measure speed and agreement of
outputs, not accuracy. Every model has one input `x` and one output `y` with a free batch dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17


@dataclass
class Builder:
    """Collects nodes and weights; every method appends one operator and returns the name of its output."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        output = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def constant(self, value: NDArray[Any]) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def normal(self, *shape: int, scale: float = 1.0) -> str:
        return self.constant((self.rng.standard_normal(shape) * scale).astype(np.float32))

    def conv(self, x: str, inputs: int, outputs: int, k: int, stride: int = 1, group: int = 1, pad: int = -1) -> str:
        """He-scaled weights; `pad` defaults to "same"."""
        fan_in = inputs // group * k * k
        weight = self.normal(outputs, inputs // group, k, k, scale=math.sqrt(2 / fan_in))
        edge = k // 2 if pad < 0 else pad
        return self.op("Conv", x, weight, kernel_shape=[k, k], strides=[stride] * 2, pads=[edge] * 4, group=group)

    def batchnorm(self, x: str, channels: int) -> str:
        """Statistics that are not trivial, so that folding them wrongly would show."""
        ranges = ((0.9, 1.1), (-0.1, 0.1), (-0.1, 0.1), (0.8, 1.2))  # scale, bias, mean, variance
        values = [self.constant(self.rng.uniform(*r, channels).astype(np.float32)) for r in ranges]
        return self.op("BatchNormalization", x, *values)

    def dense(self, x: str, inputs: int, outputs: int) -> str:
        weight = self.normal(outputs, inputs, scale=math.sqrt(2 / inputs))
        return self.op("Gemm", x, weight, self.normal(outputs, scale=0.1), transB=1)

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        """MatMul and Add, as exporters write a dense layer on sequences."""
        product = self.op("MatMul", x, self.normal(inputs, outputs, scale=1 / math.sqrt(inputs)))
        return self.op("Add", product, self.normal(outputs, scale=0.1))

    def layernorm(self, x: str, width: int) -> str:
        scale, bias = self.constant(np.ones(width, np.float32)), self.normal(width, scale=0.1)
        return self.op("LayerNormalization", x, scale, bias, axis=-1)

    def pool_and_classify(self, x: str, channels: int, classes: int) -> str:
        flat = self.op("Flatten", self.op("GlobalAveragePool", x))
        return self.dense(flat, channels, classes)


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: its input without the batch, and what builds it."""

    shape: tuple[int, ...]
    build: Callable[[Builder, str], str]
    output: tuple[int, ...]


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
    """18 layers, 64 x 64 pixels (He et al. 2015)."""
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
    return b.op("Clip", x, b.constant(np.array(0, np.float32)), b.constant(np.array(6, np.float32)))


def transformer(b: Builder, x: str, layers: int = 2, width: int = 256, heads: int = 8, length: int = 64) -> str:
    """Encoder layers, normalised after each half (Vaswani et al. 2017), GELU written out."""
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
    h = b.linear(x, width, 4 * width)
    scaled = b.op("Erf", b.op("Div", h, b.constant(np.array(math.sqrt(2), np.float32))))
    gelu = b.op("Mul", h, b.op("Add", scaled, b.constant(np.array(1, np.float32))))
    return b.linear(b.op("Mul", gelu, b.constant(np.array(0.5, np.float32))), 4 * width, width)


def heavy(b: Builder, x: str) -> str:
    """Two gigaflops from 200 bytes: overloads a server before it overloads the load generator beside it."""
    image = b.op("Reshape", b.dense(x, 49, 56 * 56), b.constant(np.array([0, 1, 56, 56], np.int64)))
    x = b.op("Relu", b.conv(image, 1, 64, 3))
    for _ in range(8):
        x = b.op("Relu", b.conv(x, 64, 64, 3))
    return b.pool_and_classify(x, 64, 10)


ZOO = {
    "lenet": Entry((1, 28, 28), lenet, (10,)),
    "mlp": Entry((256,), mlp, (10,)),
    "resnet": Entry((3, 64, 64), resnet, (100,)),
    "mobilenet": Entry((3, 96, 96), mobilenet, (100,)),
    "transformer": Entry((64, 256), transformer, (256,)),
    "heavy": Entry((49,), heavy, (10,)),
}


def model(name: str) -> onnx.ModelProto:
    """Build one; KeyError for a name that ZOO does not have."""
    entry, builder = ZOO[name], Builder()
    entry.build(builder, "x")
    builder.nodes[-1].output[:] = ["y"]  # every model ends with the operator appended last
    graph = helper.make_graph(
        builder.nodes,
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *entry.shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", *entry.output])],
        builder.weights,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(made, full_check=True)
    return made


def sample(name: str, batch: int) -> NDArray[np.float32]:
    """An input of `batch` rows, the same every time."""
    return np.random.default_rng(batch).standard_normal((batch, *ZOO[name].shape), np.float32)
