"""Graphs with other inputs than the model's: defaults that a run gives, or inputs of other types."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from core.ir.graph import Graph
from core.ir.types import ValueType
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


def _inferred(graph: Graph, stage: str) -> Graph:
    forget_types(graph)
    infer_graph(graph)
    verify(graph, stage)
    return graph
