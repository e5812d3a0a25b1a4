"""What a pass is, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.errors import LatheError
from core.ir.dim import OPEN, Dim, SymDim, symbols
from core.ir.graph import Attr, Graph, Node, Value
from core.ir.types import TensorType
from core.ops import registry


class PassError(LatheError):
    """A pass failed or left a broken graph: a bug of the compiler, never of the model."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """How many rewrites a pass made, and remarks for `explain()`."""

    changed: int
    notes: tuple[str, ...] = ()


class Pass(Protocol):
    """Edits a graph in place. Options are frozen dataclass fields of the pass."""

    @property
    def name(self) -> str: ...

    def run(self, graph: Graph) -> PassResult:
        """Rewrite `graph`; running again on the result changes nothing."""
        ...


def shape_of(value: Value | None) -> tuple[Dim, ...] | None:
    """The shape of a tensor whose rank is known, else None."""
    return value.type.shape if value is not None and isinstance(value.type, TensorType) else None


def has_ranks(node: Node) -> bool:
    """Whether the rank of every tensor that the node reads or writes is known, so that all shapes can be read."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return all(shape_of(value) is not None for value in values if isinstance(value.type, TensorType))


def same_type(a: Value, b: Value) -> bool:
    """Whether two values are tensors of one element type and provably one shape."""
    return shape_of(a) is not None and a.type == b.type


def is_elementwise(node: Node) -> bool:
    """Whether every output element comes from the elements at its place in the inputs, all of which broadcast."""
    return registry.get(node.op).is_elementwise


def is_view_node(node: Node | None) -> bool:
    """Whether a node gives its input another shape and leaves the elements in order."""
    views = ("Flatten", "Squeeze", "Unsqueeze", "Reshape")
    return node is not None and node.op in views and len(node.inputs) == 1


def is_only_declared(graph: Graph, node: Node) -> bool:
    """Whether no node tells the shape of a node's first output, but the model declares it. The node's own reference
    finds out whether it is right, so no other may take its place."""
    op = registry.get(node.op)
    type_ = op.infer(registry.Infer(op, node, graph.constants))[0]
    return isinstance(type_, TensorType) and type_.shape is None


def reshape_attrs(shape: Sequence[Dim]) -> dict[str, Attr]:
    """The attributes of a Reshape to exactly these extents. An extent of 0, which a symbol may be, needs `allowzero`:
    without it 0 means the extent of the input at that place."""
    may_be_zero = any(not isinstance(dim, int) or dim == 0 for dim in shape)
    return {"shape": tuple(shape), "allowzero": 1} if may_be_zero else {"shape": tuple(shape)}


def expressible(graph: Graph, shape: Sequence[Dim]) -> bool:
    """Whether a Reshape may name this shape: no 0, which means something else there, and only the inputs' symbols."""
    free = input_symbols(graph)
    return 0 not in shape and all(symbols(dim) <= free for dim in shape)


def view_origin(value: Value) -> Value:
    """The value that a chain of views starts from."""
    while is_view_node(value.producer) and value.producer is not None and value.producer.inputs[0] is not None:
        value = value.producer.inputs[0]
    return value


def input_symbols(graph: Graph) -> frozenset[str]:
    """Symbols that are whole dimensions of the graph's inputs: known as soon as the model is fed. Inputs of a nested
    graph may have open symbols, too: those have other names as soon as what makes them is another node, so no attribute
    may hold one."""
    names = (str(dim) for value in graph.inputs for dim in shape_of(value) or () if isinstance(dim, SymDim))
    return frozenset(name for name in names if name.isidentifier() and not name.startswith(OPEN))
