"""Bodies of fused operators: graphs over rank-0 values, named canonically so that equal bodies print equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from core.ir.graph import Array, Attr, Graph, Node, Value
from core.ir.types import DType, TensorType
from core.ops import registry
from core.ops.inference import infer_node
from core.passes.base import shape_of

FUSED = "FusedElementwise"


class Body:
    """Collects elementwise nodes of a graph into a body.

    `inner` maps values of the graph to what stands for them in the body; `arguments` lists the values that the body
    takes, in the order of its inputs (None for the element that an epilogue starts from).
    """

    def __init__(self, constants: Mapping[Value, Array], name: str) -> None:
        self.graph = Graph(name)
        self.inner: dict[Value, Value] = {}
        self.arguments: list[Value | None] = []
        self._constants = constants
        self._count = 0

    def input(self, outer: Value | None, dtype: DType) -> Value:
        """A new input of the body."""
        value = Value(f"x{len(self.arguments)}", TensorType(dtype, ()))
        self.graph.inputs.append(value)
        self.arguments.append(outer)
        if outer is not None:
            self.inner[outer] = value
        return value

    def read(self, outer: Value, rank: int | None = None) -> Value:
        """What stands for a value of the graph: computed here, a literal if it is one number, or a new input. A number
        of more axes than `rank` is an input, too: its axes are part of the result's shape."""
        if outer in self.inner:
            return self.inner[outer]
        array = self._constants.get(outer)
        if array is None or array.size != 1 or (rank is not None and array.ndim > rank):
            return self.input(outer, outer.dtype)
        self.inner[outer] = self._literal(array)
        return self.inner[outer]

    def add(self, node: Node) -> None:
        """Compute a node of the graph inside the body; a fused one is taken apart."""
        rank = max((len(shape_of(value) or ()) for value in node.inputs if self._varies(value)), default=0)
        inputs = [self.read(value, rank) if value is not None else None for value in node.inputs]
        if node.op == FUSED:
            body = node.attrs["body"]
            assert isinstance(body, Graph)
            results = self.inline(body, inputs)
        else:
            results = [self.apply(node.op, inputs, node.attrs)]
        self.inner.update(zip(node.outputs, results, strict=True))

    def _varies(self, value: Value | None) -> bool:
        """Whether a value of the graph is anything but a constant number."""
        array = self._constants.get(value) if value is not None else None
        return array is None or array.size != 1

    def inline(self, body: Graph, inputs: Sequence[Value | None]) -> list[Value]:
        """Compute another body on these inputs; returns its outputs."""
        env = dict(zip(body.inputs, inputs, strict=True))
        env.update({value: self._literal(array) for value, array in body.constants.items()})
        for node in body.nodes:
            given = [env[value] if value is not None else None for value in node.inputs]
            env[node.output] = self.apply(node.op, given, node.attrs)
        return [value for outer in body.outputs if (value := env[outer]) is not None]

    def apply(self, op: str, inputs: Sequence[Value | None], attrs: Mapping[str, Attr] | None = None) -> Value:
        """One more node; returns its output."""
        node = Node(op, _ordered(op, inputs), [], dict(attrs or {}))
        result = Value(f"v{self._count}", TensorType(DType.FLOAT32, ()), node)
        self._count += 1
        node.outputs = [result]
        infer_node(node, {})
        self.graph.nodes.append(node)
        return result

    def number(self, value: float, dtype: DType) -> Value:
        """A literal."""
        return self._literal(np.array(value, dtype.numpy))

    def _literal(self, array: Array) -> Value:
        for value, known in self.graph.constants.items():
            if known.dtype == array.dtype and known.tobytes() == array.tobytes():
                return value
        number = array.reshape(()).copy()
        number.setflags(write=False)
        value = Value(f"c{len(self.graph.constants)}", TensorType(DType.from_numpy(array.dtype), ()))
        self.graph.constants[value] = number
        return value


def _ordered(op: str, inputs: Sequence[Value | None]) -> list[Value | None]:
    """Inputs of a commutative operator in one order: computed values, then inputs, then literals."""
    if len(inputs) != 2 or not registry.get(op).commutative:
        return list(inputs)
    return sorted(inputs, key=_rank)


def _rank(value: Value | None) -> tuple[int, int]:
    return (-1, 0) if value is None else ("vxc".index(value.name[0]), int(value.name[1:]))
