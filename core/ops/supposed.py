"""What the types of a graph suppose of its symbols.

Inference gives `x[2:]` of [n, 4] the type [n - 2, 4]. That is right for n >= 2; a smaller extent is clamped, and the
result is empty. Code for all batch sizes may rely on the type only while no supposition is broken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import permutations

from core.errors import ModelError
from core.ir.dim import Dim, is_never_negative, maxima, symbols
from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import TensorType
from core.ops import registry
from core.ops.common import limit_of
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
    yield from _limits(op, node, known)
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


class _Broadcasting(registry.Infer):
    """The view of `infer` that notes which extents broadcast."""

    def __init__(self, op: registry.OpDef, node: Node, known: Mapping[Value, Array]) -> None:
        super().__init__(op, node, known)
        self.met: list[Sequence[Dim]] = []

    def broadcast(self, dims: Sequence[Dim]) -> None:
        self.met.append(dims)


def _limits(op: registry.OpDef, node: Node, known: Mapping[Value, Array]) -> Iterator[Dim]:
    """That no extent exceeds the limit of another one that it broadcasts to, see `broadcast_shapes`."""
    shapes = [value.type.shape or () for value in node.inputs if value and isinstance(value.type, TensorType)]
    if not any(map(maxima, (dim for shape in shapes for dim in shape))):
        return  # nearly always
    view = _Broadcasting(op, node, known)
    op.infer(view)
    for dim, whole in (pair for dims in view.met for pair in permutations(dims, 2)):
        limit = limit_of(dim, whole)
        if limit is not None:
            yield limit - whole
