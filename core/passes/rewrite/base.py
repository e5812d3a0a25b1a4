"""The `Pass` interface, its result, and small queries about nodes that most passes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lathe.core.errors import LatheError
from lathe.core.ir.dim import DATA_DEPENDENT_PREFIX, Dim, SymDim, symbols
from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef import registry


class PassError(LatheError):
    """A pass failed or left a broken graph: a bug of the compiler, never of the model."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """The number of rewrites that a pass made (`changed`), and `notes`, lines of text for `explain()`."""

    changed: int
    notes: tuple[str, ...] = ()


class Pass(Protocol):
    """The interface of a pass: `run` edits a graph in place. The options of a pass are its frozen dataclass fields."""

    @property
    def name(self) -> str: ...

    def run(self, graph: Graph) -> PassResult:
        """Rewrites `graph` in place. Idempotent: a second run changes nothing."""
        ...


def shape_of(value: Value | None) -> tuple[Dim, ...] | None:
    """The shape of a tensor; None if the value is absent, no tensor, or of unknown rank."""
    return value.type.shape if value is not None and isinstance(value.type, TensorType) else None


def has_ranks(node: Node) -> bool:
    """Whether the rank of every tensor among the node's inputs and outputs is known."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return all(shape_of(value) is not None for value in values if isinstance(value.type, TensorType))


def have_same_type(a: Value, b: Value) -> bool:
    """Whether two values are tensors of equal element type and provably equal shape."""
    return shape_of(a) is not None and a.type == b.type


def is_elementwise(node: Node) -> bool:
    """Whether each output element depends only on the elements at the same index of the (broadcast) inputs."""
    return registry.get(node.op).is_elementwise


def is_view_node(node: Node | None) -> bool:
    """Whether a node is a Flatten, Squeeze, Unsqueeze or Reshape whose parameters are attributes, not inputs."""
    views = ("Flatten", "Squeeze", "Unsqueeze", "Reshape")
    return node is not None and node.op in views and len(node.inputs) == 1


def is_shape_only_declared(graph: Graph, node: Node) -> bool:
    """Whether inference cannot derive the rank of the node's first output, so that any known shape is only declared.

    In a run, only the node's own reference checks the shape that the model declares. So passes must not replace such a
    node.
    """
    op = registry.get(node.op)
    type_ = op.infer(registry.Infer(op, node, graph.constants))[0]
    return isinstance(type_, TensorType) and type_.shape is None


def reshape_attrs(shape: Sequence[Dim]) -> dict[str, Attr]:
    """The attributes of a Reshape to exactly these extents.

    A symbol may be 0 in a run. Without `allowzero`, Reshape reads 0 as "copy the extent of the input", so shapes with
    symbols or zeros set it.
    """
    may_be_zero = any(not isinstance(dim, int) or dim == 0 for dim in shape)
    return {"shape": tuple(shape), "allowzero": 1} if may_be_zero else {"shape": tuple(shape)}


def can_reshape_to(graph: Graph, shape: Sequence[Dim]) -> bool:
    """Whether a Reshape can express this shape: no extent is 0, and all symbols are dimensions of graph inputs."""
    allowed = input_symbols(graph)
    return 0 not in shape and all(symbols(dim) <= allowed for dim in shape)


def view_source(value: Value) -> Value:
    """The source of a chain of views: follows view nodes backwards to the first value that is not a view."""
    while is_view_node(value.producer) and value.producer is not None and value.producer.inputs[0] is not None:
        value = value.producer.inputs[0]
    return value


def input_symbols(graph: Graph) -> frozenset[str]:
    """Names of symbols that are whole dimensions of the graph's inputs: every run knows their values from its feeds.

    Inputs of a nested graph may also have symbols for unknown dimensions (prefix `DATA_DEPENDENT_PREFIX`). These are
    left out: inference renames them when another node produces the value, so no attribute may hold one.
    """
    names = (str(dim) for value in graph.inputs for dim in shape_of(value) or () if isinstance(dim, SymDim))
    return frozenset(name for name in names if name.isidentifier() and not name.startswith(DATA_DEPENDENT_PREFIX))
