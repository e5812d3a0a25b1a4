"""The whole networks of ONNX's suite with random weights; the files hold only the structure and constants.

Weights are scaled so that activations keep their size from layer to layer, and statistics of batch normalization are
near those of such activations. So rounding errors are those of a trained network, not of exploding activations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from tests.core.conformance.models import models_of_kind

NAMES = sorted(models_of_kind("real"))

_STATISTICS = {1: (0.8, 1.2), 2: (-0.1, 0.1), 3: (-0.1, 0.1), 4: (0.8, 1.2)}  # of BatchNormalization's inputs, by index


def with_random_weights(name: str, seed: int = 0) -> onnx.ModelProto:
    """The model with random numbers in place of every ConstantOfShape node and every float32 initializer."""
    model = onnx.ModelProto.FromString(models_of_kind("real")[name].read())
    graph, rng = model.graph, np.random.default_rng(seed)
    roles = _roles(graph)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made = {node.output[0]: shapes[node.input[0]] for node in graph.node if node.op_type == "ConstantOfShape"}
    weights = {name: _drawn(rng, tuple(shape.tolist()), *roles[name]) for name, shape in made.items() if name in roles}
    kept = [node for node in graph.node if not (node.output and node.output[0] in weights)]
    del graph.node[:]
    graph.node.extend(kept)
    for tensor in graph.initializer:
        array = shapes[tensor.name]
        if array.dtype == np.float32 and tensor.name in roles:
            tensor.CopyFrom(numpy_helper.from_array(_drawn(rng, array.shape, *roles[tensor.name]), tensor.name))
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    _end_before_softmax(graph)
    return model


def _end_before_softmax(graph: onnx.GraphProto) -> None:
    """End the graph before a last Softmax: probabilities of random logits are mostly 0 and 1, which hides errors."""
    last = graph.node[-1]
    if last.op_type == "Softmax":
        graph.output[0].CopyFrom(onnx.ValueInfoProto(name=last.input[0]))
        del graph.node[-1]


def image(model: onnx.ModelProto, seed: int = 0) -> dict[str, Any]:
    """A random input for each input that has no initializer."""
    rng, known = np.random.default_rng(seed), {tensor.name for tensor in model.graph.initializer}
    return {
        info.name: rng.standard_normal([d.dim_value for d in info.type.tensor_type.shape.dim], np.float32)
        for info in model.graph.input
        if info.name not in known
    }


def _roles(graph: onnx.GraphProto) -> dict[str, tuple[str, int]]:
    """The readers of each weight: operator and input index."""
    return {name: (node.op_type, index) for node in graph.node for index, name in enumerate(node.input) if index > 0}


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], op: str, index: int) -> np.ndarray:
    if op == "BatchNormalization":
        return rng.uniform(*_STATISTICS[index], shape).astype(np.float32)
    if len(shape) < 2:
        return rng.uniform(-0.1, 0.1, shape).astype(np.float32)
    spread = math.sqrt(2 / math.prod(shape[1:]))
    return (rng.standard_normal(shape, np.float32) * np.float32(spread)).astype(np.float32)
