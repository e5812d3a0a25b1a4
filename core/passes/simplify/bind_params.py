"""Moves known parameter inputs (Reshape's shape, ReduceSum's axes) into attributes; extents may be symbolic."""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.ir.dim import SymDim, symbols
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.rewrite.base import PassResult, input_symbols
from lathe.core.passes.rewrite.editor import without_trailing_absent


@dataclass(frozen=True)
class BindParams:
    name: str = "bind_params"

    def run(self, graph: Graph) -> PassResult:
        if not any(map(_has_unbound, graph.nodes)):
            graph.remove_dead()
            return PassResult(0)  # saves the inference below, which takes most of the time of this pass
        known = infer_graph(graph)
        allowed = input_symbols(graph)
        changed = sum(_bind(node, known, allowed) for node in graph.nodes)
        graph.remove_dead()
        return PassResult(changed)


def _has_unbound(node: Node) -> bool:
    return any(node.input(index) is not None for index in registry.get(node.op).params.values())


def _bind(node: Node, known: dict[Value, Array], allowed: frozenset[str]) -> int:
    """Moves the known parameters of a node into attributes; returns their number."""
    params = registry.get(node.op).params
    found = {name: _known_param(node, name, known, allowed) for name in params}
    bound = {name: attr for name, attr in found.items() if attr is not None}
    for name, attr in bound.items():
        node.attrs[name] = attr
        node.inputs[params[name]] = None
    node.inputs = without_trailing_absent(node.inputs)
    return len(bound)


def _known_param(node: Node, name: str, known: dict[Value, Array], allowed: frozenset[str]) -> Attr:
    """The value of parameter `name` as a flat tuple; None if it is not an input, not known, or has other symbols.

    `allowed` has the symbols that the value may have.
    """
    op = registry.get(node.op)
    array = registry.Infer(op, node, known).value(op.params[name])
    items = None if array is None else op.param_of(name, array)
    if items is None:
        return None
    return items if all(symbols(item) <= allowed for item in items if isinstance(item, SymDim)) else None
