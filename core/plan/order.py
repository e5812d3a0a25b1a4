"""The order in which nodes run: any topological order is right, a good one needs less memory."""

from __future__ import annotations

from collections.abc import Mapping, Set

from core.ir.dim import evaluate, symbols
from core.ir.graph import Graph, Node, Value, node_reads
from core.ir.types import TensorType
from core.passes.base import view_origin


def order(graph: Graph) -> list[Node]:
    """The graph's own order, or the greedy one when that needs less memory at its peak (counted for n = 1)."""
    given = list(graph.nodes)
    greedy = _greedy(graph)
    return greedy if _peak(graph, greedy) < _peak(graph, given) else given


def _greedy(graph: Graph) -> list[Node]:
    """Always run the ready node that grows the live set least; ties go to the graph's own order."""
    readers = {value: len(set(nodes)) for value, nodes in graph.uses().items()}
    keep, homes, reading = graph.live_outs(), _homes(graph), _reading(graph)
    made: set[Value] = {value for value in graph.values() if value.producer is None}
    waiting = list(graph.nodes)
    result: list[Node] = []
    while waiting:
        ready = [node for node in waiting if all(v in made or v.producer is None for v in node_reads(node))]
        patient = [node for node in ready if not _overwrites(node, homes, reading)] or ready
        best = min(patient, key=lambda node: _growth(node, readers, keep, homes.keys()))
        waiting.remove(best)
        result.append(best)
        made.update(best.outputs)
        for nodes in reading.values():
            nodes.discard(best)
        for value in set(node_reads(best)):
            readers[value] -= 1
    return result


def _homes(graph: Graph) -> dict[Value, Value]:
    """What is written into the memory of states, and takes no other: the next value of each."""
    return {state.update: state.value for state in graph.states}


def _reading(graph: Graph) -> dict[Value, set[Node]]:
    """The nodes that read each state, or a view of it."""
    found: dict[Value, set[Node]] = {state.value: set() for state in graph.states}
    for node in graph.nodes:
        for value in map(view_origin, node_reads(node)):
            if value in found:
                found[value].add(node)
    return found


def _overwrites(node: Node, homes: Mapping[Value, Value], reading: Mapping[Value, set[Node]]) -> bool:
    """Whether others still have to read a state that the node gives its next value."""
    return any(reading[homes[value]] - {node} for value in node.outputs if value in homes)


def _growth(node: Node, readers: dict[Value, int], keep: Set[Value], homes: Set[Value]) -> int:
    """Bytes the node adds to the live set, less what it frees."""
    freed = {v for v in node_reads(node) if v.producer is not None and readers[v] == 1 and v not in keep}
    return sum(_size(value) for value in node.outputs if value not in homes) - sum(map(_size, freed))


def _peak(graph: Graph, nodes: list[Node]) -> int:
    last = {value: position for position, node in enumerate(nodes) for value in node_reads(node)}
    keep, homes = graph.live_outs(), _homes(graph)
    alive = peak = 0
    ends: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for value in (value for value in node.outputs if value not in homes):
            alive += _size(value)
            end = len(nodes) if value in keep else last.get(value, position)
            ends[end] = ends.get(end, 0) + _size(value)
        peak = max(peak, alive)
        alive -= ends.get(position, 0)
    return peak


def _size(value: Value) -> int:
    """Bytes for n = 1; nothing for what the arena does not hold."""
    if not isinstance(value.type, TensorType) or value.type.shape is None or value.type.symbols - {"n"}:
        return 0
    nbytes = value.type.nbytes
    return evaluate(nbytes, {"n": 1}) if symbols(nbytes) else int(nbytes)  # type: ignore[arg-type]
