"""The order in which nodes run: every topological order is correct, but a good one needs less memory."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from lathe.core.ir.dim import evaluate, symbols
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Graph, Node, Value, node_needs, node_reads
from lathe.core.ir.types import DType, TensorType
from lathe.core.passes.rewrite.base import view_source
from lathe.core.plan.liveness import typical_value

# An order that avoids fallbacks between kernels may need this factor, plus these bytes, more memory per row.
_ALLOWED_GROWTH = 1.05
_ALLOWED_EXTRA_BYTES = 1024


def node_order(graph: Graph) -> list[Node]:
    """The nodes in the graph's own order, or in the greedy order if its peak of memory for n = 1 is lower.

    Nodes that no kernel can run because they produce only strings, maps, sequences or optionals, which only such nodes
    read, move to the end if that raises the peak by at most 5 % plus 1 KiB. A graph with states keeps them in place.
    `graph` does not change.
    """
    given = list(graph.nodes)
    greedy = _greedy_order(graph)
    best = greedy if _peak(graph, greedy) < _peak(graph, given) else given
    moved = _strings_last(graph, best)
    return moved if _peak(graph, moved) <= _peak(graph, best) * _ALLOWED_GROWTH + _ALLOWED_EXTRA_BYTES else best


def _strings_last(graph: Graph, nodes: list[Node]) -> list[Node]:
    """The nodes, with string nodes moved to the end: nodes with only string, map, sequence and optional outputs.

    Only other string nodes may read these outputs. The order is unchanged for a graph with states. No kernel runs
    string nodes, and between kernels they would split the native code into several segments.
    """
    if graph.states:  # the next value of a state may overwrite the old value, which such a node reads
        return nodes
    late: set[Node] = set()
    read: set[Value] = set()  # by nodes that are not late
    for node in reversed(nodes):
        if not any(map(_is_kernel_readable, node.outputs)) and read.isdisjoint(node.outputs):
            late.add(node)
        else:
            read.update(node_needs(node))
    return [node for node in nodes if node not in late] + [node for node in nodes if node in late]


def _is_kernel_readable(value: Value) -> bool:
    """Whether the value is a tensor of a type that kernels can read: of anything but strings."""
    return isinstance(value.type, TensorType) and value.type.dtype is not DType.STRING


def _greedy_order(graph: Graph) -> list[Node]:
    """List scheduling: run the ready node that grows the live set least; of several, the first in the graph's order."""
    scheduler = _GreedyScheduler(graph)
    return [scheduler.next() for _ in graph.nodes]


