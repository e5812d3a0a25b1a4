"""Small models to train, as ONNX files would give them: weights are constants."""

from __future__ import annotations

from typing import Any

import numpy as np

from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ops.opdef.terms import Term, Writer

F32 = DType.FLOAT32


def weight(writer: Writer, name: str, *shape: int) -> Term:
    """Random, by the name; scaled so that activations keep their size."""
    rng = np.random.default_rng(sum(map(ord, name)))
    return writer.array(rng.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape).astype(np.float32), name=name)


def perceptron(features: int = 5, classes: int = 3) -> Graph:
    graph = Graph("perceptron")
    writer = Writer(graph)
    x = writer.input("x", TensorType(F32, (symbol("n"), features)))
    hidden = x.op("Gemm", weight(writer, "w1", 7, features), weight(writer, "b1", 7), transB=1).op("Relu")
    graph.outputs = [hidden.op("Gemm", weight(writer, "w2", classes, 7), weight(writer, "b2", classes), transB=1).value]
    return graph


def convolutional(size: int = 8, classes: int = 3) -> Graph:
    """Two convolutions with pooling, batch normalization between them, and a layer on top."""
    graph = Graph("convolutional")
    writer = Writer(graph)
    x = writer.input("x", TensorType(F32, (symbol("n"), 2, size, size)))
    first = x.op("Conv", weight(writer, "c1", 5, 2, 3, 3), weight(writer, "d1", 5), pads=(1, 1, 1, 1))
    scale, bias = weight(writer, "scale", 5) + 1, weight(writer, "bias", 5)
    mean, variance = (writer.array(np.full(5, v, np.float32), name=n) for v, n in ((0, "mean"), (1, "variance")))
    normal = first.op("BatchNormalization", scale, bias, mean, variance).op("Relu")
    pooled = normal.op("MaxPool", kernel_shape=(2, 2), strides=(2, 2))
    second = pooled.op("Conv", weight(writer, "c2", 6, 5, 3, 2), weight(writer, "d2", 6), pads=(0, 1, 2, 0))
    flat = second.op("Relu").op("AveragePool", kernel_shape=(2, 2), strides=(2, 2)).op("Flatten")
    last = flat.shape[1]
    assert isinstance(last, int)
    graph.outputs = [flat.op("Gemm", weight(writer, "w", classes, last), weight(writer, "b", classes), transB=1).value]
    return graph


def batch(graph: Graph, rows: int, classes: int = 3, seed: int = 0) -> dict[str, Any]:
    """A batch whose classes follow from its features."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, classes, rows)
    (value,) = graph.inputs
    x = rng.normal(0, 0.3, (rows, *value.shape[1:])).astype(np.float32)  # type: ignore[arg-type]
    x += target.reshape(rows, *(1,) * (x.ndim - 1)).astype(np.float32) - 1
    return {"x": x, "target": target}
