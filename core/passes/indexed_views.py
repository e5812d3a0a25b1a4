"""Gathers that read every element in order become views; comparisons of positions with numbers become constants.

PyTorch's exporters write `mask[arange(batch), None, None, arange(length)]` as GatherND with concatenated positions
(`dynamo`), or as a Gather of row * length + column from the flattened mask (`torchscript`). Both read the whole mask
once and in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.ir.dim import Dim, product
from core.ir.graph import Graph, Node, Value
from core.ir.types import DType
from core.ops.inference import infer_graph
from core.passes.base import PassResult, expressible, reshape_attrs, shape_of
from core.passes.edit import Editor
from core.passes.positions import Finder, Positions


@dataclass(frozen=True)
class IndexedViews:
    name: str = "indexed_views"

    def run(self, graph: Graph) -> PassResult:
        finder = Finder(infer_graph(graph))
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op in _REWRITES:
                _REWRITES[node.op](editor, finder, node)
        return editor.finish()


def _gather(editor: Editor, finder: Finder, node: Node) -> None:
    """The elements along an axis, each once and in order: the axis becomes those of the indices."""
    data, indices = shape_of(node.input(0)), finder.of(node.input(1))
    axis = node.attrs.get("axis", 0)
    if data is None or indices is None or not isinstance(axis, int):
        return
    axis %= len(data)
    if indices.counts_all() and product(indices.shape) == data[axis]:
        _reshape(editor, node, (*data[:axis], *indices.shape, *data[axis + 1 :]))


def _gather_elements(editor: Editor, finder: Finder, node: Node) -> None:
    """Each element at its own place."""
    data, indices, axis = shape_of(node.input(0)), finder.of(node.input(1)), node.attrs.get("axis", 0)
    if data is None or indices is None or not isinstance(axis, int) or indices.shape != data:
        return
    source = node.inputs[0]
    if source is not None and indices.axis() == axis % len(data) and _may_replace(editor, node, source):
        editor.replace(node.output, source)


def _may_replace(editor: Editor, node: Node, source: Value) -> bool:
    return not editor.is_output(node.output) or editor.renamable(source)


def _gather_nd(editor: Editor, finder: Finder, node: Node) -> None:
    """Coordinates that each count the whole of their axis: a transposition, with axes of extent 1 put between, and
    repeated along axes that no coordinate counts."""
    data, indices = node.input(0), node.input(1)
    shape, wanted = shape_of(data), shape_of(node.output)
    if data is None or shape is None or wanted is None or node.attrs.get("batch_dims", 0) != 0:
        return
    coordinates = _coordinates(finder, indices)
    axes = [_counted(found, shape[i]) for i, found in enumerate(coordinates or ())]
    counted = [axis for axis in axes if axis is not None]
    if not coordinates or len(counted) != len(coordinates) or len(set(counted)) != len(counted):
        return
    places = wanted[: len(coordinates[0].shape)]
    viewed = tuple(extent if axis in counted else 1 for axis, extent in enumerate(places)) + shape[len(counted) :]
    if not (expressible(editor.graph, viewed) and expressible(editor.graph, wanted)):
        return
    order = sorted(range(len(counted)), key=lambda i: counted[i])
    if order != sorted(order):
        perm = (*order, *range(len(order), len(shape)))
        data = editor.emit(node, "Transpose", data, attrs={"perm": perm})
    new = editor.emit(node, "Reshape", data, attrs=reshape_attrs(viewed))
    if viewed != wanted:
        new = editor.emit(node, "Expand", new, attrs={"shape": wanted})
    editor.replace(node.output, new)


def _coordinates(finder: Finder, indices: Value | None) -> list[Positions] | None:
    """The positions along each axis of the data, without the last axis, which joins them."""
    node, shape = indices.producer if indices is not None else None, shape_of(indices)
    if not shape:
        return None
    joined = node is not None and node.op == "Concat" and node.attrs.get("axis") in (-1, len(shape) - 1)
    parts = [finder.of(part) for part in (node.inputs if joined and node is not None else [indices])]
    found = [part for part in parts if part is not None and part.shape[-1] == 1]
    if len(found) != len(parts):
        return None
    return [Positions(part.shape[:-1], part.offset, part.steps[:-1]) for part in found]


def _counted(found: Positions, extent: Dim) -> int | None:
    """The axis along which coordinates count 0, 1, ... up to the extent of what they index."""
    axis = found.axis()
    return axis if axis is not None and found.shape[axis] == extent else None


def _reshape(editor: Editor, node: Node, shape: Sequence[Dim]) -> None:
    if expressible(editor.graph, shape):
        editor.replace(node.output, editor.emit(node, "Reshape", node.inputs[0], attrs=reshape_attrs(shape)))


def _at_least(editor: Editor, finder: Finder, node: Node) -> None:
    """Positions are never below what they begin with."""
    found, bound = finder.of(node.input(0)), finder.number(node.input(1))
    lowest, shape = found.lowest() if found is not None else None, shape_of(node.output)
    if lowest is None or not isinstance(bound, int) or shape is None or not expressible(editor.graph, shape):
        return
    if lowest >= bound:
        answer = editor.constant(np.array(node.op == "GreaterOrEqual"))
        editor.replace(node.output, editor.emit(node, "Expand", answer, attrs={"shape": tuple(shape)}))


def _and(editor: Editor, finder: Finder, node: Node) -> None:
    """`x and true` is x, repeated as the other operand would repeat it."""
    shape = shape_of(node.output)
    for value, other in (node.inputs, reversed(node.inputs)):
        if value is None or other is None or not _is_true(editor, value) or shape is None:
            continue
        if shape_of(other) == shape and _may_replace(editor, node, other):
            editor.replace(node.output, other)
        elif shape_of(other) is not None and expressible(editor.graph, shape):
            editor.replace(node.output, editor.emit(node, "Expand", other, attrs={"shape": tuple(shape)}))
        return


def _is_true(editor: Editor, value: Value) -> bool:
    """Whether every element is true."""
    node = value.producer
    source = node.inputs[0] if node is not None and node.op in ("Expand", "Reshape") else value
    array = editor.array(source)
    return array is not None and value.dtype is DType.BOOL and bool(array.all())


_REWRITES = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "GreaterOrEqual": _at_least,
    "Less": _at_least,
    "And": _and,
}
