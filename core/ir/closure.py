"""Closure conversion: bodies of control-flow nodes as graphs of their own, whose captured values are inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lathe.core.ir.graph import Array, Graph, Value, captures


class ClosedBody(NamedTuple):
    """A copy of a body that captures nothing.

    `graph` has one further input, after its own, for each captured value in `outer`, in that order. Captured constants
    became constants of `graph` instead.
    """

    graph: Graph
    outer: tuple[Value, ...]


def close_body(body: Graph, constants: Mapping[Value, Array]) -> ClosedBody:
    """A copy of `body` that captures nothing; `body` stays unchanged. The copy shares the arrays of constants.

    `constants` are the constants of the graphs around `body`.
    """
    graph = body.clone()
    captured = captures(graph)
    own: dict[Value, Value] = {}
    for value in captured:  # one after the other: captured values of two graphs may have the same name
        own[value] = Value(graph.fresh_name(value.name), value.type)
        if value in constants:
            graph.constants[own[value]] = constants[value]
        else:
            graph.inputs.append(own[value])
    graph.replace_uses(own)
    return ClosedBody(graph, tuple(value for value in captured if value not in constants))


def restore_captures(graph: Graph, outer: tuple[Value, ...]) -> Graph:
    """Make the last inputs the captured values `outer` again, as before `close_body`. Edits `graph` and returns it.

    Constants that `close_body` added remain constants of `graph`.
    """
    first = len(graph.inputs) - len(outer)
    graph.replace_uses(dict(zip(graph.inputs[first:], outer, strict=True)))
    del graph.inputs[first:]
    return graph
