"""The checker's entry: a plan against its graph."""

from __future__ import annotations

from itertools import islice

from core.check.control import bodies_of, check_body, check_frame
from core.check.facts import Facts, Sizes, facts_of
from core.check.identity import Identities
from core.check.run import Run
from core.check.strides import check_walks
from core.check.weights import Weights
from core.ir.dim import Dim, broken
from core.ir.graph import Graph
from core.kernels.target import GpuTarget, Target
from core.plan.plan import Planned

_SIZES = (0, 1, 2, 7)
_MOST = 1 << 20  # rows, where all that is looked at is in one piece
_MOST_SEARCHED = 1 << 12  # batch sizes, for some that the plan supposes
_MANY = 32  # rows, where values lie in pieces: each row has some of its own
_MOST_PIECES = 1 << 14  # of such an operand, beyond the 8 rows that are always tried


def check_plan(
    graph: Graph, planned: Planned, target: Target | GpuTarget, winograd: bool = True, offered: bool = True
) -> None:
    """PlanError where the plan does not run the graph: where a step reads what is not there or is overwritten, writes
    where another one still reads, or goes beyond its memory; for batches of 0, 1, 2, 7 and many rows
    (a million; where values lie in pieces inside others, 32, or 8 where each row has many), as far as they are what the
    plan supposes.

    `target` and `winograd` are what the plan was made for. The graph's shapes may depend on `n` alone, or on data.
    `offered`: whether its kernels are those that the catalog offers for the nodes of the graph.
    """
    _check(Facts(graph, planned, target, winograd, offered=offered), planned.plan.supposed)


def _check(facts: Facts, supposed: tuple[Dim, ...]) -> None:
    facts = facts_of(facts)
    weights, bodies = Weights(facts), list(bodies_of(facts))
    check_walks(facts)
    for body in bodies:
        check_body(facts, body)
    for n in _sizes(facts, supposed):
        sizes = Sizes(n)
        Run(facts, sizes, Identities(facts, sizes), weights).check()
        for body in bodies:
            check_frame(facts, body, sizes)
    for body in bodies:
        _check(Facts(body.closed.graph, body.planned, facts.target, facts.winograd, alone=False), supposed)


def _sizes(facts: Facts, supposed: tuple[Dim, ...]) -> list[int]:
    """The batch sizes to try: the first few that the plan supposes where none of the usual ones is."""
    usual = [n for n in _usual_sizes(facts) if not broken(supposed, {"n": n})]
    most = facts.plan.most_rows
    fit = (n for n in range(_MOST_SEARCHED) if not broken(supposed, {"n": n}) and (most is None or n <= most))
    return usual or list(islice(fit, 2 if facts.depends_on_batch else 1))


def _usual_sizes(facts: Facts) -> list[int]:
    if not facts.depends_on_batch:
        return [1]
    pieces = _pieces(facts)
    largest = _MOST if pieces == 0 else max(_SIZES[-1] + 1, min(_MANY, 2 * _MOST_PIECES // pieces))
    if facts.plan.most_rows is not None:
        largest = min(largest, facts.plan.most_rows)
    return [*_SIZES, *([largest] if largest > _SIZES[-1] else [])]


def _pieces(facts: Facts) -> int:
    """The most pieces that an operand consists of for a batch of two; 0 where every operand lies in one piece."""
    same = Identities(facts, Sizes(2))
    boxes = {box for each in facts.steps for v in each.values if v is not None and (box := same.box(v)) is not None}
    return max((len(box.spans().starts) for box in boxes if not box.is_dense), default=0)
