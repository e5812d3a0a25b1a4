"""The entry point of the checker: `check_plan` checks a plan against its graph."""

from __future__ import annotations

from itertools import islice

from lathe.core.check.aliases import Aliases
from lathe.core.check.control import bodies_of, check_body, check_frame
from lathe.core.check.facts import Facts, Sizes, check_facts
from lathe.core.check.strides import check_strides
from lathe.core.check.symbolic_run import SymbolicRun
from lathe.core.check.weights import Weights
from lathe.core.ir.dim import Dim, assumptions_hold
from lathe.core.ir.graph import Graph
from lathe.core.kernels.target import GpuTarget, Target
from lathe.core.plan.plan import PlannedGraph

_SIZES = (0, 1, 2, 7)
_LARGEST = 1 << 20  # the largest batch size if all operands are contiguous
_LARGEST_STRIDED = 32  # the largest batch size if operands are windows: each row adds byte ranges to check
_MAX_RANGES = 1 << 14  # byte ranges of one operand; a batch of 8 is checked even if it has more
_MAX_SEARCHED = 1 << 12  # the batch sizes below this are searched for one that the plan's assumptions allow


def check_plan(
    graph: Graph, planned: PlannedGraph, target: Target | GpuTarget, winograd: bool = True, offered: bool = True
) -> None:
    """PlanError if the plan does not compute the graph.

    That is so if a step reads a value that is missing or overwritten, overwrites a value that is still needed, or
    accesses memory out of bounds. The batch sizes 0, 1, 2, 7 and a large one are checked, as far as the plan's
    assumptions allow them. The large one is 2**20 if all operands are contiguous, otherwise 8 to 32, but at most the
    plan's `max_rows`. If none of these sizes is allowed, the first two allowed ones below 4096 are checked, if there
    are any. If the plan does not depend on the batch size, one size is checked.

    `target` and `winograd` are the arguments of `make_plan`. The shapes of the graph may depend on `n` and on data.
    With `offered`, the kernels must be among those that the catalog offers for the nodes.
    """
    _check(Facts(graph, planned, target, winograd, offered=offered), planned.plan.supposed)


def _check(facts: Facts, supposed: tuple[Dim, ...]) -> None:
    facts = check_facts(facts)
    weights, bodies = Weights(facts), list(bodies_of(facts))
    check_strides(facts)
    for body in bodies:
        check_body(facts, body)
    for n in _sizes(facts, supposed):
        sizes = Sizes(n, facts.plan.least_rows)
        SymbolicRun(facts, sizes, Aliases(facts, sizes), weights).check()
        for body in bodies:
            check_frame(facts, body, sizes)
    for body in bodies:
        _check(
            Facts(body.closed.graph, body.planned, facts.target, facts.winograd, alone=False),
            () if body.has_own_rows else supposed,
        )


def _sizes(facts: Facts, supposed: tuple[Dim, ...]) -> list[int]:
    """The batch sizes to check: those of `_usual_sizes` that the assumptions `supposed` allow.

    If the assumptions allow none of these, the first two sizes below 4096 that they and `max_rows` allow (one size if
    the plan does not depend on it).
    """
    usual = [n for n in _usual_sizes(facts) if assumptions_hold(supposed, {"n": n})]
    most = facts.plan.max_rows
    allowed = (n for n in range(_MAX_SEARCHED) if (most is None or n <= most) and assumptions_hold(supposed, {"n": n}))
    return usual or list(islice(allowed, 2 if facts.depends_on_batch else 1))


def _usual_sizes(facts: Facts) -> list[int]:
    if not facts.depends_on_batch:
        return [1]
    ranges = _most_ranges(facts)
    largest = _LARGEST if ranges == 0 else max(_SIZES[-1] + 1, min(_LARGEST_STRIDED, 2 * _MAX_RANGES // ranges))
    if facts.plan.max_rows is not None:
        largest = min(largest, facts.plan.max_rows)
    return [*_SIZES, *([largest] if largest > _SIZES[-1] else [])]


def _most_ranges(facts: Facts) -> int:
    """The most byte ranges of an operand for a batch of two; 0 if every operand is contiguous."""
    same = Aliases(facts, Sizes(2))
    boxes = {box for each in facts.steps for v in each.values if v is not None and (box := same.box(v)) is not None}
    return max((len(box.spans().starts) for box in boxes if not box.is_dense), default=0)
