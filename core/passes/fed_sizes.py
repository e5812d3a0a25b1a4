"""Sizes that are fed as numbers: the total length of a decoder's sequences, as ONNX Runtime GenAI gives it.

An extent that is the larger one of a size and a number that is fed shows only in a run, so nothing behind it could be
compiled. Each such number gets a *shadow*: a further input that is as long as the number says, and whose elements
nobody reads. Its length is a symbol like every other one. Whoever runs the model makes the shadows: callers know
nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from core.ir.dim import symbol
from core.ir.graph import Graph, Node, Value
from core.ir.types import DType, TensorType, ValueType
from core.ops.inference import infer_graph
from core.passes.base import PassResult
from core.passes.edit import Editor

Shadows: TypeAlias = Mapping[str, str]  # names of shadows, and of the inputs whose numbers they show

_MARK = "#length"  # how the names of shadows end
_SAME_NUMBER = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")


def shadows_of(inputs: Mapping[str, ValueType]) -> Shadows:
    """The shadows among the inputs of a model."""
    found = ((name, name.removesuffix(_MARK)) for name in inputs if name.endswith(_MARK))
    return {name: source for name, source in found if source in inputs}


def with_shadows(graph: Graph) -> Graph:
    """A copy in which extents follow from the lengths of shadows, or the graph itself where no number needs one.

    Only the larger one of a known size and a number is looked for: there a negative number is as good as 0.
    """
    if all(node.op != "Max" for node in graph.nodes):
        return graph
    copy = graph.clone()
    result = _Shade(copy, {value.name for value in copy.inputs}).run()
    if not result.changed:
        return graph
    infer_graph(copy)
    return copy


class _Shade:
    """Puts the lengths of shadows into the places of numbers."""

    def __init__(self, graph: Graph, inputs: set[str]) -> None:
        self._graph, self._inputs = graph, inputs
        self._known = infer_graph(graph)
        self._editor = Editor(graph)
        self._shadows: dict[Value, Value] = {}

    def run(self) -> PassResult:
        for node in self._editor.nodes():
            if node.op == "Max" and len(node.inputs) == 2:
                for place in (0, 1):
                    self._replace(node, place)
        return self._editor.finish()

    def _replace(self, node: Node, place: int) -> None:
        number, size = node.inputs[place], node.inputs[1 - place]
        source = self._fed(number)
        if number is None or source is None or size not in self._known:
            return
        length = self._editor.emit(node, "Shape", self._shadow(source), attrs={"start": 0, "end": 1})
        if number.dtype is not DType.INT64:
            length = self._editor.emit(node, "Cast", length, attrs={"to": number.dtype.onnx_code})
        length = self._editor.reshaped(node, length, number.shape)
        self._editor.set_inputs(node, [size, length] if place else [length, size])

    def _fed(self, value: Value | None) -> Value | None:
        """The input of one whole number that a value is."""
        while value is not None and value.producer is not None and value.producer.op in _SAME_NUMBER:
            value = value.producer.inputs[0]
        if value is None or value.name not in self._inputs or not isinstance(value.type, TensorType):
            return None
        is_number = value.dtype in (DType.INT32, DType.INT64) and value.type.shape in ((), (1,))
        return value if is_number and value.producer is None and value not in self._graph.constants else None

    def _shadow(self, source: Value) -> Value:
        if source not in self._shadows:
            taken = {name for value in self._graph.inputs for name in getattr(value.type, "symbols", ())}
            name = next(each for count in range(len(taken) + 1) if (each := f"length{count}") not in taken)
            type_ = TensorType(DType.UINT8, (symbol(name),))
            self._shadows[source] = Value(f"{source.name}{_MARK}", type_)
            self._graph.inputs.append(self._shadows[source])
        return self._shadows[source]
