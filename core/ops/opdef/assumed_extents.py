"""The assumptions about symbols under which the inferred types of a graph are right.

Inference gives `x[2:]` of [n, 4] the type [n - 2, 4]. That is right for n >= 2 only: a smaller extent is clamped, and
the result is empty. Code for all batch sizes may rely on the types only while all assumptions hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

from lathe.core.errors import ModelError
from lathe.core.ir.dim import Dim, SymDim, is_never_negative, maxima, symbols
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.ops.opdef.type_rules import supposed_equal, supposed_for


def assumptions(graph: Graph, known: dict[Value, Array], given: Collection[str]) -> tuple[Dim, ...]:
    """The dimensions that must be 0 or more for the types of `graph` to be right, but might be negative in some run.

    `known` is the result of `infer_graph` for the graph. `given` has the symbols of the inputs; dimensions with other
    symbols are left out: they are known only in a run, where the reference runner computes the node. Dead nodes are
    left out, too.
    """
    found = dict.fromkeys(dim for node in graph.live_nodes() for dim in node_assumptions(node, known))
    return tuple(dim for dim in found if not is_never_negative(dim) and symbols(dim) <= set(given))


def node_assumptions(node: Node, known: dict[Value, Array]) -> Iterator[Dim]:
    """Yield the dimensions that must be 0 or more for the types of a node, and of nodes in its bodies, to be right.

    Dimensions that can never be negative are included. Sets the types in the bodies; a body that fails inference is
    left out.
    """
    op = registry.get(node.op)
    yield from op.supposes(registry.Infer(op, node, known))
    yield from _equal_for(op, node, known)
    for value in node.outputs:
        if isinstance(value.type, TensorType):
            yield from value.type.shape or ()
    for body in node.subgraphs:
        try:
            inside = infer_graph(body, dict(known))
        except ModelError:  # a branch for inputs of another rank, which is never taken
            continue
        for inner in body.nodes:
            yield from node_assumptions(inner, inside)


class _MeetingExtents(registry.Infer):
    """A view for `infer` that records which extents must be equal, and which broadcast to each other."""

    def __init__(self, op: registry.OpDef, node: Node, known: Mapping[Value, Array]) -> None:
        super().__init__(op, node, known)
        self.broadcasting: list[Sequence[Dim]] = []
        self.equal: list[tuple[Dim, Dim]] = []

    def agree(self, one: Dim, other: Dim) -> bool:
        self.equal.append((one, other))
        return super().agree(one, other)

    def broadcast(self, dims: Sequence[Dim]) -> None:
        self.broadcasting.append(dims)

    def pairs(self) -> Iterator[tuple[Dim, Dim]]:
        """The pairs of different extents that must broadcast to each other."""
        return (pair for dims in self.broadcasting for pair in combinations(dict.fromkeys(dims), 2))


def _equal_for(op: registry.OpDef, node: Node, known: Mapping[Value, Array]) -> Iterator[Dim]:
    """Yield the dimensions that must be 0 or more for pairs of extents of a node to be equal, if one has a maximum.

    The pairs are extents that must be equal, and extents that broadcast. No run succeeds with unequal extents, except
    where one of two broadcast extents is 1.
    """
    if not _has_maxima(node, known):
        return  # the usual case: saves the inference below
    view = _meeting_extents(op, node, known)
    for pair in view.equal:
        yield from supposed_for(*pair)
    for pair in view.pairs():
        yield from supposed_equal(*pair)


def may_repeat(node: Node, known: Mapping[Value, Array]) -> bool:
    """Whether an extent with a maximum broadcasts, but may be 1 in some runs and not in others.

    A minimum is an expression with a maximum: min(n, 64) is n + 64 - max(n, 64).
    """
    if not _has_maxima(node, known):
        return False
    pairs = [pair for pair in _meeting_extents(registry.get(node.op), node, known).pairs() if any(map(maxima, pair))]
    return not all(supposed_equal(*pair) for pair in pairs)


def _has_maxima(node: Node, known: Mapping[Value, Array]) -> bool:
    """Whether a shape of a node's inputs contains a maximum, or a known value of an input does."""
    given = [value for value in node.inputs if value is not None]
    shapes = [value.type.shape or () for value in given if isinstance(value.type, TensorType)]
    values = [known[value].ravel().tolist() for value in given if value in known and known[value].dtype == object]
    return any(isinstance(dim, SymDim) and maxima(dim) for dims in (*shapes, *values) for dim in dims)


def _meeting_extents(op: registry.OpDef, node: Node, known: Mapping[Value, Array]) -> _MeetingExtents:
    view = _MeetingExtents(op, node, known)
    op.infer(view)
    return view
