"""Finds dimensions that a model does not declare equal, but that must be equal for its rows to be independent.

Exporters give the leading dimension of every input a name of its own. A decoder's mask is as long as its past plus its
new tokens, but declares a symbol of its own. If rows are independent when such dimensions are equal, the graph is
compiled under this assumption. Otherwise, leading dimensions are assumed equal only if some node combines them: those
of token ids and their mask, for example, but not that of images, whose number may differ. The session must check the
inputs of every run, and use the graph as declared for inputs that break the assumption.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, zip_longest

from lathe.core.errors import ModelError
from lathe.core.ir.dim import Dim, SymDim, symbol, symbols
from lathe.core.ir.graph import Graph, attr_symbols
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.pipeline import canonical_passes, run_passes
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.passes.proofs.rows import leading, rows
from lathe.core.passes.rewrite.base import input_symbols, is_elementwise, shape_of
from lathe.core.passes.simplify.indexed_views import extents_to_equate


def assume_one_batch(graph: Graph) -> tuple[Graph, BatchInfo]:
    """The graph to compile, and the result of the proof that its rows (batch elements) are independent.

    The first is `graph` itself, or a copy in which some input symbols are replaced by others. If a run's dimensions
    agree with the copy, then its rows are independent, or at least gathers read whole tensors and the operands of
    elementwise operators have equal extents.
    """
    equal = _equal_leads(graph)
    merged = _substituted(graph, equal) if equal else graph
    if merged is None:
        return graph, rows(graph)
    simple = _simplified(merged) if _may_want_extents(merged) else None
    trials = [(merged, simple)]
    if simple is not None and (more := _wanted_extents(simple)):
        fitting = _substituted(merged, more)
        trials = [(fitting, simple.clone(more)), *trials] if fitting is not None else trials
    for trial, simplified in trials:
        proof = rows(trial, simplified)
        if proof.batchable or trial is graph:
            return trial, proof
    meeting = _where_leads_meet(graph)
    return meeting, rows(meeting)


def _simplified(graph: Graph) -> Graph:
    """A copy that computes the same, after the passes that precede a proof."""
    simple, _ = run_passes(graph, canonical_passes())
    infer_graph(simple)
    return simple


def _where_leads_meet(graph: Graph) -> Graph:
    """A copy of `graph` in which leading dimensions that some node combines are one symbol; `graph` if none are."""
    while env := _meeting_leads(graph):
        substituted = _substituted(graph, env)
        if substituted is None:
            break
        graph = substituted  # in which further leading dimensions may meet
    return graph


def _meeting_leads(graph: Graph) -> dict[str, Dim]:
    """A substitution of one leading symbol by another that a node combines with it, and that an earlier input has.

    A node combines two extents if, once they are equal, it gathers from a whole tensor, or is elementwise on equal
    extents. Empty if there is no such pair.
    """
    elsewhere = {name for value in graph.inputs for dim in (shape_of(value) or ())[1:] for name in symbols(dim)}
    leads: list[Dim] = [
        symbol(name) for name in dict.fromkeys(map(leading, graph.inputs)) if name and name not in elsewhere
    ]
    if graph.states or len(leads) < 2:
        return {}  # nothing to find: saves the passes below, which take as long as a proof
    simple = _simplified(graph)
    for pair in [*extents_to_equate(simple), *_joined_extents(simple)]:
        if all(dim in leads for dim in pair):
            first, other = sorted(pair, key=leads.index)
            return {str(other): first}
    return {}


def _joined_extents(graph: Graph) -> list[tuple[Dim, Dim]]:
    """Pairs of different extents that elementwise nodes have on one axis of their operands, 1 for a missing axis."""
    shapes = [[shape_of(value) or () for value in node.inputs] for node in graph.nodes if is_elementwise(node)]
    columns = [column for each in shapes for column in zip_longest(*map(reversed, each), fillvalue=1)]
    return [pair for column in columns for pair in combinations(dict.fromkeys(column), 2)]


def _equal_leads(graph: Graph) -> dict[str, Dim]:
    """A substitution of every leading symbol of the inputs by the leading symbol of the first input.

    Empty if an input has no leading symbol, all are equal, or the graph has state.
    """
    found = [leading(value) for value in graph.inputs]
    names = [name for name in found if name is not None]
    if graph.states or len(names) < len(found) or len(set(names)) < 2:
        return {}
    return {name: symbol(names[0]) for name in names}


def _substituted(graph: Graph, env: Mapping[str, Dim]) -> Graph | None:
    """A copy with the symbols of `env` replaced; None if type inference then fails, or if attributes have the symbols.

    For inputs that break the assumption the session undoes the replacement in the types of the inputs. The types of all
    other values follow from these, but attributes would keep the replacement.
    """
    if any(not attr_symbols(node).isdisjoint(env) for node in graph.nodes):
        return None
    copy = graph.clone(env)
    try:
        infer_graph(copy)
    except ModelError:
        return None
    return copy


def _may_want_extents(graph: Graph) -> bool:
    """Whether a graph has positions that it computes; without any, the passes before `_wanted_extents` are saved."""
    return not graph.states and any(node.op == "Range" for node in graph.nodes)


def _wanted_extents(simple: Graph) -> dict[str, Dim]:
    """A substitution of input symbols under which gathers by computed positions read whole tensors; empty if none.

    Leading symbols are not replaced. `simple`: the graph after the passes that precede a proof.
    """
    free = input_symbols(simple) - {leading(value) for value in simple.inputs}
    env: dict[str, Dim] = {}
    for pair in extents_to_equate(simple):
        for name, dim in (pair, reversed(pair)):
            is_free = isinstance(name, SymDim) and str(name) in free
            others = symbols(dim)
            if is_free and others and str(name) not in others and others <= free - env.keys():
                env.setdefault(str(name), dim)
                break
    return env
