"""The greedy order runs the ready node that grows the live set least, checked step by step."""

from __future__ import annotations

from lathe.core.ir.graph import Graph, Node, Value, node_reads
from lathe.core.plan.order import _greedy_order, _overwrites, _size, _state_readers, _updates
from tests.core.check.cases import all_cases


def growth(graph: Graph, node: Node, waiting: list[Node]) -> int:
    """Bytes that a node adds to the live set, less those of values that die."""
    read_later: set[Value] = {value for other in waiting if other is not node for value in node_reads(other)}
    freed = {v for v in node_reads(node) if v.producer is not None} - read_later - graph.live_outs()
    return sum(_size(value) for value in node.outputs if value not in _updates(graph)) - sum(map(_size, freed))


def test_each_node_is_the_best_of_the_ready_ones() -> None:
    for case in all_cases():
        graph, waiting, reading = case.graph, list(case.graph.nodes), _state_readers(case.graph)
        for chosen in _greedy_order(graph):
            unmade = {value for node in waiting for value in node.outputs}
            ready = [node for node in waiting if unmade.isdisjoint(node_reads(node))]
            patient = [node for node in ready if not _overwrites(node, _updates(graph), reading)] or ready
            assert chosen is min(patient, key=lambda node: growth(graph, node, waiting)), case.name
            waiting.remove(chosen)
            for nodes in reading.values():
                nodes.discard(chosen)
        assert not waiting
