"""What compression made of each product: the types of its operands, and its error in the compressed graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.calibration import Feeds, observe
from lathe.core.compress.mixed import relative_error
from lathe.core.compress.products import has_constant_weights, prepare
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.passes.rewrite.editor import Editor

# The operators that compute a product of bytes with ranges found in each run, by the operator of the exact product.
_INTEGER = {"Conv": "ConvInteger", "MatMul": "MatMulInteger", "Gemm": "MatMulInteger"}


@dataclass(frozen=True)
class LayerReport:
    """One product with constant weights.

    `inputs_type` and `weights_type` are the types in which its operands are stored in the compressed graph. `error` is
    the root mean square error of its results there, relative to their root mean square: also that of the layers before.
    """

    name: str
    op: str
    weights: int  # elements
    inputs_type: str
    weights_type: str
    error: float


def report_layers(graph: Graph, compressed: Graph, feeds: Feeds, threads: int | None = None) -> list[LayerReport]:
    """A report for each product of `graph` that `compressed`, made from it, has as well, by name; runs both on `feeds`.

    Products whose results are not an array of the same shape in both are left out. FeedError as in `observe`.
    """
    prepared = prepare(graph)
    editor = Editor(prepared)
    last = {node.name: node for node in compressed.nodes}  # nodes that were made for a product are named like it
    made = {(node.name, node.op): node for node in compressed.nodes}
    products = [
        (node, other)
        for node in prepared.nodes
        if has_constant_weights(editor, node) and (other := _product_for(node, made, last)) is not None
    ]
    exact = _results(prepared, [node for node, _ in products], feeds, threads)
    got = _results(compressed, [last[node.name] for node, _ in products], feeds, threads)
    return [
        LayerReport(
            node.name,
            node.op,
            int(np.prod([size for size in node.required_input(1).shape if isinstance(size, int)])),
            _stored_type(other.required_input(0)),
            _stored_type(other.required_input(1)),
            relative_error(got[node.name], exact[node.name]),
        )
        for node, other in products
        if exact[node.name].shape == got[node.name].shape
    ]


def _product_for(node: Node, made: Mapping[tuple[str, str], Node], last: Mapping[str, Node]) -> Node | None:
    """The product of the compressed graph that stands for `node`; None if there is none.

    `made` are the nodes by name and operator, `last` the last ones of each name. A product of bytes is followed by the
    nodes that return to float32.
    """
    other = last.get(node.name)
    if other is not None and other.op == node.op:
        return other
    return made.get((node.name, _INTEGER[node.op]))


def _results(
    graph: Graph, nodes: Iterable[Node], feeds: Feeds, threads: int | None
) -> Mapping[str, NDArray[np.float64]]:
    """The result of each node, by the node's name."""
    names = {node.name: node.outputs[0].name for node in nodes}
    if not names:
        return {}
    (arrays,) = observe(graph, names.values(), [feeds], threads)
    return {node: np.asarray(arrays[value], np.float64) for node, value in names.items()}


def _stored_type(value: Value) -> str:
    """The type of a value, or of the codes that it is dequantized from."""
    producer = value.producer
    if producer is not None and producer.op == "DequantizeLinear":
        return str(producer.required_input(0).dtype)
    if producer is not None and producer.op == "RoundableRows":
        return "int8"
    return str(value.dtype)
