"""Before-and-after files: one file per pass, several cases each.

    # what the case shows
    graph @before { ... }
    ---
    graph @after { ... }
    ===
    # the next case ...

A case that a pass must leave alone has `unchanged` in place of the second graph.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Array, Graph, Value
from lathe.core.ir.text import parse_graph, print_graph
from lathe.core.ir.types import DType

TEXTS = ("a", "b", "c", "")  # of inputs that are text
CASES = Path(__file__).parent / "cases"
SIZES = {"n": 3, "m": 2, "batch": 3, "size0": 2, "size1": 4, "size2": 5}


@dataclass(frozen=True)
class Case:
    """One graph and the expected graph after the pass."""

    name: str
    title: str
    before: Graph
    after: Graph


def read_cases(path: Path) -> list[Case]:
    """All cases of a file."""
    return [_case(path.stem, block) for block in path.read_text().split("\n===\n")]


def _case(name: str, block: str) -> Case:
    title, _, text = block.strip().partition("\n")
    before, _, after = text.partition("\n---\n")
    graph = parse_graph(before)
    return Case(name, title.lstrip("# "), graph, graph if after.strip() == "unchanged" else parse_graph(after))


def canonical(graph: Graph) -> str:
    """The graph's text with computed values and constants named by position, and without labels and defaults."""
    graph = graph.clone()
    graph.name = "g"
    graph.sort()
    reads = [value for node in graph.nodes for value in node.inputs if value in graph.constants]
    order = list(dict.fromkeys([*reads, *graph.constants]))
    graph.constants = {value: graph.constants[value] for value in order}
    fixed = {*graph.inputs, *graph.outputs}
    for index, value in enumerate(value for value in graph.values() if value not in fixed):
        value.name = f".{index}"
    for node in graph.nodes:
        node.name = ""
    return print_graph(graph)


def feeds(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Random arrays for a graph's inputs, with the symbols of SIZES bound."""
    rng = np.random.default_rng(seed)
    return {value.name: _random(rng, value) for value in graph.inputs}


def _random(rng: np.random.Generator, value: Value) -> Array:
    shape = tuple(evaluate(dim, SIZES) for dim in value.shape)
    if value.dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if value.dtype.is_integer:
        return rng.integers(0, 4, shape).astype(value.dtype.numpy)
    if value.dtype is DType.STRING:
        return rng.choice(np.array(TEXTS, object), shape)
    return rng.standard_normal(shape).astype(value.dtype.numpy)


def operators(graph: Graph) -> dict[str, int]:
    """The number of nodes per operator."""
    return dict(Counter(node.op for node in graph.nodes))
