"""Which sizes of a model are numbers when its code is made: the symbols of its inputs, and binding them."""

from __future__ import annotations

from itertools import permutations

from core.ir.dim import Dim, is_never_negative, is_open, symbol, symbols
from core.ir.dims import is_sized, place_of
from core.ir.graph import Graph, node_reads
from core.ir.types import TensorType
from core.ir.verify import verify
from core.ops.inference import infer_graph
from core.ops.supposed import suppositions
from core.passes.base import is_elementwise, shape_of
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
    """The symbol that leads the first input that has one: it varies at run time even when rows are not independent."""
    return next(filter(None, map(leading, graph.inputs)), None)


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


def equality(graph: Graph) -> tuple[str, Dim] | None:
    """A size, and the dimension that it meets in a node whose result is of unknown extent for that reason."""
    for node in graph.nodes:
        if not is_elementwise(node) or not any(map(is_open, shape_of(node.output) or ())):
            continue
        shapes = [shape for value in node.inputs if value is not None and (shape := shape_of(value)) is not None]
        for axis in range(1, max(map(len, shapes), default=0) + 1):
            met = dict.fromkeys(shape[-axis] for shape in shapes if len(shape) >= axis and is_sized(shape[-axis]))
            for one, other in permutations(met, 2):
                if place_of(str(one)) is not None and str(one) not in symbols(other):
                    return str(one), other
    return None


def extents_of(graph: Graph) -> tuple[Dim, ...]:
    """What the code for any sizes supposes besides the types: kernels are written for extents of at least one. A part
    of a Concat may be empty, as a past is before the first token."""
    read = [value for node in graph.nodes if node.op != "Concat" for value in node_reads(node)]
    made = [value for node in graph.nodes for value in node.outputs]
    dims = dict.fromkeys(dim for value in (*read, *made) for dim in shape_of(value) or ())
    return tuple(dim - 1 for dim in dims if not isinstance(dim, int) and not is_never_negative(dim - 1))
