"""Which sizes of a model are numbers when its code is made: the symbols of its inputs, and binding them."""

from __future__ import annotations

from collections.abc import Iterable

from core.ir.dim import Dim, is_never_negative, substitute, symbol, symbols
from core.ir.dims import is_sized, place_of
from core.ir.equation import solved
from core.ir.graph import Graph, node_reads
from core.ir.types import TensorType
from core.ir.verify import verify
from core.ops.inference import infer_graph
from core.ops.meeting import Pair, met_in
from core.ops.supposed import suppositions
from core.passes.base import shape_of
from core.passes.rows import leading
from core.runtime.given import Sizes
from core.runtime.session import BatchInfo


def bind(graph: Graph, batching: BatchInfo, binding: Sizes) -> Graph:
    """A copy of the graph with the symbols of `binding` replaced by their sizes, and the batch symbol renamed to `n`
    unless it is one of those."""
    env: dict[str, Dim] = dict(binding)
    if batching.symbol is not None and batching.symbol not in env:
        env[batching.symbol] = symbol("n")
    bound = graph.clone(env)
    bound.defaults.clear()  # from here on constants are what they are
    infer_graph(bound)
    verify(bound, "binding shapes")
    return bound


def leading_symbol(graph: Graph) -> str | None:
    """The symbol that leads the first input that has one: it varies at run time even when rows are not independent. It
    is none that an input has twice, as an adjacency matrix [n, n] has the number of nodes: n*n elements are no rows;
    code for any sizes serves them. A model with state has one code, whatever its symbols are."""
    found = filter(None, map(leading, graph.inputs))
    return next((name for name in found if graph.states or not _is_twice(graph, name)), None)


def _is_twice(graph: Graph, name: str) -> bool:
    """Whether an input has several dimensions that depend on this symbol."""
    return any(sum(name in symbols(dim) for dim in shape_of(value) or ()) > 1 for value in graph.inputs)


def varying_in(binding: Sizes) -> frozenset[str]:
    """The symbols of a graph that is bound so: the batch size, and those of what is no number."""
    return frozenset(("n",)).union(*(symbols(dim) for _, dim in binding))


def supposed_of(graph: Graph, *varying: str | None) -> tuple[Dim, ...]:
    """What the code for all values of these symbols supposes."""
    names = set(filter(None, varying))
    if not names:
        return ()
    given = set(input_symbols(graph))
    return tuple(dim for dim in suppositions(graph, infer_graph(graph), given) if names & symbols(dim))


def input_symbols(graph: Graph) -> list[str]:
    """The symbols of the inputs, sorted."""
    return sorted({name for v in graph.inputs if isinstance(v.type, TensorType) for name in v.type.symbols})


def other_symbols(graph: Graph, batching: BatchInfo) -> list[str]:
    """Symbols of the inputs that are bound per shape."""
    return [name for name in input_symbols(graph) if name != batching.symbol]


def equal_sizes(graph: Graph) -> dict[str, Dim]:
    """Sizes that have to be something else for the nodes of a graph, and what they are then; else those that nodes
    broadcast. Empty where there is none. Infers the types of the graph again."""
    met = met_in(graph, infer_graph(graph))
    return _solutions(met.equal) or _solutions(met.broadcast)


def _solutions(pairs: Iterable[Pair]) -> dict[str, Dim]:
    """Sizes, and what they are where all of these pairs are equal; no size is named that another one replaces. Pairs
    that no sizes make equal are left out."""
    found: dict[str, Dim] = {}
    for pair in pairs:
        one, other = (substitute(dim, found) for dim in pair)
        if not all(isinstance(dim, int) or is_sized(dim) for dim in (one, other)):
            continue
        answer = solved(one, other, lambda name: place_of(name) is not None)
        if answer is not None:
            found = {name: substitute(dim, dict([answer])) for name, dim in found.items()} | dict([answer])
    return found


def extents_of(graph: Graph) -> tuple[Dim, ...]:
    """What the code for any sizes supposes besides the types: kernels are written for extents of at least one. A part
    of a Concat may be empty, as a past is before the first token."""
    read = [value for node in graph.nodes if node.op != "Concat" for value in node_reads(node)]
    made = [value for node in graph.nodes for value in node.outputs]
    dims = dict.fromkeys(dim for value in (*read, *made) for dim in shape_of(value) or ())
    return tuple(dim - 1 for dim in dims if not isinstance(dim, int) and not is_never_negative(dim - 1))
