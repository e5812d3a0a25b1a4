"""Products with weights that are gathered for each row become one MapSelected for each weight matrix.

Exporters write a mixture of experts as `matmul(weights[expert], rows[:, :, None])`, which copies a matrix of weights
for each token. Instead, each expert multiplies the rows that chose it by its own matrix, which the kernel reads in
place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.control.map_selected import SELECTED
from lathe.core.ops.opdef.terms import Writer
from lathe.core.passes.rewrite.base import PassResult, shape_of
from lathe.core.passes.rewrite.editor import Editor

_MAX_EXPERTS = 256  # each is a step of the plan, which costs about 0.3 microseconds if no row chose it
# The fewest elements of a matrix, for each expert. Each row costs about 1 ns per expert, whose mask is read, or 0.2 ns
# per element that is copied. Both took the same time with 3 matrices of 5 x 5, 8 of 8 x 8, and 256 of 40 x 40 (2,000
# rows, one thread, AMD EPYC, Zen 5).
_LEAST_PER_EXPERT = 8
_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Slice", "Identity", "Cast")


@dataclass(frozen=True)
class GatheredWeights:
    """Rewrites `MatMul(Gather(weights, index), rows)`, and the same with the operands exchanged.

    `least_per_expert`: the fewest elements that a matrix must have, for each of the matrices.
    """

    least_per_expert: int = _LEAST_PER_EXPERT
    name: str = "gathered_weights"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            found = _product(graph, node) if node.op == "MatMul" else None
            if found is not None and found.matrices[0].size >= self.least_per_expert * len(found.matrices):
                editor.replace(node.output, _written(editor, node, found))
        return editor.finish()


@dataclass(frozen=True)
class _Product:
    """A product of each row in `rows` (S rows of `depth` elements) with the one of `matrices` that `index` chooses.

    Each matrix is [depth, width]; `index` has one number per row.
    """

    matrices: tuple[Array, ...]
    index: Value
    rows: Value


def _product(graph: Graph, node: Node) -> _Product | None:
    for place in (0, 1):
        gather, rows = node.required_input(place).producer, node.required_input(1 - place)
        found = _gathered(graph, gather) if gather is not None else None
        shape = shape_of(rows)
        if found is None or shape is None or len(shape) != 3 or shape[2 if place == 0 else 1] != 1:
            continue
        weights, index = found
        if shape[0] != index.shape[0] or node.output.dtype not in (DType.FLOAT32, DType.FLOAT64):
            continue
        return _Product(tuple(each.T if place == 0 else each for each in weights), index, rows)
    return None


def _gathered(graph: Graph, gather: Node) -> tuple[Array, Value] | None:
    """The constant matrices [experts, a, b] that a Gather or GatherND reads, and the index [S] or [S, 1] of each row.

    None for any other node, or if an index might be out of range or negative.
    """
    if gather.op not in ("Gather", "GatherND") or gather.attrs.get("axis", 0) or gather.attrs.get("batch_dims", 0):
        return None
    weights, index = graph.constant_of(gather.input(0)), gather.required_input(1)
    shape = shape_of(index)
    if weights is None or weights.ndim != 3 or not 2 <= len(weights) <= _MAX_EXPERTS or shape is None:
        return None
    if len(shape) != (1 if gather.op == "Gather" else 2) or shape[1:] not in ((), (1,)):
        return None
    return (weights, index) if _is_below(index, len(weights)) else None


def _is_below(index: Value, limit: int) -> bool:
    """Whether all elements are from 0 to `limit` - 1: TopK, ArgMax or ArgMin found them on an axis of that extent."""
    node = index.producer
    while node is not None and node.op in _VIEWS:
        if not _can_hold(node.output.dtype, limit):
            return False
        index = node.required_input(0)
        node = index.producer
    if node is None or node.op not in ("TopK", "ArgMax", "ArgMin") or index is not node.outputs[-1]:
        return False
    shape, axis = shape_of(node.required_input(0)), node.attrs.get("axis", -1 if node.op == "TopK" else 0)
    return shape is not None and isinstance(axis, int) and shape[axis] == limit


def _can_hold(dtype: DType, limit: int) -> bool:
    """Whether a type holds the integers from 0 to `limit` - 1; a Cast to a narrower one would wrap them around."""
    signs = 1 if dtype.label.startswith("int") else 0
    return dtype.is_integer and limit <= 1 << (dtype.bits - signs)


def _written(editor: Editor, node: Node, found: _Product) -> Value:
    """The value that replaces the product, from one MapSelected for each matrix: each row is in exactly one of them."""
    count: Dim = found.index.shape[0]
    depth, width = found.matrices[0].shape
    rows = editor.reshaped(node, found.rows, (count, depth))
    index = editor.reshaped(node, found.index, (count,))
    zero = editor.constant(np.zeros((), rows.dtype.numpy))
    result = editor.emit(node, "Expand", zero, attrs={"shape": (count, width)})
    for number, matrix in enumerate(found.matrices):
        chosen = editor.emit(node, "Equal", index, editor.constant(np.array(number, index.dtype.numpy)))
        mask = editor.reshaped(node, chosen, (1, count))
        weights = editor.constant(np.ascontiguousarray(matrix))
        attrs: Mapping[str, Attr] = {"body": _body(rows, weights, matrix), "per_place": (0,), "adds": 0}
        result = editor.emit(node, "MapSelected", result, mask, rows, attrs=attrs)
    return editor.reshaped(node, result, node.output.shape)


def _body(rows: Value, weights: Value, matrix: Array) -> Graph:
    body = Graph("expert")
    writer = Writer(body, {weights: matrix})
    given = writer.input("rows", TensorType(rows.dtype, (SELECTED, matrix.shape[0])))
    body.outputs = writer.emit("MatMul", [given.value, weights])
    return body
