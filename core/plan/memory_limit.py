"""Plans within a memory limit, by rematerialization: values are recomputed until the arena fits."""

from __future__ import annotations

from collections.abc import Callable

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Graph
from lathe.core.passes.lowering.recompute import Recompute
from lathe.core.passes.rewrite.base import PassResult
from lathe.core.plan.order import node_order
from lathe.core.plan.plan import PlannedGraph

_MAX_TRIALS = 6
_MARGIN = 0.98  # the next goal is the last one times limit / arena, times this factor


def plan_within(
    graph: Graph, limit: int, plan: Callable[[Graph], PlannedGraph]
) -> tuple[PlannedGraph, Graph, PassResult]:
    """A plan whose arena has at most `limit` bytes, the graph that it is for, and the result of the recompute pass.

    `plan` plans a graph. `graph` itself does not change; its shapes must be known. The pass counts live bytes, while an
    arena has gaps, and results that are computed in place. So each trial's goal follows from the arena
    of the last one. ModelError with the smallest arena that was reached if none fits.
    """
    planned, changed, result, goal = plan(graph), graph, PassResult(0), limit
    reached = [planned.plan.arena.at(1)]
    while reached[-1] > limit and len(reached) <= _MAX_TRIALS:
        changed = graph.clone()
        changed.nodes = node_order(changed)
        result = Recompute(goal).run(changed)
        planned = plan(changed)
        reached.append(planned.plan.arena.at(1))
        goal = int(goal * min(limit / reached[-1], 1) * _MARGIN)
    if reached[-1] > limit:
        raise ModelError(f"needs {min(reached)} bytes even when values are computed again, {limit} are given")
    return planned, changed, result