class _GreedyScheduler:
    """The state of list scheduling; `next` returns one node after the other.

    Nodes are named by their index in `graph.nodes`. The growth of the live set by a node is computed when the node
    becomes ready, and again when it becomes the last reader of a value.
    """

    def __init__(self, graph: Graph) -> None:
        self._nodes = graph.nodes
        self._reads = [set(node_reads(node)) for node in graph.nodes]
        self._readers: dict[Value, list[int]] = {}
        for index, reads in enumerate(self._reads):
            for value in reads:
                self._readers.setdefault(value, []).append(index)
        self._reads_left = {value: len(readers) for value, readers in self._readers.items()}
        needs = [set(node_needs(node)) for node in graph.nodes]
        self._waiters: dict[Value, list[int]] = {}  # nodes that read the value, or run after its producer
        for index, values in enumerate(needs):
            for value in values:
                self._waiters.setdefault(value, []).append(index)
        self._missing_inputs = [sum(value.producer is not None for value in values) for values in needs]
        self._live_outs, self._updates, self._state_readers = graph.live_outs(), _updates(graph), _state_readers(graph)
        self._growth: dict[int, int] = {}  # of the ready nodes, in bytes
        self._heap: list[tuple[int, int]] = []  # growth and index; entries whose growth is outdated are skipped
        for index, missing in enumerate(self._missing_inputs):
            if not missing:
                self._add_ready(index)

    def next(self) -> Node:
        """Run and return the ready node that grows the live set least. There must be a ready node.

        Nodes that overwrite a state that other nodes still have to read are taken only if no other node is ready.
        """
        postponed: list[tuple[int, int]] = []
        chosen: tuple[int, int] | None = None
        while self._heap and chosen is None:
            growth, index = entry = heappop(self._heap)
            if self._growth.get(index) != growth:
                continue
            if _overwrites(self._nodes[index], self._updates, self._state_readers):
                postponed.append(entry)
            else:
                chosen = entry
        if chosen is None:
            chosen, *postponed = postponed
        for entry in postponed:
            heappush(self._heap, entry)
        self._run(chosen[1])
        return self._nodes[chosen[1]]

    def _run(self, index: int) -> None:
        node = self._nodes[index]
        del self._growth[index]
        for value in node.outputs:
            for waiter in self._waiters.get(value, ()):
                self._missing_inputs[waiter] -= 1
                if not self._missing_inputs[waiter]:
                    self._add_ready(waiter)
        for nodes in self._state_readers.values():
            nodes.discard(node)
        for value in self._reads[index]:
            self._reads_left[value] -= 1
            if self._reads_left[value] == 1:
                for reader in self._readers[value]:
                    if reader in self._growth:
                        self._add_ready(reader)

    def _add_ready(self, index: int) -> None:
        """Add the ready node `index` to the heap of ready nodes, or update its growth there."""
        reads, live_outs = self._reads[index], self._live_outs
        freed = (v for v in reads if v.producer is not None and self._reads_left[v] == 1 and v not in live_outs)
        written = (v for v in self._nodes[index].outputs if v not in self._updates)
        growth = sum(map(_size, written)) - sum(map(_size, freed))
        if self._growth.get(index) != growth:
            self._growth[index] = growth
            heappush(self._heap, (growth, index))


def _updates(graph: Graph) -> dict[Value, Value]:
    """For the next value of each state, which is written into the state's memory, the state's present value."""
    return {state.update: state.value for state in graph.states}


def _state_readers(graph: Graph) -> dict[Value, set[Node]]:
    """For the present value of each state, the nodes that read it or a view of it."""
    found: dict[Value, set[Node]] = {state.value: set() for state in graph.states}
    for node in graph.nodes:
        for value in map(view_source, node_reads(node)):
            if value in found:
                found[value].add(node)
    return found


def _overwrites(node: Node, updates: Mapping[Value, Value], readers: Mapping[Value, set[Node]]) -> bool:
    """Whether the node computes the next value of a state whose present value other nodes still have to read."""
    return any(readers[updates[value]] - {node} for value in node.outputs if value in updates)


def _peak(graph: Graph, nodes: list[Node]) -> int:
    """The most bytes (for n = 1) that are live at one node, if the nodes run in this order."""
    last_read = {value: position for position, node in enumerate(nodes) for value in node_reads(node)}
    live_outs, updates = graph.live_outs(), _updates(graph)
    live = peak = 0
    ends: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for value in (value for value in node.outputs if value not in updates):
            live += _size(value)
            end = len(nodes) if value in live_outs else last_read.get(value, position)
            ends[end] = ends.get(end, 0) + _size(value)
        peak = max(peak, live)
        live -= ends.get(position, 0)
    return peak


def _size(value: Value) -> int:
    """The bytes of a value for n = 1, or for typical sizes; 0 for a value whose size only a run shows."""
    if not isinstance(value.type, TensorType) or value.type.shape is None:
        return 0
    nbytes = value.type.nbytes
    if has_only_sizes(nbytes):
        return typical_value(nbytes)
    if value.type.symbols - {"n"}:
        return 0
    return evaluate(nbytes, {"n": 1}) if symbols(nbytes) else int(nbytes)  # type: ignore[arg-type]
