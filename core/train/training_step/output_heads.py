"""Replaces the last layer of a model, for transfer learning to other classes or targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.inference import forget_types, infer_graph

_SKIPPED_OPS = frozenset({"Softmax", "LogSoftmax", "Sigmoid", "Identity", "Cast"})  # may follow the last layer
_STREAM = 0x4EAD  # separates the random numbers of heads from others with the same seed


@dataclass(frozen=True)
class Head:
    """The last linear layer: its weight of rank 2, the weight's axis of outputs, and its bias."""

    weight: Value
    axis: int
    bias: Value | None


def with_new_head(model: Graph, outputs: int, seed: int) -> Graph:
    """A copy of the model whose last layer has `outputs` outputs and new weights, drawn with `seed`.

    Softmax, LogSoftmax, Sigmoid, Identity and Cast may follow the layer.
    Weights and bias are uniform within 1 / sqrt(inputs of the layer) on both sides of 0, as in PyTorch's `Linear`.
    ModelError if the first output does not come from a Gemm or MatMul (optionally with an Add) with constant weights
    that no other layer uses.
    """
    changed = model.clone()
    changed.defaults.clear()  # the type of a replaced default changes
    head = _find_head(changed)
    weight = changed.constants[head.weight]
    width = weight.shape[1 - head.axis]
    random, bound = np.random.default_rng([_STREAM, seed]), 1 / np.sqrt(width)
    shape = (outputs, width) if head.axis == 0 else (width, outputs)
    _replace_constant(changed, head.weight, random.uniform(-bound, bound, shape).astype(weight.dtype))
    if head.bias is not None:
        before = changed.constants[head.bias]
        bias = random.uniform(-bound, bound, (*before.shape[:-1], outputs)).astype(before.dtype)
        _replace_constant(changed, head.bias, bias)
    forget_types(changed)
    infer_graph(changed)
    return changed


def _find_head(graph: Graph) -> Head:
    producers = {output: node for node in graph.nodes for output in node.outputs}
    node = producers.get(graph.outputs[0])
    while node is not None and node.op in _SKIPPED_OPS:
        node = producers.get(node.required_input(0))
    head = _match_layer(graph, producers, node) if node is not None else None
    if head is None:
        source = node.op if node is not None else "an input"
        raise _error(graph, f"comes from {source}, expected a Gemm or MatMul with constant weights")
    uses = graph.uses()
    for value in (head.weight, head.bias):
        if value is not None and len(uses[value]) > 1:
            raise _error(graph, f"has weights '{value.name}' that other layers use, too")
    return head


def _match_layer(graph: Graph, producers: dict[Value, Node], node: Node) -> Head | None:
    if node.op == "Gemm":
        bias = node.input(2)
        if bias is not None and graph.constant_of(bias) is None:
            return None
        return _head_of_constants(graph, node.input(1), 0 if node.attrs.get("transB") else 1, bias)
    if node.op == "MatMul":
        return _head_of_constants(graph, node.input(1), 1, None)
    if node.op != "Add":
        return None
    bias = next((value for value in node.inputs if value is not None and value in graph.constants), None)
    product = next((producers[value] for value in node.inputs if value is not None and value in producers), None)
    if bias is None or product is None or product.op != "MatMul":
        return None
    return _head_of_constants(graph, product.input(1), 1, bias)


def _head_of_constants(graph: Graph, weight: Value | None, axis: int, bias: Value | None) -> Head | None:
    array = graph.constant_of(weight)
    if weight is None or array is None or array.ndim != 2:
        return None
    fits = bias is None or (graph.constants[bias].ndim and graph.constants[bias].shape[-1] == array.shape[axis])
    return Head(weight, axis, bias) if fits else None


def _replace_constant(graph: Graph, value: Value, array: Array) -> None:
    array.setflags(write=False)
    graph.constants[value] = array
    value.type = TensorType(DType.from_numpy(array.dtype), array.shape)


def _error(graph: Graph, why: str) -> ModelError:
    message = f"cannot get a new last layer: output '{graph.outputs[0].name}' {why}"
    return ModelError(message, where=f"graph '{graph.name}'")
