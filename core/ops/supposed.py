"""What the types of a graph suppose of its symbols.

Inference gives `x[2:]` of [n, 4] the type [n - 2, 4]. That is right for n >= 2; a smaller extent is clamped, and the
result is empty. Code for all batch sizes may rely on the type only while no supposition is broken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

from core.errors import ModelError
from core.ir.dim import Dim, SymDim, is_never_negative, maxima, symbols
from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import TensorType
from core.ops import registry
from core.ops.common import supposed_equal, supposed_for
from core.ops.inference import infer_graph


def suppositions(graph: Graph, known: dict[Value, Array], given: Collection[str]) -> tuple[Dim, ...]:
    """The dimensions that must not be negative for the types of `graph` to be right, and may be. Those that contain
    another symbol than the `given` ones are left out: they only show in a run, where the references compute them. Dead
    nodes compute nothing and are left out, too.

    `known` is what `infer_graph` returned for the graph.
    """
    found = dict.fromkeys(dim for node in graph.live_nodes() for dim in supposed_by(node, known))
    return tuple(dim for dim in found if not is_never_negative(dim) and symbols(dim) <= set(given))


def supposed_by(node: Node, known: dict[Value, Array]) -> Iterator[Dim]:
    """What must not be negative for the types of a node, and of what its bodies hold, to be right."""
    op = registry.get(node.op)
    yield from op.supposes(registry.Infer(op, node, known))
    yield from _equal_for(op, node, known)
    for value in node.outputs:
        if isinstance(value.type, TensorType):
            yield from value.type.shape or ()
    for body in node.subgraphs:
        try:
            inside = infer_graph(body, dict(known))
        except ModelError:  # a branch that is never taken: it serves another rank
            continue
        for inner in body.nodes:
            yield from supposed_by(inner, inside)


class _Meeting(registry.Infer):
    """The view of `infer` that notes which extents meet: they have to be equal, or broadcast."""

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
        """The pairs of extents that broadcast."""
        return (pair for dims in self.broadcasting for pair in combinations(dict.fromkeys(dims), 2))


def _equal_for(op: registry.OpDef, node: Node, known: Mapping[Value, Array]) -> Iterator[Dim]:
    """What must not be negative for extents that meet to be equal where one of them is a maximum or a minimum: no run
    succeeds with others, or only one where an extent is 1. See `broadcast_shapes`."""
    if not _has_maxima(node, known):
        return  # nearly always
    view = _meeting(op, node, known)
    for pair in view.equal:
        yield from supposed_for(*pair)
    for pair in view.pairs():
        yield from supposed_equal(*pair)


def may_repeat(node: Node, known: Mapping[Value, Array]) -> bool:
    """Whether extents broadcast of which one is a maximum or a minimum, and may be 1 or not, as only a run shows."""
    if not _has_maxima(node, known):
        return False
    pairs = [pair for pair in _meeting(registry.get(node.op), node, known).pairs() if any(map(maxima, pair))]
    return not all(supposed_equal(*pair) for pair in pairs)


def _has_maxima(node: Node, known: Mapping[Value, Array]) -> bool:
    """Whether there are maxima in the shapes of the inputs of a node, or in their values."""
    given = [value for value in node.inputs if value is not None]
    shapes = [value.type.shape or () for value in given if isinstance(value.type, TensorType)]
    values = [known[value].ravel().tolist() for value in given if value in known and known[value].dtype == object]
    return any(isinstance(dim, SymDim) and maxima(dim) for dims in (*shapes, *values) for dim in dims)


def _meeting(op: registry.OpDef, node: Node, known: Mapping[Value, Array]) -> _Meeting:
    view = _Meeting(op, node, known)
    op.infer(view)
    return view
