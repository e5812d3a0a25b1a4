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
    """A plan whose arena has at most `limit` bytes for n = 1, the planned graph, and the result of the recompute pass.

    `plan` plans a graph. `graph` does not change: the result is `graph` itself if its plan fits, otherwise a copy in
    which values are recomputed. Its shapes must be known. The pass limits the live bytes, which differ from the arena:
    an arena has gaps, and some results are computed in place. So each trial but the first derives its
    goal for the pass from the arena of the trial before. ModelError, with the smallest arena that was reached, if none
    of 6 trials fits.
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
