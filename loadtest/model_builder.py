"""Builds ONNX models node by node with onnx.helper: no framework, no download.

Weights are random but seeded, and scaled so that activations stay near 1: the models measure speed and the agreement of
outputs, not accuracy. Every model has an input `x`, possibly others, and one output `y`. The batch dimension is
dynamic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
Feeds = dict[str, NDArray[Any]]


@dataclass
class Builder:
    """Collects nodes and weights; every method appends operators or weights, and returns the name of the last value."""

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
        """A convolution with He-scaled weights. `pad` < 0 means padding by `k // 2` ("same" at stride 1)."""
        fan_in = inputs // group * k * k
        weight = self.normal(outputs, inputs // group, k, k, scale=math.sqrt(2 / fan_in))
        edge = k // 2 if pad < 0 else pad
        return self.op("Conv", x, weight, kernel_shape=[k, k], strides=[stride] * 2, pads=[edge] * 4, group=group)

    def batchnorm(self, x: str, channels: int) -> str:
        """BatchNormalization with non-trivial statistics, so that a wrong folding changes the output."""
        ranges = ((0.9, 1.1), (-0.1, 0.1), (-0.1, 0.1), (0.8, 1.2))  # scale, bias, mean, variance
        values = [self.constant(self.rng.uniform(*r, channels).astype(np.float32)) for r in ranges]
        return self.op("BatchNormalization", x, *values)

    def dense(self, x: str, inputs: int, outputs: int) -> str:
        weight = self.normal(outputs, inputs, scale=math.sqrt(2 / inputs))
        return self.op("Gemm", x, weight, self.normal(outputs, scale=0.1), transB=1)

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        """A dense layer as MatMul and Add, the way exporters write it for sequences."""
        product = self.op("MatMul", x, self.normal(inputs, outputs, scale=1 / math.sqrt(inputs)))
        return self.op("Add", product, self.normal(outputs, scale=0.1))

    def layernorm(self, x: str, width: int) -> str:
        scale, bias = self.constant(np.ones(width, np.float32)), self.normal(width, scale=0.1)
        return self.op("LayerNormalization", x, scale, bias, axis=-1)

    def pool_and_classify(self, x: str, channels: int, classes: int) -> str:
        flat = self.op("Flatten", self.op("GlobalAveragePool", x))
        return self.dense(flat, channels, classes)

    def scalar(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def reshape(self, x: str, *shape: int) -> str:
        """A Reshape to `shape`, where 0 keeps the input's dimension."""
        return self.op("Reshape", x, self.integers(*shape))

    def slice(self, x: str, start: int, stop: int, axis: int) -> str:
        return self.op("Slice", x, self.integers(start), self.integers(stop), self.integers(axis))

    def silu(self, x: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", x))

    def gelu(self, x: str) -> str:
        """The exact GELU as Div, Erf, Add and Mul, the way exporters write it."""
        scaled = self.op("Erf", self.op("Div", x, self.scalar(math.sqrt(2))))
        product = self.op("Mul", x, self.op("Add", scaled, self.scalar(1)))
        return self.op("Mul", product, self.scalar(0.5))


@dataclass(frozen=True)
class Entry:
    """A model: the shape of its input `x`, its builder, and the shape of its output `y`, both without the batch.

    `ids` are further integer inputs: name -> (values per row, number of distinct values).
    """

    shape: tuple[int, ...]
    build: Callable[[Builder, str], str]
    output: tuple[int, ...]
    ids: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def build(name: str, entry: Entry, builder: Builder | None = None) -> onnx.ModelProto:
    builder = builder or Builder()
    entry.build(builder, "x")
    builder.nodes[-1].output[:] = ["y"]  # every model ends with the operator appended last
    graph = helper.make_graph(
        builder.nodes,
        name,
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *entry.shape]),
            *(helper.make_tensor_value_info(i, TensorProto.INT64, ["batch", c]) for i, (c, _) in entry.ids.items()),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", *entry.output])],
        builder.weights,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(made, full_check=True)
    return made


def feeds(entry: Entry, batch: int) -> Feeds:
    """Random inputs of `batch` rows. The batch size is the seed, so they are the same in every run."""
    rng = np.random.default_rng(batch)
    made: Feeds = {"x": rng.standard_normal((batch, *entry.shape), np.float32)}
    for name, (count, choices) in entry.ids.items():
        made[name] = rng.integers(0, choices, (batch, count))
    return made
