"""The order in which nodes run: any topological order is right, a good one needs less memory."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from core.ir.dim import evaluate, symbols
from core.ir.dims import is_sized
from core.ir.graph import Graph, Node, Value, node_reads
from core.ir.types import DType, TensorType
from core.passes.base import view_origin
from core.plan.liveness import typical

# One native call without reference nodes in between may take this factor, and these bytes, more memory per row.
_WORTH = 1.05
_LITTLE = 1024


def order(graph: Graph) -> list[Node]:
    """The graph's own order, or the greedy one when that needs less memory at its peak (counted for n = 1)."""
    given = list(graph.nodes)
    greedy = _greedy(graph)
    best = greedy if _peak(graph, greedy) < _peak(graph, given) else given
    parted = _strings_last(graph, best)
    return parted if _peak(graph, parted) <= _peak(graph, best) * _WORTH + _LITTLE else best


def _strings_last(graph: Graph, nodes: list[Node]) -> list[Node]:
    """What makes strings, maps or sequences that no kernel reads comes last: no kernel runs it, and between kernels it
    would part native code."""
    if graph.states:  # their next values take the place of what such a node may read
        return nodes
    late: set[Node] = set()
    read: set[Value] = set()  # by others
    for node in reversed(nodes):
        if not any(map(_is_plain, node.outputs)) and read.isdisjoint(node.outputs):
            late.add(node)
        else:
            read.update(node_reads(node))
    return [node for node in nodes if node not in late] + [node for node in nodes if node in late]


def _is_plain(value: Value) -> bool:
    """Whether kernels can read it."""
    return isinstance(value.type, TensorType) and value.type.dtype is not DType.STRING


def _greedy(graph: Graph) -> list[Node]:
    """Always run the ready node that grows the live set least; ties go to the graph's own order."""
    walk = _Greedy(graph)
    return [walk.next() for _ in graph.nodes]


class _Greedy:
    """Gives one node after the other. What a node adds to the live set is computed when it becomes ready, and again
    when it has become the last reader of something."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = graph.nodes
        self._reads = [set(node_reads(node)) for node in graph.nodes]
        self._readers: dict[Value, list[int]] = {}  # by their places
        for place, reads in enumerate(self._reads):
            for value in reads:
                self._readers.setdefault(value, []).append(place)
        self._left = {value: len(places) for value, places in self._readers.items()}
        self._missing = [sum(value.producer is not None for value in reads) for reads in self._reads]
        self._keep, self._homes, self._reading = graph.live_outs(), _homes(graph), _reading(graph)
        self._growth: dict[int, int] = {}  # of the nodes that are ready, by their places
        self._heap: list[tuple[int, int]] = []  # growth and place; some are no longer true
        for place, missing in enumerate(self._missing):
            if not missing:
                self._offer(place)

    def next(self) -> Node:
        """The node to run. One that overwrites what others still have to read waits if it can."""
        held: list[tuple[int, int]] = []
        chosen: tuple[int, int] | None = None
        while self._heap and chosen is None:
            growth, place = entry = heappop(self._heap)
            if self._growth.get(place) != growth:
                continue
            if _overwrites(self._nodes[place], self._homes, self._reading):
                held.append(entry)
            else:
                chosen = entry
        if chosen is None:
            chosen, *held = held
        for entry in held:
            heappush(self._heap, entry)
        self._run(chosen[1])
        return self._nodes[chosen[1]]

    def _run(self, place: int) -> None:
        node = self._nodes[place]
        del self._growth[place]
        for value in node.outputs:
            for reader in self._readers.get(value, ()):
                self._missing[reader] -= 1
                if not self._missing[reader]:
                    self._offer(reader)
        for nodes in self._reading.values():
            nodes.discard(node)
        for value in self._reads[place]:
            self._left[value] -= 1
            if self._left[value] == 1:
                for reader in self._readers[value]:
                    if reader in self._growth:
                        self._offer(reader)

    def _offer(self, place: int) -> None:
        """A node is ready, or has come to free more than it did."""
        freed = (v for v in self._reads[place] if v.producer is not None and self._left[v] == 1 and v not in self._keep)
        made = (v for v in self._nodes[place].outputs if v not in self._homes)
        growth = sum(map(_size, made)) - sum(map(_size, freed))
        if self._growth.get(place) != growth:
            self._growth[place] = growth
            heappush(self._heap, (growth, place))


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
    """Bytes for n = 1, or for typical sizes; nothing for what the arena does not hold."""
    if not isinstance(value.type, TensorType) or value.type.shape is None:
        return 0
    nbytes = value.type.nbytes
    if is_sized(nbytes):
        return typical(nbytes)
    if value.type.symbols - {"n"}:
        return 0
    return evaluate(nbytes, {"n": 1}) if symbols(nbytes) else int(nbytes)  # type: ignore[arg-type]
