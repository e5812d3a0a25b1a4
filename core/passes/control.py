"""The bodies of control flow go through the pipeline too, each by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.errors import FeedError, ModelError
from core.ir.closure import closed, opened
from core.ir.graph import Graph, Node, Value
from core.ops import registry
from core.passes.base import PassResult

CONTROL = ("If", "Loop", "Scan")


@dataclass(frozen=True)
class OptimizeBodies:
    """`rewrite` gives a better version of a graph that stands alone, and how many rewrites that took."""

    rewrite: Callable[[Graph], tuple[Graph, int]]
    name: str = "control"

    def run(self, graph: Graph) -> PassResult:
        changed, notes = _drop_unread(graph), list[str]()
        for node in graph.nodes:
            for name in [name for name, value in node.attrs.items() if isinstance(value, Graph) and node.op in CONTROL]:
                try:
                    changed += self._body(graph, node, name)
                except (ModelError, FeedError) as error:  # a branch that is never taken need not fit what it reads
                    notes.append(f"{registry.describe(node)} keeps its {name} as it is: {error}")
        graph.remove_dead()
        return PassResult(changed, tuple(notes))

    def _body(self, graph: Graph, node: Node, name: str) -> int:
        body = node.attrs[name]
        assert isinstance(body, Graph)
        alone, outer = closed(body, graph.constants)
        better, rewrites = self.rewrite(alone)
        node.attrs[name] = opened(better, outer)
        return rewrites


def _drop_unread(graph: Graph) -> int:
    """Drop what loops stack and nobody reads; returns how many outputs."""
    read = {*graph.uses(), *graph.live_outs()}
    return sum(_drop_outputs(node, read) for node in graph.nodes)


def _drop_outputs(node: Node, read: set[Value]) -> int:
    carried = _carried_values(node)
    if carried is None:
        return 0
    stacked = range(max(carried, 1), len(node.outputs))  # a node needs an output
    unread = [index for index in stacked if node.outputs[index] not in read]
    for index in reversed(unread):
        del node.outputs[index]
        for body in node.subgraphs:
            del body.outputs[index + (node.op == "Loop")]
    return len(unread)


def _carried_values(node: Node) -> int | None:
    """How many outputs of a loop come before those that it stacks; None for any other node."""
    if node.op == "Loop":
        return max(len(node.inputs) - 2, 0)
    if node.op == "Scan":
        return len(node.inputs) - registry.NodeView(registry.get("Scan"), node).attr("num_scan_inputs")
    return None
