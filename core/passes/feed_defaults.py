"""Graphs with other inputs than the model's: defaults that a run gives, or inputs of other types."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from core.errors import UnsupportedError
from core.ir.dim import symbol
from core.ir.graph import Graph
from core.ir.types import TensorType, ValueType
from core.ir.verify import verify
from core.ops.inference import forget_types, infer_graph


def with_fed(graph: Graph, names: Collection[str]) -> Graph:
    """A copy of `graph` in which the defaults of these names are its last inputs, in the graph's order, of the types
    that may be given. It has no further defaults. ValueError for a name that is no default.

    What is known of shapes is found out again: it may have followed from a value that is an input now.
    """
    copy = graph.clone()
    fed = {value: type_ for value, type_ in copy.defaults.items() if value.name in names}
    if len(fed) != len(set(names)):
        unknown = sorted(set(names) - {value.name for value in fed})
        raise ValueError(f"graph {graph.name} has no defaults named {', '.join(unknown)}")
    for value, type_ in fed.items():
        del copy.constants[value]
        value.type = type_
        copy.inputs.append(value)
    copy.defaults.clear()
    return _inferred(copy, "feeding defaults")


def with_types(graph: Graph, types: Mapping[str, ValueType]) -> Graph:
    """A copy of `graph` whose inputs have the types of these names, where there are such."""
    copy = graph.clone()
    for value in copy.inputs:
        value.type = types.get(value.name, value.type)
    return _inferred(copy, "giving inputs other types")


def with_ranks(graph: Graph, ranks: Mapping[str, int]) -> Graph:
    """A copy of `graph` whose inputs of these names have these ranks, and a symbol of its own for each dimension.
    ModelError where the nodes do not take them; UnsupportedError for a graph with state, which belongs to one code."""
    if graph.states:
        raise UnsupportedError("a model with state has one code, whatever the ranks of its inputs are")
    taken = {name for value in graph.values() for name in getattr(value.type, "symbols", ())}
    fresh = map(symbol, filter(lambda name: name not in taken, map("dim{}".format, itertools.count())))
    types = {value.name: value.type for value in graph.inputs}
    for name, rank in ranks.items():
        given = types[name]
        if isinstance(given, TensorType):
            types[name] = TensorType(given.dtype, tuple(itertools.islice(fresh, rank)))
    return with_types(graph, types)


def _inferred(graph: Graph, stage: str) -> Graph:
    forget_types(graph)
    infer_graph(graph)
    verify(graph, stage)
    return graph
