"""The data-flow graph: values, nodes, constants and state.

Nodes are in topological order. Values are compared by identity; a name is a label, unique within its graph. A graph is
mutable: passes edit it in place. It stores the producer of each value but not the readers: `Graph.uses` computes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import UnknownRankError
from lathe.core.ir.dim import SymDim, substitute, symbols
from lathe.core.ir.types import Dim, DType, TensorType, ValueType

Array: TypeAlias = NDArray[Any]
Attr: TypeAlias = Union[
    int, float, str, bytes, bool, DType, SymDim, ValueType, "Graph", Array, tuple["Attr", ...], None
]
SHAPE_ONLY_OPS = frozenset({"Shape", "Size"})  # operators that read the shape of their input, not its elements


@dataclass(eq=False, slots=True)
class Value:
    """A value of the graph. `producer`, the node with this output, is None for inputs, states and constants."""

    name: str
    type: ValueType
    producer: Node | None = None

    @property
    def tensor(self) -> TensorType:
        """The type of a value that must be a tensor; TypeError for sequences, optionals and maps."""
        if not isinstance(self.type, TensorType):
            raise TypeError(f"value %{self.name} is {self.type}, expected a tensor")
        return self.type

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The shape of a tensor; TypeError for other values, and UnknownRankError when the rank is not known."""
        if self.tensor.shape is None:
            raise UnknownRankError(f"the rank of {self.type} is not known", where=f"value '{self.name}'")
        return self.tensor.shape

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(eq=False, slots=True, weakref_slot=True)  # weak references: caches have nodes as keys
class Node:
    """One application of an operator. An absent optional input is None; no list of inputs ends with None.

    `device`: the name of the device that must run the node; "" if any may. `after`: control edges, as values that other
    nodes compute: the node runs after these nodes, but does not read the values.
    """

    op: str
    inputs: list[Value | None]
    outputs: list[Value]
    attrs: dict[str, Attr] = field(default_factory=dict)
    name: str = ""
    device: str = ""
    after: tuple[Value, ...] = ()

    @property
    def output(self) -> Value:
        """The first output."""
        return self.outputs[0]

    def input(self, index: int) -> Value | None:
        """The input at `index`, or None when it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def required_input(self, index: int) -> Value:
        """The input at `index`. ValueError when it is absent."""
        value = self.input(index)
        if value is None:
            raise ValueError(f"{self.op} '{self.name}' has no input {index}")
        return value

    @property
    def subgraphs(self) -> tuple[Graph, ...]:
        """The attributes that are graphs, in the order of the attributes; graphs inside these are not included."""
        return tuple([attr for attr in self.attrs.values() if isinstance(attr, Graph)])  # faster than a generator

    def __repr__(self) -> str:
        return f"{self.op}({self.name})"


@dataclass(eq=False, slots=True)
class State:
    """A value that a session keeps between runs: `initial` at first, then the value of `update` in the run before."""

    value: Value
    update: Value
    initial: Array


@dataclass(eq=False)
class Graph:
    """A whole model, or the body of a control-flow or fused node.

    `constants` maps constant values to read-only arrays. Operators are always in the form of the newest opset. The body
    of a control-flow node may read values of the graphs around it.

    `defaults` maps the constants that a run may replace (ONNX initializers that are also inputs) to the types that a
    replacement may have. The nodes compute the right results for every value of these constants, but the types of
    other values may be right for the arrays in `constants` only.
    """

    name: str = "graph"
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[Value, Array] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    defaults: dict[Value, TensorType] = field(default_factory=dict)

    def constant_of(self, value: Value | None) -> Array | None:
        """The array of `value` if it is a constant of this graph; otherwise None, also when `value` is None."""
        return self.constants.get(value) if value is not None else None

    def values(self) -> Iterator[Value]:
        """Yield every value of this graph, not of bodies: inputs, states, constants, then outputs of nodes in order."""
        yield from self.inputs
        yield from (state.value for state in self.states)
        yield from self.constants
        for node in self.nodes:
            yield from node.outputs

    def uses(self) -> dict[Value, list[Node]]:
        """The nodes of this graph that read each value, one entry per read, in graph order.

        A value that a body captures counts as one read of the node with this body. A value without reads has no entry.
        """
        uses: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in node_reads(node):
                uses.setdefault(value, []).append(node)
        return uses

    def live_outs(self) -> set[Value]:
        """The values that must exist at the end of a run: outputs and updates of states."""
        return {*self.outputs, *(state.update for state in self.states)}

    def fresh_name(self, base: str) -> str:
        """`base`, or the first of `base_2`, `base_3`, ... that no value of this graph has as its name."""
        taken = {value.name for value in self.values()}
        if base not in taken:
            return base
        return next(name for i in range(2, len(taken) + 3) if (name := f"{base}_{i}") not in taken)

    def add_constant(self, array: Array, name: str = "c") -> Value:
        """Add a constant, named `name` or with a suffix, and return its value. The array itself becomes read-only."""
        array = np.asarray(array)
        array.setflags(write=False)
        value = Value(self.fresh_name(name), TensorType(DType.from_numpy(array.dtype), array.shape))
        self.constants[value] = array
        return value

    def insert_before(self, anchor: Node | None, node: Node) -> Node:
        """Insert `node` before `anchor`, or at the end if `anchor` is None, and return `node`.

        ValueError if `anchor` is not in this graph.
        """
        index = len(self.nodes) if anchor is None else self.nodes.index(anchor)
        self.nodes.insert(index, node)
        return node

    def replace_uses(self, replacements: Mapping[Value, Value]) -> None:
        """Make every reader of each key (nested graphs, outputs and states included) read its replacement instead.

        Chains (a -> b, b -> c) are followed to their end; they must not be cyclic.
        """
        final = {old: _resolve(new, replacements) for old, new in replacements.items()}
        if final:
            _replace_reads(self, final)

    def live_nodes(self) -> list[Node]:
        """The nodes of this graph on which an output or the update of a state depends, in graph order.

        That includes nodes after which a live node runs.
        """
        return self._live()[0]

    def _live(self) -> tuple[list[Node], set[Value]]:
        """The live nodes in graph order, and the live values: those that they read, outputs, and updates of states."""
        live = set(self.live_outs())
        live_nodes: list[Node] = []
        for node in reversed(self.nodes):
            if any(output in live for output in node.outputs):
                live_nodes.append(node)
                live.update(node_needs(node))
        return live_nodes[::-1], live

    def count_nodes(self) -> int:
        """The number of nodes, those of subgraphs included."""
        return sum(1 + sum(body.count_nodes() for body in node.subgraphs) for node in self.nodes)

    def remove_dead(self) -> int:
        """Drop nodes and constants (with their defaults) that no live value needs; return the number of dropped nodes.

        Inputs and states stay, and so does dead code in bodies.
        """
        nodes, live = self._live()
        dropped = len(self.nodes) - len(nodes)
        self.nodes = nodes
        self.constants = {value: array for value, array in self.constants.items() if value in live}
        self.defaults = {value: type_ for value, type_ in self.defaults.items() if value in live}
        return dropped

    def sort(self) -> None:
        """Sort the nodes in place with `topological`. ValueError on a cycle."""
        self.nodes = topological(self.nodes)

    def clone(self, env: Mapping[str, Dim] | None = None) -> Graph:
        """A deep copy that shares all arrays (constants, initial states, attributes) with this graph.

        `env` replaces symbols in the types of tensors and in attributes, but not in types of sequences, optionals and
        maps. Values that a body captures from outside the copied graph stay the same objects.
        """
        return _clone(self, {}, env or {})

    def __str__(self) -> str:
        from lathe.core.ir.text import print_graph

        return print_graph(self)


def node_reads(node: Node) -> list[Value]:
    """The values that a node reads: its inputs without absent ones, then the values that its bodies capture.

    A value that is several inputs has an entry for each. Each body lists a captured value once, with those that bodies
    nested in it capture from outside.
    """
    reads = [value for value in node.inputs if value is not None]
    for body in node.subgraphs:
        reads += captures(body)
    return reads


def node_needs(node: Node) -> list[Value]:
    """The values that must be computed before a node runs: those that it reads, then those of its control edges."""
    return [*node_reads(node), *node.after] if node.after else node_reads(node)


def attr_symbols(node: Node) -> frozenset[str]:
    """The symbols in a node's attributes, including the attributes of nodes in its bodies."""
    return frozenset().union(*map(_attr_symbols, node.attrs.values()))


