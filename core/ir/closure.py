"""Bodies of control flow as graphs that stand alone: what they take from the graphs around them made explicit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from core.ir.graph import Array, Graph, Value, captures


class Closed(NamedTuple):
    """A copy of a body that captures nothing: `graph` has further inputs behind its own, one for each value of `outer`.

    Constants of the graphs around it are constants of its own.
    """

    graph: Graph
    outer: tuple[Value, ...]


def closed(body: Graph, constants: Mapping[Value, Array]) -> Closed:
    """`body` standing alone; `constants` are those of the graph around it."""
    graph = body.clone()
    captured = captures(graph)
    own = {value: Value(graph.fresh_name(value.name), value.type) for value in captured}
    graph.replace_uses(own)
    graph.constants.update({own[value]: constants[value] for value in captured if value in constants})
    outer = tuple(value for value in captured if value not in constants)
    graph.inputs += [own[value] for value in outer]
    return Closed(graph, outer)


def opened(graph: Graph, outer: tuple[Value, ...]) -> Graph:
    """The body again: its last inputs are captured values as before. Edits `graph` and returns it."""
    first = len(graph.inputs) - len(outer)
    graph.replace_uses(dict(zip(graph.inputs[first:], outer, strict=True)))
    del graph.inputs[first:]
    return graph
