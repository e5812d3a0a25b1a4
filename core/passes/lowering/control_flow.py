"""Runs the pipeline on the bodies of If, Loop, Scan and MapSelected, each as a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lathe.core.errors import FeedError, ModelError
from lathe.core.ir.closure import close_body, restore_captures
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.base import PassResult

CONTROL = ("If", "Loop", "Scan")
MAPS = ("MapSelected",)  # one kernel in every plan, also where control flow is cut into parts
WITH_BODIES = (*CONTROL, *MAPS)


@dataclass(frozen=True)
class OptimizeBodies:
    """Optimizes the bodies of the operators `ops`, and removes scan outputs that nothing reads.

    `rewrite` returns an optimized copy of a closed graph (one that captures nothing), and the number of rewrites. A
    body for which it raises ModelError or FeedError stays as it is.
    """

    rewrite: Callable[[Graph], tuple[Graph, int]]
    ops: tuple[str, ...] = WITH_BODIES
    name: str = "control"

    def run(self, graph: Graph) -> PassResult:
        changed, notes = _drop_unread_outputs(graph), list[str]()
        for node in graph.nodes:
            for name in [
                name for name, value in node.attrs.items() if isinstance(value, Graph) and node.op in self.ops
            ]:
                try:
                    changed += self._optimize_body(graph, node, name)
                except (ModelError, FeedError) as error:  # exporters leave branches for other shapes, never taken
                    notes.append(f"{registry.describe(node)} keeps its {name} as it is: {error}")
        graph.remove_dead()
        return PassResult(changed, tuple(notes))

    def _optimize_body(self, graph: Graph, node: Node, name: str) -> int:
        body = node.attrs[name]
        assert isinstance(body, Graph)
        alone, outer = close_body(body, graph.constants)
        better, rewrites = self.rewrite(alone)
        node.attrs[name] = restore_captures(better, outer)
        return rewrites


def _drop_unread_outputs(graph: Graph) -> int:
    """Removes scan outputs of Loop and Scan that no node reads and that are no graph outputs; returns their number."""
    read = {*graph.uses(), *graph.live_outs()}
    return sum(_drop_outputs(node, read) for node in graph.nodes)


def _drop_outputs(node: Node, read: set[Value]) -> int:
    carried = _carried_count(node)
    if carried is None:
        return 0
    stacked = range(max(carried, 1), len(node.outputs))  # a node must keep at least one output
    unread = [index for index in stacked if node.outputs[index] not in read]
    for index in reversed(unread):
        del node.outputs[index]
        for body in node.subgraphs:
            del body.outputs[index + (node.op == "Loop")]
    return len(unread)


def _carried_count(node: Node) -> int | None:
    """The number of loop-carried outputs, which precede the scan outputs; None if the node is no Loop or Scan."""
    if node.op == "Loop":
        return max(len(node.inputs) - 2, 0)
    if node.op == "Scan":
        return len(node.inputs) - registry.NodeView(registry.get("Scan"), node).attr("num_scan_inputs")
    return None
