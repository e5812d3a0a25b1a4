"""Compares two graphs by their textual forms (names, operators, attributes, types, order) and their large constants."""

from __future__ import annotations

from itertools import zip_longest

from lathe.core.ir.graph import Graph
from lathe.core.ir.text import Weights, print_graph


def difference(a: Graph, b: Graph) -> str:
    """The first difference of two graphs: the first line that differs in their textual forms, of `a` and then of `b`.

    A newline separates the two lines; a missing line is empty. "" if texts and large arrays (`print_graph`) are equal;
    "the bytes of a constant" if only bytes of large arrays differ. The order of attributes does not matter, and NaNs in
    small arrays count as equal whatever their bits.
    """
    (left, left_weights), (right, right_weights) = (_canonical(graph) for graph in (a, b))
    for ours, theirs in zip_longest(left.splitlines(), right.splitlines(), fillvalue=""):
        if ours != theirs:
            return f"{ours.strip()}\n{theirs.strip()}"
    return "" if left_weights == right_weights else "the bytes of a constant"


def _canonical(graph: Graph) -> tuple[str, bytes]:
    """The text of the graph, and the bytes of the large arrays, which the text only refers to."""
    weights = Weights()
    return print_graph(graph, weights), weights.tobytes()
