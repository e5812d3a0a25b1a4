"""Adds length inputs ("shadows") for sizes that a model takes as numbers, such as a decoder's total sequence length.

ONNX Runtime GenAI feeds that length as a number. An extent max(size, number) is then data-dependent, and nothing after
it could be compiled. So each such number gets a *shadow*: an additional input whose length is the number, and whose
elements no node reads. The extent then depends on a symbol like any other. The session creates the shadows
(`runtime/session/shadow_inputs.py`); callers never see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.rewrite.base import PassResult
from lathe.core.passes.rewrite.editor import Editor

LengthInputs: TypeAlias = Mapping[str, str]  # from names of shadows to names of the inputs that hold their lengths

_MARK = "#length"  # the suffix of the names of shadows
_SAME_NUMBER = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")


def length_inputs_of(inputs: Mapping[str, ValueType]) -> LengthInputs:
    """For each length input (shadow) of a model, by name, the name of the input whose number is its length."""
    found = ((name, name.removesuffix(_MARK)) for name in inputs if name.endswith(_MARK))
    return {name: source for name, source in found if source in inputs}


def with_length_inputs(graph: Graph) -> Graph:
    """A copy in which numbers are replaced with lengths of added shadow inputs; `graph` itself if no number needs one.

    Only Max of a known size and a number is rewritten: there a negative number has the same effect as the length 0.
    """
    if all(node.op != "Max" for node in graph.nodes):
        return graph
    copy = graph.clone()
    result = _ShadowPass(copy, {value.name for value in copy.inputs}).run()
    if not result.changed:
        return graph
    infer_graph(copy)
    return copy


class _ShadowPass:
    """Replaces the operand of each Max that is a fed number with the length of a shadow, if the other is known."""

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
        source = self._number_input(number)
        if number is None or source is None or size not in self._known:
            return
        length = self._editor.emit(node, "Shape", self._shadow(source), attrs={"start": 0, "end": 1})
        if number.dtype is not DType.INT64:
            length = self._editor.emit(node, "Cast", length, attrs={"to": number.dtype.onnx_code})
        length = self._editor.reshaped(node, length, number.shape)
        self._editor.set_inputs(node, [size, length] if place else [length, size])

    def _number_input(self, value: Value | None) -> Value | None:
        """The graph input of one int32 or int64 element whose number `value` has unchanged; None if there is none."""
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
