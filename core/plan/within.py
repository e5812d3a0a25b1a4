"""A plan that stays within a limit of memory: values are computed again until its arena fits."""

from __future__ import annotations

from collections.abc import Callable

from core.errors import ModelError
from core.ir.graph import Graph
from core.passes.base import PassResult
from core.passes.recompute import Recompute
from core.plan.order import order
from core.plan.plan import Planned

_TRIES = 6
_MARGIN = 0.98  # of what a try asks for, once one has shown how an arena compares with the bytes that are alive


def plan_within(graph: Graph, limit: int, plan: Callable[[Graph], Planned]) -> tuple[Planned, Graph, PassResult]:
    """A plan whose arena takes at most `limit` bytes, the graph that it is of, and what recomputation that took; the
    graph given stays as it is.

    The pass counts the bytes that are alive, while an arena has gaps, and results in the place of operands: so what the
    pass is asked for follows what became of it. ModelError with the least that was reached where the limit is out of
    reach. The graph's shapes must be known.
    """
    planned, changed, result, goal = plan(graph), graph, PassResult(0), limit
    reached = [planned.plan.arena.at(1)]
    while reached[-1] > limit and len(reached) <= _TRIES:
        changed = graph.clone()
        changed.nodes = order(changed)
        result = Recompute(goal).run(changed)
        planned = plan(changed)
        reached.append(planned.plan.arena.at(1))
        goal = int(goal * min(limit / reached[-1], 1) * _MARGIN)
    if reached[-1] > limit:
        raise ModelError(f"needs {min(reached)} bytes even when values are computed again, {limit} are given")
    return planned, changed, result
