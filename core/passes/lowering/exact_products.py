"""Marks products whose results are divided by their own norm: kernels compute these without Strassen or Winograd.

Both algorithms add rows, or pixels, to each other. So a row of zeros, such as padding, gets rounding errors of other
rows. They are tiny next to those rows, but after division by the row's own norm, as in cosine attention (Swin v2), the
row would consist of rounding errors alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.passes.rewrite.base import PassResult, is_view_node

EXACT = "exact"  # the attribute that marks such a product
_PRODUCTS = ("FusedMatMul", "FusedConv", "MatMul", "Gemm", "Conv")
_NORMS = frozenset({"ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceSum", "ReduceMean", "ReduceMax"})
# Operators allowed between a product and its division: each element depends on one element of the row, or on few.
_BETWEEN = frozenset(
    {"Add", "Sub", "Mul", "Neg", "Identity", "Cast", "Transpose", "Slice", "Split", "Gather", "Concat"}
)
# Operators allowed between a norm and the division by it, or between a value and its norm.
_BEFORE = frozenset({"Sqrt", "Clip", "Max", "Expand", "Abs", "Pow", "Reciprocal"})
_FARTHEST = 64  # the most nodes that the search from a division backwards visits


@dataclass(frozen=True)
class ExactProducts:
    name: str = "exact_products"

    def run(self, graph: Graph) -> PassResult:
        changed = 0
        for node in graph.nodes:
            for product in _normalized_products(node):
                if product.op in ("FusedMatMul", "FusedConv") and not product.attrs.get(EXACT):
                    product.attrs[EXACT] = 1
                    changed += 1
        return PassResult(changed)


def _normalized_products(node: Node) -> list[Node]:
    """The products whose results `node` divides by their own norm: a LpNormalization, or a Div by a norm of them."""
    if node.op == "LpNormalization":
        return _products(node.inputs[0])
    if node.op != "Div":
        return []
    norms = [each for each in _sources(node.inputs[1], _BETWEEN | _BEFORE) if each.op in _NORMS]
    measured = {product for norm in norms for product in _products(norm.inputs[0])}
    return [product for product in _products(node.inputs[0]) if product in measured]


def _products(value: Value | None) -> list[Node]:
    return [node for node in _sources(value, _BETWEEN | _BEFORE) if node.op in _PRODUCTS]


def _sources(value: Value | None, through: frozenset[str]) -> Iterator[Node]:
    """Yield the nodes that a value comes from, at most 64, searched backwards.

    The search continues through views and nodes whose operators are in `through`; other nodes are yielded, too.
    """
    pending, seen = [value], set[Node]()
    while pending and len(seen) < _FARTHEST:
        current = pending.pop()
        node = current.producer if current is not None else None
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node.op in through or is_view_node(node):
            pending += node.inputs
