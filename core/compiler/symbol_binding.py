"""The symbols of a model's inputs: which of them become numbers when code is compiled, and binding them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lathe.core.ir.dim import Dim, is_never_negative, substitute, symbol, symbols
from lathe.core.ir.dims import has_only_sizes, size_index
from lathe.core.ir.equation import solve
from lathe.core.ir.graph import Array, Graph, Value, node_reads
from lathe.core.ir.types import TensorType
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef.assumed_extents import assumptions
from lathe.core.ops.opdef.equal_extents import Pair, meeting_extents
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.passes.proofs.rows import leading
from lathe.core.passes.rewrite.base import shape_of
from lathe.core.runtime.session.run_inputs import CodeBinding


def bind(graph: Graph, batching: BatchInfo, binding: CodeBinding) -> Graph:
    """A copy of the graph with the symbols of `binding` replaced by its values (numbers, or sizes of a table).

    The batch symbol is renamed to `n`, unless `binding` has it. The copy has no defaults: their values are constants.
    ModelError or VerifyError if the graph does not accept these values.
    """
    env: dict[str, Dim] = dict(binding)
    if batching.symbol is not None and batching.symbol not in env:
        env[batching.symbol] = symbol("n")
    bound, _ = inferred_copy(graph, env)
    verify(bound, "binding shapes")
    return bound


def inferred_copy(graph: Graph, env: Mapping[str, Dim]) -> tuple[Graph, dict[Value, Array]]:
    """A copy without defaults whose symbols have the values of `env`, and what inference knows of its values."""
    copy = graph.clone(env)
    copy.defaults.clear()  # from here on constants cannot be fed
    return copy, infer_graph(copy)


def leading_symbol(graph: Graph) -> str | None:
    """The symbol along axis 0 of the first input that has one there; None if none has one that counts.

    Compiled code leaves it open, as the batch size, even if rows are not independent. A symbol that an input has
    twice does not count, such as the number of nodes in an adjacency matrix [n, n], because n*n elements are no rows;
    dynamic-shape code serves such models. In a model with state every symbol counts, because the states belong to one
    compiled code.
    """
    found = filter(None, map(leading, graph.inputs))
    return next((name for name in found if graph.states or not _is_twice(graph, name)), None)


def _is_twice(graph: Graph, name: str) -> bool:
    """Whether some input has several dimensions that contain the symbol `name`."""
    return any(sum(name in symbols(dim) for dim in shape_of(value) or ()) > 1 for value in graph.inputs)


def varying_symbols(binding: CodeBinding) -> frozenset[str]:
    """The symbols that inputs have after `bind`: `n`, and the sizes that occur in values of the binding."""
    return frozenset(("n",)).union(*(symbols(dim) for _, dim in binding))


def code_assumptions(graph: Graph, *varying: str | None, known: dict[Value, Array] | None = None) -> tuple[Dim, ...]:
    """Dimensions that inference assumes to be 0 or more, those that contain one of the symbols `varying`.

    Code for all values of these symbols is right only while none of these dimensions is negative. `known` is the result
    of `infer_graph` for the graph; without it, the types of the graph are inferred again, in place.
    """
    names = set(filter(None, varying))
    if not names:
        return ()
    given = set(input_symbols(graph))
    known = infer_graph(graph) if known is None else known
    return tuple(dim for dim in assumptions(graph, known, given) if names & symbols(dim))


def input_symbols(graph: Graph) -> list[str]:
    """The symbols of the inputs, sorted."""
    return sorted({name for v in graph.inputs if isinstance(v.type, TensorType) for name in v.type.symbols})


def other_symbols(graph: Graph, batching: BatchInfo) -> list[str]:
    """The symbols of the inputs other than the batch symbol, which are bound per shape."""
    return [name for name in input_symbols(graph) if name != batching.symbol]


def equal_sizes(graph: Graph, known: Mapping[Value, Array]) -> dict[str, Dim]:
    """For each size that a node of a graph needs to equal another dimension, that dimension.

    If there are none, the same for sizes that nodes broadcast together; empty if there are none either. `known` is the
    result of `infer_graph` for the graph.
    """
    met = meeting_extents(graph, known)
    return _solutions(met.equal) or _solutions(met.broadcast)


def _solutions(pairs: Iterable[Pair]) -> dict[str, Dim]:
    """A substitution of sizes (`size0`, ...) by dimensions that makes the two sides of each pair equal.

    No value of it contains a size that is replaced. Pairs are ignored that have other symbols than sizes, or that no
    such substitution makes equal.
    """
    found: dict[str, Dim] = {}
    for pair in pairs:
        one, other = (substitute(dim, found) for dim in pair)
        if not all(isinstance(dim, int) or has_only_sizes(dim) for dim in (one, other)):
            continue
        answer = solve(one, other, lambda name: size_index(name) is not None)
        if answer is not None:
            found = {name: substitute(dim, dict([answer])) for name, dim in found.items()} | dict([answer])
    return found


def least_extents(graph: Graph) -> tuple[Dim, ...]:
    """The dimensions `extent - 1` that must be 0 or more, as kernels of dynamic-shape code need extents of at least 1.

    Numbers, and extents that are always positive, are left out. Inputs of Concat may be empty, such as a past before
    the first token.
    """
    read = [value for node in graph.nodes if node.op != "Concat" for value in node_reads(node)]
    made = [value for node in graph.nodes for value in node.outputs]
    dims = dict.fromkeys(dim for value in (*read, *made) for dim in shape_of(value) or ())
    return tuple(dim - 1 for dim in dims if not isinstance(dim, int) and not is_never_negative(dim - 1))
