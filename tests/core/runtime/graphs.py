"""Small models for the runtime's tests."""

from __future__ import annotations

import numpy as np

import lathe.core.ops  # noqa: F401
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, State
from lathe.core.ir.types import DType, TensorType, symbol

N = symbol("batch")


def mlp(seed: int = 0, hidden: int = 48) -> Graph:
    """[batch, 20] -> [batch, 7], one hidden layer."""
    rng = np.random.default_rng(seed)
    graph = Graph("mlp")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, 20)))
    for width in (hidden, 7):
        w = b.constant(rng.standard_normal((x.shape[-1], width), np.float32), "w")  # type: ignore[arg-type]
        bias = b.constant(rng.standard_normal(width, np.float32), "b")
        x = b("Add", b("MatMul", x, w), bias)
        x = b("Relu", x) if width == hidden else x
    graph.outputs = [x]
    return graph


def sequence() -> Graph:
    """A model of two symbols: [batch, length, 8] -> [batch, length + 2, 8], resampled.

    Resize with antialiasing has a kernel only for known sizes, so no part of the model has dynamic-shape code."""
    graph = Graph("sequence")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, symbol("length"), 8)))
    one, more = (b.constant(np.array([number]), "c") for number in (1, 2))
    sizes = b("Add", b("Shape", x, start=1, end=2), more)
    image = b("Unsqueeze", x, one)
    resized = b("Resize", image, None, None, sizes, mode="linear", antialias=1, axes=(2,))
    graph.outputs = [b("Squeeze", resized, one)]
    return graph


def counter() -> Graph:
    """A state that grows by the input's row each run."""
    graph = Graph("counter")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (4,)))
    from lathe.core.ir.graph import Value

    total = Value("total", TensorType(DType.FLOAT32, (4,)))
    graph.states = [State(total, total, np.zeros(4, np.float32))]
    after = b("Add", total, x)
    graph.states[0].update = after
    graph.outputs = [after]
    return graph


def lookup() -> Graph:
    """ids [batch] into a table of five rows."""
    graph = Graph("lookup")
    b = Builder(graph)
    ids = b.input("ids", TensorType(DType.INT64, (N,)))
    table = b.constant(np.arange(15, dtype=np.float32).reshape(5, 3), "table")
    graph.outputs = [b("Gather", table, ids, axis=0)]
    return graph


def convolution() -> Graph:
    """[batch, 16, 32, 32], 3x3: kernels of convolutions use scratch memory of their own per thread."""
    graph = Graph("convolution")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, 16, 32, 32)))
    w = b.constant(np.random.default_rng(0).standard_normal((16, 16, 3, 3), np.float32))
    graph.outputs = [b("Conv", x, w, pads=(1, 1, 1, 1))]
    return graph
