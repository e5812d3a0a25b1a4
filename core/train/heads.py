"""A new last layer for a model that goes on learning to tell other things than before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.errors import ModelError
from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import DType, TensorType
from core.ops.inference import forget_types, infer_graph

_AFTER = frozenset({"Softmax", "LogSoftmax", "Sigmoid", "Identity", "Cast"})  # what may follow the last layer
_STREAM = 0x4EAD  # heads have random numbers of their own


@dataclass(frozen=True)
class Head:
    """The last layer: its weights, the axis of them that counts outputs, and its bias."""

    weight: Value
    axis: int
    bias: Value | None


def with_head(model: Graph, outputs: int, seed: int) -> Graph:
    """The model with a last layer of so many `outputs`, new weights in it, drawn within 1 / sqrt(its inputs).

    ModelError when the first output does not come from a Gemm or MatMul with weights of its own.
    """
    changed = model.clone()
    changed.defaults.clear()  # the types of some of them change
    head = _head(changed)
    weight = changed.constants[head.weight]
    width = weight.shape[1 - head.axis]
    random, bound = np.random.default_rng([_STREAM, seed]), 1 / np.sqrt(width)
    shape = (outputs, width) if head.axis == 0 else (width, outputs)
    _put(changed, head.weight, random.uniform(-bound, bound, shape).astype(weight.dtype))
    if head.bias is not None:
        before = changed.constants[head.bias]
        bias = random.uniform(-bound, bound, (*before.shape[:-1], outputs)).astype(before.dtype)
        _put(changed, head.bias, bias)
    forget_types(changed)
    infer_graph(changed)
    return changed


def _head(graph: Graph) -> Head:
    makers = {output: node for node in graph.nodes for output in node.outputs}
    node = makers.get(graph.outputs[0])
    while node is not None and node.op in _AFTER:
        node = makers.get(_first(node))
    found = _layer(graph, makers, node) if node is not None else None
    if found is None:
        came = node.op if node is not None else "an input"
        raise _refused(graph, f"comes from {came}, expected Gemm, or MatMul, with weights of its own")
    uses = graph.uses()
    for value in (found.weight, found.bias):
        if value is not None and len(uses[value]) > 1:
            raise _refused(graph, f"has weights '{value.name}' that other layers use as well")
    return found


def _layer(graph: Graph, makers: dict[Value, Node], node: Node) -> Head | None:
    if node.op == "Gemm":
        bias = node.input(2)
        if bias is not None and graph.constant_of(bias) is None:
            return None
        return _checked(graph, node.input(1), 0 if node.attrs.get("transB") else 1, bias)
    if node.op == "MatMul":
        return _checked(graph, node.input(1), 1, None)
    if node.op != "Add":
        return None
    bias = next((value for value in node.inputs if value is not None and value in graph.constants), None)
    product = next((makers[value] for value in node.inputs if value is not None and value in makers), None)
    if bias is None or product is None or product.op != "MatMul":
        return None
    return _checked(graph, product.input(1), 1, bias)


def _checked(graph: Graph, weight: Value | None, axis: int, bias: Value | None) -> Head | None:
    array = graph.constant_of(weight)
    if weight is None or array is None or array.ndim != 2:
        return None
    fits = bias is None or (graph.constants[bias].ndim and graph.constants[bias].shape[-1] == array.shape[axis])
    return Head(weight, axis, bias) if fits else None


def _first(node: Node) -> Value:
    value = node.inputs[0]
    assert value is not None
    return value


def _put(graph: Graph, value: Value, array: Array) -> None:
    array.setflags(write=False)
    graph.constants[value] = array
    value.type = TensorType(DType.from_numpy(array.dtype), array.shape)


def _refused(graph: Graph, why: str) -> ModelError:
    message = f"cannot get a new last layer: output '{graph.outputs[0].name}' {why}"
    return ModelError(message, where=f"graph '{graph.name}'")
