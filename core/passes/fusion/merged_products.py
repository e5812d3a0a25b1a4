"""Computes several products of the same left operand as one, such as queries, keys and values of attention on a GPU.

    y_i = x W_i + b_i, then reshaped to heads  ->  y = x [W_1 W_2 ...] + [b_1 b_2 ...], reshaped, then split by heads

The left operand is read once, and one launch replaces several. The parts are views into the result, so nothing is
copied. NVIDIA's TensorRT and FasterTransformer do the same for queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ir.text import Weights, print_graph
from lathe.core.ir.types import Dim
from lathe.core.passes.rewrite.base import PassResult, reshape_attrs, shape_of
from lathe.core.passes.rewrite.editor import Editor

_FIRST_EXTRA = 2


@dataclass(frozen=True)
class MergeProducts:
    name: str = "merged_products"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        alike: dict[Hashable, list[_Product]] = {}
        for node in editor.nodes():
            product = _product(editor, node)
            if product is not None:
                alike.setdefault(_key(product), []).append(product)
        for products in alike.values():
            if len(products) > 1:
                _merge(editor, products)
        return editor.finish()


@dataclass(frozen=True)
class _Product:
    """A FusedMatMul by constant weights. Its only reader, `reshaped`, splits the columns into heads of `width`."""

    node: Node
    heads: int
    width: int
    reshaped: Node

    @property
    def rows(self) -> tuple[Dim, ...]:
        return self.node.output.shape[:-1]


def _product(editor: Editor, node: Node) -> _Product | None:
    if node.op != "FusedMatMul" or not set(node.attrs) <= {"epilogue", "perm_a"}:
        return None
    weight, reader = editor.array(node.input(1)), editor.only_reader(node.output)
    if weight is None or weight.ndim != 2 or reader is None or reader.op != "Reshape":
        return None
    extras = [editor.array(value) for value in node.inputs[_FIRST_EXTRA:]]
    if any(array is None or array.shape != weight.shape[1:] for array in extras):
        return None
    shape, target = shape_of(node.output), shape_of(reader.output)
    if shape is None or target is None or len(target) != len(shape) + 1 or target[:-2] != shape[:-1]:
        return None
    heads, width = target[-2:]
    if not isinstance(heads, int) or not isinstance(width, int) or heads * width != weight.shape[1]:
        return None
    return _Product(node, heads, width, reader)


def _key(product: _Product) -> Hashable:
    """Products of equal keys can be merged: they differ in the arrays and the number of heads only."""
    node = product.node
    body = node.attrs.get("epilogue")
    text = print_graph(body, Weights()) if isinstance(body, Graph) else ""
    types = tuple(value.dtype for value in node.inputs[1:] if value is not None)
    return node.inputs[0], node.attrs.get("perm_a"), text, types, product.width, product.rows


def _merge(editor: Editor, products: Sequence[_Product]) -> None:
    first = products[0].node
    columns = (_joined(editor, [product.node.inputs[at] for product in products]) for at in range(1, len(first.inputs)))
    whole = editor.emit(first, "FusedMatMul", first.inputs[0], *columns, attrs=first.attrs)
    heads = [product.heads for product in products]
    rows = products[0].rows
    shape = (*rows, sum(heads), products[0].width)
    apart = editor.emit(first, "Reshape", whole, attrs=reshape_attrs(shape))
    split: dict[str, Attr] = {"axis": len(rows), "split": tuple(heads)}
    for product, part in zip(products, editor.emit_many(first, "Split", [apart], len(heads), split), strict=True):
        editor.replace(product.reshaped.output, part)


def _joined(editor: Editor, values: Sequence[Value | None]) -> Value:
    """A constant of the arrays of all values, one after the other along the columns."""
    arrays = [array for array in map(editor.array, values) if array is not None]
    return editor.constant(np.concatenate(arrays, axis=-1), "w")


__all__ = ["MergeProducts"]