def _attr_symbols(attr: Attr) -> frozenset[str]:
    if isinstance(attr, Graph):
        return frozenset().union(*map(attr_symbols, attr.nodes))
    if isinstance(attr, SymDim):
        return symbols(attr)
    if isinstance(attr, TensorType):
        return attr.symbols
    return frozenset().union(*map(_attr_symbols, attr)) if isinstance(attr, tuple) else frozenset()


def elements_read(graph: Graph) -> set[Value]:
    """The values on whose elements, not just shapes, outputs and updates of states may depend; with those in bodies."""
    read = graph.live_outs()
    for node in reversed(graph.nodes):
        if read.isdisjoint(node.outputs):
            continue
        if node.op not in SHAPE_ONLY_OPS:
            read.update(value for value in node.inputs if value is not None)
        for body in node.subgraphs:
            read |= elements_read(body)
    return read


def captures(body: Graph) -> list[Value]:
    """The values of outer graphs that `body` reads, each once, in the order of first use."""
    own = set(body.values())
    reads = [value for node in body.nodes for value in node_reads(node)] + body.outputs
    return list(dict.fromkeys(value for value in reads if value not in own))


def topological(nodes: Iterable[Node]) -> list[Node]:
    """The nodes with every producer before its readers, and before those that run after it. ValueError on a cycle.

    Nodes that are sorted already keep their order; a producer that comes too late moves before its first reader.
    Depth-first search with an explicit stack, since graphs may be deeper than Python's recursion limit.
    """
    given = list(nodes)
    producers = {output: node for node in given for output in node.outputs}
    order: list[Node] = []
    state: dict[Node, bool] = {}  # False while the inputs of a node are being visited, True once it is in `order`
    for root in given:
        stack = [root]
        while stack:
            node = stack[-1]
            waiting = [p for v in node_needs(node) if (p := producers.get(v)) is not None and not state.get(p, False)]
            if state.get(node) is True or not waiting:
                stack.pop()
                if state.get(node) is not True:
                    state[node] = True
                    order.append(node)
                continue
            state[node] = False
            cyclic = [p for p in waiting if p in state]
            if cyclic and any(p in stack for p in cyclic):
                raise ValueError(f"cycle through node {cyclic[0].name or cyclic[0].op}")
            stack.append(waiting[0])
    return order


