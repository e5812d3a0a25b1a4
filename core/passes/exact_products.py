"""Products whose results are divided by their own size are computed by their definition.

Strassen's and Winograd's algorithms add rows, or pixels, to each other. So a row of zeros, such as padding, gets
roundings of other rows, which are far below those. Divided by its own norm, as in cosine attention (Swin v2), it would
consist of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from core.ir.graph import Graph, Node, Value
from core.passes.base import PassResult, is_view_node

EXACT = "exact"  # the attribute of a product that says so
_PRODUCTS = ("FusedMatMul", "FusedConv", "MatMul", "Gemm", "Conv")
_SIZES = frozenset({"ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceSum", "ReduceMean", "ReduceMax"})
# What lies between a product and its division: each element comes from one of the row, or from few.
_BETWEEN = frozenset(
    {"Add", "Sub", "Mul", "Neg", "Identity", "Cast", "Transpose", "Slice", "Split", "Gather", "Concat"}
)
# What lies between a size and a division by it, or between a value and its size.
_BEFORE = frozenset({"Sqrt", "Clip", "Max", "Expand", "Abs", "Pow", "Reciprocal"})
_FARTHEST = 64  # nodes from a division back


@dataclass(frozen=True)
class ExactProducts:
    name: str = "exact_products"

    def run(self, graph: Graph) -> PassResult:
        changed = 0
        for node in graph.nodes:
            for product in _magnified(node):
                if product.op in ("FusedMatMul", "FusedConv") and not product.attrs.get(EXACT):
                    product.attrs[EXACT] = 1
                    changed += 1
        return PassResult(changed)


def _magnified(node: Node) -> list[Node]:
    """The products of whose results a node makes numbers of size 1, however small they are."""
    if node.op == "LpNormalization":
        return _products(node.inputs[0])
    if node.op != "Div":
        return []
    sizes = [each for each in _behind(node.inputs[1], _BETWEEN | _BEFORE) if each.op in _SIZES]
    measured = {product for size in sizes for product in _products(size.inputs[0])}
    return [product for product in _products(node.inputs[0]) if product in measured]


def _products(value: Value | None) -> list[Node]:
    return [node for node in _behind(value, _BETWEEN | _BEFORE) if node.op in _PRODUCTS]


def _behind(value: Value | None, through: frozenset[str]) -> Iterator[Node]:
    """The nodes that a value comes from, through nodes of these operators and views; those themselves, too."""
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
