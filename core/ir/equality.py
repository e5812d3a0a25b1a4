"""Whether two graphs are the same: names, operators, attributes, types, order, and every bit of their weights."""

from __future__ import annotations

from itertools import zip_longest

from core.ir.graph import Graph
from core.ir.text import Weights, print_graph


def difference(a: Graph, b: Graph) -> str:
    """The first line of the textual form that differs, as `a` has it and as `b` has it; "" for equal graphs."""
    (left, left_weights), (right, right_weights) = (_canonical(graph) for graph in (a, b))
    for ours, theirs in zip_longest(left.splitlines(), right.splitlines(), fillvalue=""):
        if ours != theirs:
            return f"{ours.strip()}\n{theirs.strip()}"
    return "" if left_weights == right_weights else "the bytes of a constant"


def _canonical(graph: Graph) -> tuple[str, bytes]:
    """The whole graph: its text, and the bytes of the constants that the text only refers to."""
    weights = Weights()
    return print_graph(graph, weights), weights.tobytes()
