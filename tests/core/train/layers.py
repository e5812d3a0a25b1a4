"""One small model per kind of layer, with a symbolic number of rows, whose training step is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ops.opdef.terms import Term, Writer
from tests.core.train.models import weight

Layer: TypeAlias = Callable[[Writer, Term], Term]
CLASSES, WORDS = 4, 30


def model(layer: Layer, *shape: int, dtype: DType = DType.FLOAT32) -> Graph:
    """`layer` of rows of this shape, and a linear layer on top."""
    graph = Graph("model")
    writer = Writer(graph)
    flat = layer(writer, writer.input("x", TensorType(dtype, (symbol("n"), *shape)))).op("Flatten")
    last = flat.shape[1]
    assert isinstance(last, int)
    graph.outputs = [(flat @ weight(writer, "head", last, CLASSES)).value]
    return graph


def feeds(graph: Graph, rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    (x,) = graph.inputs
    shape = (rows, *(extent for extent in x.shape[1:] if isinstance(extent, int)))
    data = rng.integers(0, WORDS, shape) if x.dtype is DType.INT64 else rng.normal(0, 1, shape).astype(np.float32)
    return {"x": data, "target": rng.integers(0, CLASSES, rows)}


def conv(shape: tuple[int, ...], **attrs: Any) -> Layer:
    """Two convolutions, so that the second one's gradient passes through the first."""

    def layer(w: Writer, x: Term) -> Term:
        inputs = x.shape[1]
        assert isinstance(inputs, int)
        first = x.op("Conv", weight(w, "first", shape[0], inputs, *(1,) * (len(shape) - 2)))
        return first.op("Relu").op("Conv", weight(w, "c", *shape), weight(w, "d", shape[0]), **attrs)

    return layer


def transposed(w: Writer, x: Term) -> Term:
    wide = x.op("ConvTranspose", weight(w, "c", 4, 6, 3, 3), weight(w, "d", 6), strides=(2, 2)).op("Relu")
    return wide.op("ConvTranspose", weight(w, "e", 6, 2, 3, 3), strides=(2, 2), pads=(1, 1, 1, 1))


def pool(op: str, **attrs: Any) -> Layer:
    return lambda w, x: x.op("Conv", weight(w, "c", 5, 3, 3, 3)).op(op, **attrs)


def recurrent(op: str, gates: int, **attrs: Any) -> Layer:
    directions = 2 if attrs.get("direction") == "bidirectional" else 1

    def layer(w: Writer, x: Term) -> Term:
        weights = [weight(w, "w", directions, gates * 6, 5), weight(w, "r", directions, gates * 6, 6)]
        bias = weight(w, "b", directions, 2 * gates * 6)
        return x.transpose(1, 0, 2).op(op, *weights, bias, hidden_size=6, **attrs).transpose(2, 0, 1, 3)

    return layer


def normalized(op: str, operands: int, **attrs: Any) -> Layer:
    def layer(w: Writer, x: Term) -> Term:
        extent = x.shape[-1] if op in ("LayerNormalization", "RMSNormalization") else x.shape[1]
        assert isinstance(extent, int)
        numbers = [w.array(np.linspace(0.5, 1.5, extent, dtype=np.float32), name=f"p{i}") for i in range(operands)]
        return (x * 2).op(op, *numbers, **attrs).op("Relu")

    return layer


def attention(w: Writer, x: Term) -> Term:
    query, key, value = (x @ weight(w, name, 5, 5) for name in "qkv")
    return (query @ key.swap()).op("Softmax") @ value


def words(w: Writer, x: Term) -> Term:
    places = weight(w, "places", 9, 5).gather(w.array(np.arange(7)))
    return (weight(w, "table", WORDS, 5).gather(x) + places).op("Tanh")


def resized(w: Writer, x: Term) -> Term:
    scales = w.array(np.array([1, 1, 2, 2], np.float32))
    return x.op("Conv", weight(w, "c", 4, 3, 3, 3)).op("Resize", None, scales, mode="linear")


def first_token(w: Writer, x: Term) -> Term:
    return (x @ weight(w, "a", 5, 5)).gather(w.array(0), axis=1)


def joined(w: Writer, x: Term) -> Term:
    y = x @ weight(w, "a", 5, 8)
    left, right = y.slice(2, 0, 4), y.slice(2, 4, 8)
    return left.op("Concat", left * right, y, axis=2).pad([(0, 0), (1, 1), (0, 0)])


ONE, TWO, IMAGE = (4, 4, 3), (4, 4, 3, 3), (3, 10, 9)
LAYERS: dict[str, Graph] = {
    "strided": model(conv(TWO, strides=(2, 2), pads=(1, 1, 1, 1)), *IMAGE),
    "grouped": model(conv((6, 3, 3, 3), group=2), *IMAGE),
    "depthwise": model(conv((6, 1, 3, 3), group=6, pads=(1, 1, 1, 1)), *IMAGE),
    "dilated": model(conv(TWO, dilations=(2, 2)), *IMAGE),
    "long window": model(conv((4, 4, 1, 9), pads=(0, 4, 0, 4)), *IMAGE),
    "sound": model(conv(ONE, strides=(2,)), 3, 20),
    "video": model(conv((4, 4, 2, 3, 2), strides=(1, 2, 1)), 2, 4, 6, 5),
    "transposed": model(transposed, 4, 5, 4),
    "maxpool": model(pool("MaxPool", kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)), *IMAGE),
    "averagepool": model(pool("AveragePool", kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)), *IMAGE),
    "global average": model(pool("GlobalAveragePool"), *IMAGE),
    "rnn": model(recurrent("RNN", 1), 6, 5),
    "gru": model(recurrent("GRU", 3), 6, 5),
    "gru reset early": model(recurrent("GRU", 3, linear_before_reset=1), 6, 5),
    "lstm": model(recurrent("LSTM", 4, direction="bidirectional"), 6, 5),
    "batchnorm": model(normalized("BatchNormalization", 4), *IMAGE),
    "groupnorm": model(normalized("GroupNormalization", 2, num_groups=2), 4, 6, 5),
    "layernorm": model(normalized("LayerNormalization", 2, axis=-1), 6, 5),
    "rmsnorm": model(normalized("RMSNormalization", 1, axis=-1), 6, 5),
    "attention": model(attention, 6, 5),
    "words": model(words, 7, dtype=DType.INT64),
    "resized": model(resized, *IMAGE),
    "first token": model(first_token, 6, 5),
    "joined": model(joined, 6, 5),
}
