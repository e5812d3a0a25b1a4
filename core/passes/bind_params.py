"""Known parameters (Reshape's shape, ReduceSum's axes) become attributes; those that are extents may be symbolic."""

from __future__ import annotations

from dataclasses import dataclass

from core.ir.dim import SymDim, symbols
from core.ir.graph import Array, Attr, Graph, Node, Value
from core.ops import registry
from core.ops.inference import infer_graph
from core.passes.base import PassResult, input_symbols
from core.passes.edit import trimmed


@dataclass(frozen=True)
class BindParams:
    name: str = "bind_params"

    def run(self, graph: Graph) -> PassResult:
        if not any(map(_has_unbound, graph.nodes)):
            graph.remove_dead()
            return PassResult(0)  # without inference, which takes most of this pass
        known = infer_graph(graph)
        free = input_symbols(graph)
        changed = sum(_bind(node, known, free) for node in graph.nodes)
        graph.remove_dead()
        return PassResult(changed)


def _has_unbound(node: Node) -> bool:
    return any(node.input(index) is not None for index in registry.get(node.op).params.values())


def _bind(node: Node, known: dict[Value, Array], free: frozenset[str]) -> int:
    """Move what is known of one node's parameters; returns how many."""
    params = registry.get(node.op).params
    found = {name: _known_param(node, name, known, free) for name in params}
    bound = {name: attr for name, attr in found.items() if attr is not None}
    for name, attr in bound.items():
        node.attrs[name] = attr
        node.inputs[params[name]] = None
    node.inputs = trimmed(node.inputs)
    return len(bound)


def _known_param(node: Node, name: str, known: dict[Value, Array], free: frozenset[str]) -> Attr:
    """The value as a flat tuple; None when it is absent, unknown, or has a symbol that only running tells."""
    op = registry.get(node.op)
    array = registry.Infer(op, node, known).value(op.params[name])
    items = None if array is None else op.param_of(name, array)
    if items is None:
        return None
    return items if all(symbols(item) <= free for item in items if isinstance(item, SymDim)) else None
