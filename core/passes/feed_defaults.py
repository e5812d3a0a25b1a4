"""Defaults that a run gives become inputs: the graph that computes with what is fed instead of them."""

from __future__ import annotations

from collections.abc import Collection

from core.ir.graph import Graph
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
    forget_types(copy)
    infer_graph(copy)
    verify(copy, "feeding defaults")
    return copy
