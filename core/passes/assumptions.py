"""Dimensions that a model does not declare equal, and that have to be for its rows to share a run.

Exporters give the leading dimension of every input a name of its own, or none; a decoder's mask is as long as its past
and its new tokens together. Where rows are independent if such dimensions are equal, the graph is compiled for that. Of
other models, those leading dimensions are taken to be equal that meet: those of ids and their mask, beside images in
another number. Whoever runs it has to look at the inputs of every run, and to take the graph as declared for those that
do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, zip_longest

from core.errors import ModelError
from core.ir.dim import Dim, SymDim, symbol, symbols
from core.ir.graph import Graph
from core.ops.inference import infer_graph
from core.passes.base import input_symbols, is_elementwise, shape_of
from core.passes.indexed_views import wanted_extents
from core.passes.pipeline import for_proofs, run_passes
from core.passes.rows import BatchInfo, leading, rows


def as_one_batch(graph: Graph) -> tuple[Graph, BatchInfo]:
    """The graph to compile, and whether its rows are independent. It is the one given, or a copy in which some symbols
    of the inputs stand for others: if these dimensions are as the copy has them, rows are independent, or gathers read
    whole tensors and operands have one extent."""
    equal = _equal_leads(graph)
    together = _bound(graph, equal) if equal else graph
    if together is None:
        return graph, rows(graph)
    more = _wanted(together)
    fitting = _bound(together, more) if more else None
    for trial in (fitting, together):
        proof = rows(trial) if trial is not None else None
        if trial is not None and proof is not None and (proof.batchable or trial is graph):
            return trial, proof
    meeting = _where_leads_meet(graph)
    return meeting, rows(meeting)


def _where_leads_meet(graph: Graph) -> Graph:
    """The graph, or a copy in which the leading dimensions of several inputs are one, as some of its nodes need it."""
    while env := _meeting_leads(graph):
        bound = _bound(graph, env)
        if bound is None:
            break
        graph = bound  # in which further ones may meet
    return graph


def _meeting_leads(graph: Graph) -> dict[str, Dim]:
    """A leading symbol for another one that stands for it, where a node would gather from all of what it reads, or
    join elements one by one, if they were equal."""
    behind = {name for value in graph.inputs for dim in (shape_of(value) or ())[1:] for name in symbols(dim)}
    leads: list[Dim] = [
        symbol(name) for name in dict.fromkeys(map(leading, graph.inputs)) if name and name not in behind
    ]
    if graph.states or len(leads) < 2:
        return {}  # without the passes, which take as long as a proof
    simple, _ = run_passes(graph, for_proofs())
    infer_graph(simple)
    for pair in [*wanted_extents(simple), *_joined_extents(simple)]:
        if all(dim in leads for dim in pair):
            kept, other = sorted(pair, key=leads.index)
            return {str(other): kept}
    return {}


def _joined_extents(graph: Graph) -> list[tuple[Dim, Dim]]:
    """Pairs of extents, not known to be equal, of the operands of elementwise operators."""
    shapes = [[shape_of(value) or () for value in node.inputs] for node in graph.nodes if is_elementwise(node)]
    columns = [column for each in shapes for column in zip_longest(*map(reversed, each), fillvalue=1)]
    return [pair for column in columns for pair in combinations(dict.fromkeys(column), 2)]


def _equal_leads(graph: Graph) -> dict[str, Dim]:
    """The first input's leading symbol for those of all others, where each has one and they differ."""
    found = [leading(value) for value in graph.inputs]
    names = [name for name in found if name is not None]
    if graph.states or len(names) < len(found) or len(set(names)) < 2:
        return {}
    return {name: symbol(names[0]) for name in names}


def _bound(graph: Graph, env: Mapping[str, Dim]) -> Graph | None:
    """A copy with other dimensions for some symbols; None where its nodes do not fit them."""
    copy = graph.clone(env)
    try:
        infer_graph(copy)
    except ModelError:
        return None
    return copy


def _wanted(graph: Graph) -> dict[str, Dim]:
    """What symbols would have to be for gathers to read whole tensors."""
    if graph.states or all(node.op != "Range" for node in graph.nodes):
        return {}  # without the passes, which take as long as a proof
    simple, _ = run_passes(graph, for_proofs())
    free = input_symbols(simple) - {leading(value) for value in graph.inputs}
    env: dict[str, Dim] = {}
    for pair in wanted_extents(simple):
        for name, dim in (pair, reversed(pair)):
            is_free = isinstance(name, SymDim) and str(name) in free
            others = symbols(dim)
            if is_free and others and str(name) not in others and others <= free - env.keys():
                env.setdefault(str(name), dim)
                break
    return env
