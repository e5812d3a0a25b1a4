"""`Builder`: adds nodes with inferred types at the end of a graph, or before a given node."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType, TensorType, ValueType

Inference: TypeAlias = Callable[[Node, dict[Value, Array]], None]

# Inference needs the operators, which lie above the IR; lathe.core.ops installs it when it is imported.
_inference: list[Inference] = []


def set_inference(inference: Inference) -> None:
    """Install the function that sets the types of a new node's outputs, for all builders of the process.

    The function gets the node and the arrays of values that are known so far, to which it adds those of the outputs.
    """
    _inference[:] = [inference]


class Builder:
    """Inserts nodes into `graph` before `anchor`, or at the end if `anchor` is None."""

    def __init__(self, graph: Graph, anchor: Node | None = None) -> None:
        self.graph = graph
        self.anchor = anchor
        self._known: dict[Value, Array] = {}

    def input(self, name: str, type_: ValueType) -> Value:
        value = Value(name, type_)
        self.graph.inputs.append(value)
        return value

    def constant(self, array: object, name: str = "c", dtype: DType | None = None) -> Value:
        """Add a constant, from anything that `np.asarray` takes, and return its value.

        An array that `np.asarray` does not have to copy becomes read-only itself.
        """
        return self.graph.add_constant(np.asarray(array, dtype=dtype.numpy if dtype else None), name)

    def emit(self, op: str, *inputs: Value | None, outputs: int = 1, name: str = "", **attrs: Attr) -> list[Value]:
        """Add a node with `outputs` outputs, and return the outputs, whose types are inferred.

        The node and its outputs are named after `name`, or after the operator if that is empty. ModelError if the
        inputs do not fit, UnsupportedError for an unknown operator; then no node is added.
        """
        label = name or self.graph.fresh_name(op.lower())
        node = Node(op, _without_trailing_none(inputs), [], dict(attrs), label)
        node.outputs = [Value(self._output_name(label, i), _UNTYPED, node) for i in range(outputs)]
        self._known.update(self.graph.constants)
        _inference[0](node, self._known)
        self.graph.insert_before(self.anchor, node)
        return node.outputs

    def __call__(self, op: str, *inputs: Value | None, name: str = "", **attrs: Attr) -> Value:
        """Add a node with one output, and return the output."""
        return self.emit(op, *inputs, outputs=1, name=name, **attrs)[0]

    def _output_name(self, label: str, index: int) -> str:
        return self.graph.fresh_name(label if index == 0 else f"{label}.{index}")


_UNTYPED = TensorType(DType.FLOAT32, None)


def _without_trailing_none(inputs: tuple[Value | None, ...]) -> list[Value | None]:
    result = list(inputs)
    while result and result[-1] is None:
        result.pop()
    return result
