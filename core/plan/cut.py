"""The least cut of a graph in two: every node pays for its side, and every edge whose ends are on different sides.

By the largest flow (Ford and Fulkerson 1956, with the shortest paths of Edmonds and Karp 1972).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from itertools import pairwise
from typing import TypeVar

N = TypeVar("N", bound=Hashable)

_UNIT = 1e-9  # what costs are rounded to: flows must be whole numbers to come to an end


def least_cut(costs: Mapping[N, tuple[float, float]], edges: Mapping[tuple[N, N], float]) -> set[N]:
    """The nodes of the first side where the sum of all costs is least. `costs`: of a node on the first side and on the
    second; `edges`: of two nodes that are not on one side."""
    source, sink = object(), object()
    left: dict[object, dict[object, int]] = {source: {}, sink: {}, **{node: {} for node in costs}}

    def join(a: object, b: object, there: float, back: float) -> None:
        left[a][b] = left[a].get(b, 0) + round(there / _UNIT)
        left[b][a] = left[b].get(a, 0) + round(back / _UNIT)

    for node, (first, second) in costs.items():
        join(source, node, second, 0)  # cut when the node is on the second side
        join(node, sink, first, 0)
    for (one, other), cost in edges.items():
        join(one, other, cost, cost)
    while (path := _shortest(left, source, sink)) is not None:
        steps = list(pairwise(path))
        flow = min(left[a][b] for a, b in steps)
        for a, b in steps:
            left[a][b] -= flow
            left[b][a] += flow
    reached = _reachable(left, source)
    return {node for node in costs if node in reached}


def _shortest(left: Mapping[object, Mapping[object, int]], source: object, sink: object) -> list[object] | None:
    before = _reachable(left, source)
    if sink not in before:
        return None
    path = [sink]
    while path[-1] is not source:
        path.append(before[path[-1]])
    return path[::-1]


def _reachable(left: Mapping[object, Mapping[object, int]], source: object) -> dict[object, object]:
    """What can be reached over edges with capacity left, each with the node before it."""
    before: dict[object, object] = {source: source}
    queue = deque([source])
    while queue:
        node = queue.popleft()
        for other, capacity in left[node].items():
            if capacity > 0 and other not in before:
                before[other] = node
                queue.append(other)
    return before
