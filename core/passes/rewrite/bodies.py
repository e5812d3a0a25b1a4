"""Bodies of fused operators: graphs over rank-0 values, with canonical names so that equal bodies print equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_node
from lathe.core.passes.rewrite.base import shape_of

FUSED = "FusedElementwise"


class Body:
    """Builds a scalar body, `graph`, from elementwise nodes of an outer graph; the caller sets the body's outputs.

    `inner` maps values of the outer graph to their scalars in the body. `arguments` lists the outer values that the
    body reads, in the order of its inputs; None is the element that an epilogue starts from, such as a product's sum.
    """

    def __init__(self, constants: Mapping[Value, Array], name: str) -> None:
        self.graph = Graph(name)
        self.inner: dict[Value, Value] = {}
        self.arguments: list[Value | None] = []
        self._constants = constants
        self._count = 0

    def input(self, outer: Value | None, dtype: DType) -> Value:
        """Adds a scalar input to the body for `outer` (None: the element that an epilogue starts from)."""
        value = Value(f"x{len(self.arguments)}", TensorType(dtype, ()))
        self.graph.inputs.append(value)
        self.arguments.append(outer)
        if outer is not None:
            self.inner[outer] = value
        return value

    def read(self, outer: Value, rank: int | None = None) -> Value:
        """The scalar in the body for an outer value: already known, a literal if it is one number, or a new input.

        A constant number with more axes than `rank` becomes an input: its axes are part of the result's shape.
        """
        if outer in self.inner:
            return self.inner[outer]
        array = self._constants.get(outer)
        if array is None or array.size != 1 or (rank is not None and array.ndim > rank):
            return self.input(outer, outer.dtype)
        self.inner[outer] = self._literal(array)
        return self.inner[outer]

    def add(self, node: Node) -> None:
        """Adds a copy of an outer node to the body, with its inputs; the body of a FusedElementwise is inlined."""
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
        """Whether an outer value is anything but a constant of one element."""
        array = self._constants.get(value) if value is not None else None
        return array is None or array.size != 1

    def inline(self, body: Graph, inputs: Sequence[Value | None]) -> list[Value]:
        """Adds the nodes of `body`, applied to `inputs`, to this body; returns the values of its outputs here."""
        env = dict(zip(body.inputs, inputs, strict=True))
        env.update({value: self._literal(array) for value, array in body.constants.items()})
        for node in body.nodes:
            arguments = [env[value] if value is not None else None for value in node.inputs]
            env[node.output] = self.apply(node.op, arguments, node.attrs)
        return [value for outer in body.outputs if (value := env[outer]) is not None]

    def apply(self, op: str, inputs: Sequence[Value | None], attrs: Mapping[str, Attr] | None = None) -> Value:
        """Adds a node with one output to the body; returns the output."""
        node = Node(op, _canonical_order(op, inputs), [], dict(attrs or {}))
        result = Value(f"v{self._count}", TensorType(DType.FLOAT32, ()), node)
        self._count += 1
        node.outputs = [result]
        infer_node(node, {})
        self.graph.nodes.append(node)
        return result

    def number(self, value: float, dtype: DType) -> Value:
        """A literal of the body with this value and element type; equal literals are shared."""
        return self._literal(np.array(value, dtype.numpy))

    def _literal(self, array: Array) -> Value:
        for value, literal in self.graph.constants.items():
            if literal.dtype == array.dtype and literal.tobytes() == array.tobytes():
                return value
        number = array.reshape(()).copy()
        number.setflags(write=False)
        value = Value(f"c{len(self.graph.constants)}", TensorType(DType.from_numpy(array.dtype), ()))
        self.graph.constants[value] = number
        return value


def _canonical_order(op: str, inputs: Sequence[Value | None]) -> list[Value | None]:
    """The inputs of a commutative operator in canonical order: computed values, then inputs, then literals."""
    if len(inputs) != 2 or not registry.get(op).commutative:
        return list(inputs)
    return sorted(inputs, key=_sort_key)


def _sort_key(value: Value | None) -> tuple[int, int]:
    """Sorts by the kind of the name (v: computed, x: input, c: literal), then by its number."""
    return (-1, 0) if value is None else ("vxc".index(value.name[0]), int(value.name[1:]))