def _resolve(value: Value, replacements: Mapping[Value, Value]) -> Value:
    while value in replacements:
        value = replacements[value]
    return value


def _replace_reads(graph: Graph, final: Mapping[Value, Value]) -> None:
    for node in graph.nodes:
        node.inputs = [final.get(v, v) if v is not None else None for v in node.inputs]
        node.after = tuple(final.get(v, v) for v in node.after)
        for body in node.subgraphs:
            _replace_reads(body, final)
    graph.outputs = [final.get(v, v) for v in graph.outputs]
    for state in graph.states:
        state.update = final.get(state.update, state.update)


def _clone(graph: Graph, mapping: dict[Value, Value], env: Mapping[str, Dim]) -> Graph:
    def copy(value: Value, producer: Node | None = None) -> Value:
        new_type = value.type.substitute(env) if isinstance(value.type, TensorType) else value.type
        mapping[value] = Value(value.name, new_type, producer)
        return mapping[value]

    new = Graph(graph.name, inputs=[copy(v) for v in graph.inputs])
    state_values = [copy(state.value) for state in graph.states]
    new.constants = {copy(value): array for value, array in graph.constants.items()}
    new.defaults = {mapping[value]: type_.substitute(env) for value, type_ in graph.defaults.items()}
    for node in graph.nodes:
        inputs = [mapping.get(v, v) if v is not None else None for v in node.inputs]
        attrs = {key: _clone_attr(attr, mapping, env) for key, attr in node.attrs.items()}
        after = tuple(mapping.get(v, v) for v in node.after)
        twin = Node(node.op, inputs, [], attrs, node.name, node.device, after)
        twin.outputs = [copy(v, twin) for v in node.outputs]
        new.nodes.append(twin)
    new.outputs = [mapping.get(v, v) for v in graph.outputs]
    new.states = [
        State(value, mapping.get(state.update, state.update), state.initial)
        for value, state in zip(state_values, graph.states, strict=True)
    ]
    return new


def _clone_attr(attr: Attr, mapping: dict[Value, Value], env: Mapping[str, Dim]) -> Attr:
    if isinstance(attr, Graph):
        return _clone(attr, mapping, env)
    if isinstance(attr, SymDim):
        return substitute(attr, env)
    if isinstance(attr, TensorType):
        return attr.substitute(env)
    if isinstance(attr, tuple):
        return tuple(_clone_attr(item, mapping, env) for item in attr)
    return attr
