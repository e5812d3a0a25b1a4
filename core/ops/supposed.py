"""What the types of a graph suppose of its symbols.

Inference gives `x[2:]` of [n, 4] the type [n - 2, 4]. That is right for n >= 2; a smaller extent is clamped, and the
result is empty. Code for all batch sizes may rely on the type only while no supposition is broken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from core.errors import ModelError
from core.ir.dim import Dim, is_never_negative, symbols
from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import TensorType
from core.ops import registry
from core.ops.inference import infer_graph


def suppositions(graph: Graph, known: dict[Value, Array], given: Collection[str]) -> tuple[Dim, ...]:
    """The dimensions that must not be negative for the types of `graph` to be right, and may be. Those that contain
    another symbol than the `given` ones are left out: they only show in a run, where the references compute them. Dead
    nodes compute nothing and are left out, too.

    `known` is what `infer_graph` returned for the graph.
    """
    found = dict.fromkeys(dim for node in graph.live_nodes() for dim in _of_node(node, known))
    return tuple(dim for dim in found if not is_never_negative(dim) and symbols(dim) <= set(given))


def _of_node(node: Node, known: dict[Value, Array]) -> Iterator[Dim]:
    op = registry.get(node.op)
    yield from op.supposes(registry.Infer(op, node, known))
    for value in node.outputs:
        if isinstance(value.type, TensorType):
            yield from value.type.shape or ()
    for body in node.subgraphs:
        try:
            inside = infer_graph(body, dict(known))
        except ModelError:  # a branch that is never taken: it serves another rank
            continue
        for inner in body.nodes:
            yield from _of_node(inner, inside)
