"""The minimum cut of a graph: each node has a cost for its side, and each edge has a cost if it crosses the cut.

By maximum flow (Ford and Fulkerson 1956, with the shortest augmenting paths of Edmonds and Karp 1972).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from itertools import pairwise
from typing import TypeVar

N = TypeVar("N", bound=Hashable)

_UNIT = 1e-9  # costs are rounded to multiples of this: with integer capacities the algorithm terminates


def min_cut(costs: Mapping[N, tuple[float, float]], edges: Mapping[tuple[N, N], float]) -> set[N]:
    """The nodes on the first side of a division into two sides whose total cost is minimal.

    `costs` has for each node the cost if it is on the first side, and the cost if it is on the second side. `edges` has
    for a pair of nodes the cost if they are on different sides. Costs are not negative, and are rounded to multiples of
    1e-9. Of several minimal divisions, the one with the smallest first side is returned.
    """
    source, sink = object(), object()
    residual: dict[object, dict[object, int]] = {source: {}, sink: {}, **{node: {} for node in costs}}

    def add_edge(a: object, b: object, there: float, back: float) -> None:
        residual[a][b] = residual[a].get(b, 0) + round(there / _UNIT)
        residual[b][a] = residual[b].get(a, 0) + round(back / _UNIT)

    for node, (first, second) in costs.items():
        add_edge(source, node, second, 0)  # cut if the node is on the second side
        add_edge(node, sink, first, 0)
    for (one, other), cost in edges.items():
        add_edge(one, other, cost, cost)
    while (path := _shortest_path(residual, source, sink)) is not None:
        steps = list(pairwise(path))
        flow = min(residual[a][b] for a, b in steps)
        for a, b in steps:
            residual[a][b] -= flow
            residual[b][a] += flow
    reached = _reachable(residual, source)
    return {node for node in costs if node in reached}


def _shortest_path(
    residual: Mapping[object, Mapping[object, int]], source: object, sink: object
) -> list[object] | None:
    """The nodes of an augmenting path with the fewest edges, source first; None if the sink cannot be reached."""
    predecessors = _reachable(residual, source)
    if sink not in predecessors:
        return None
    path = [sink]
    while path[-1] is not source:
        path.append(predecessors[path[-1]])
    return path[::-1]


def _reachable(residual: Mapping[object, Mapping[object, int]], source: object) -> dict[object, object]:
    """The nodes that can be reached over edges with residual capacity, each with its predecessor on a shortest path."""
    predecessors: dict[object, object] = {source: source}
    queue = deque([source])
    while queue:
        node = queue.popleft()
        for other, capacity in residual[node].items():
            if capacity > 0 and other not in predecessors:
                predecessors[other] = node
                queue.append(other)
    return predecessors
