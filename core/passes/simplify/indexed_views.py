"""Rewrites gathers and scatters with computed positions (`proofs/positions.py`) as views, slices and concatenations.

PyTorch's exporters write `mask[arange(batch), None, None, arange(length)]` as GatherND with concatenated positions
(`dynamo`), or as a Gather of row * length + column from the flattened mask (`torchscript`). Both read the whole mask
once and in order, so they are views. `hidden[arange(batch), last]` reads one token of each row and becomes a GatherND
with a batch dimension. `x[..., :2] = y`, exported as ScatterND, becomes a Concat. Comparisons of positions with a lower
bound become constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lathe.core.ir.dim import Dim, is_never_negative, product
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.proofs.positions import PositionFinder, Positions
from lathe.core.passes.rewrite.base import (
    PassResult,
    can_reshape_to,
    is_view_node,
    reshape_attrs,
    shape_of,
    view_source,
)
from lathe.core.passes.rewrite.editor import Editor

_END = (1 << 63) - 1  # the `ends` of a slice up to the end of the axis


@dataclass(frozen=True)
class IndexedViews:
    name: str = "indexed_views"

    def run(self, graph: Graph) -> PassResult:
        finder = PositionFinder(infer_graph(graph))
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op in _REWRITES:
                _REWRITES[node.op](editor, finder, node)
        return editor.finish()


def extents_to_equate(graph: Graph) -> list[tuple[Dim, Dim]]:
    """Pairs of different dimensions: if the two were equal, a gather would read all elements along an axis in order.

    Sets the types of the graph (`infer_graph`).
    """
    finder = PositionFinder(infer_graph(graph))
    pairs: list[tuple[Dim, Dim]] = []
    for node in graph.nodes:
        data, indices = shape_of(node.input(0)), node.input(1)
        if node.op == "GatherND" and data is not None:
            batch = node.attrs.get("batch_dims", 0)
            assert isinstance(batch, int)
            for extent, found in zip(data[batch:], _coordinates(finder, indices), strict=False):
                if found is not None and (axis := found.axis()) is not None:
                    pairs.append((extent, found.shape[axis]))
        elif node.op == "Gather" and (flat := finder.of(indices)) is not None:
            pairs += flat.strides()
    return [(a, b) for a, b in pairs if a != b]


def _gather(editor: Editor, finder: PositionFinder, node: Node) -> None:
    """Rewrites a Gather of all elements along an axis, in order, as a Reshape.

    The axes of the indices replace that axis.
    """
    data, indices = shape_of(node.input(0)), finder.of(node.input(1))
    axis = node.attrs.get("axis", 0)
    if data is None or not isinstance(axis, int):
        return
    axis %= len(data)
    if indices is None:
        _gather_one_per_row(editor, finder, node)
    elif indices.counts_all() and product(indices.shape) == data[axis]:
        _reshape(editor, node, (*data[:axis], *indices.shape, *data[axis + 1 :]))


def _gather_one_per_row(editor: Editor, finder: PositionFinder, node: Node) -> None:
    """Rewrites a Gather `flat[row * length + column]` from flattened rows as a GatherND by column with a batch axis.

    The columns must come from ArgMax or ArgMin, so that all are within a row.
    """
    flat, total = node.inputs[0], node.inputs[1]
    source, add = view_source(flat) if flat is not None else None, total.producer if total is not None else None
    shape = shape_of(source)
    if flat is None or source is None or shape is None or len(shape) < 2 or add is None or add.op != "Add":
        return
    if node.attrs.get("axis", 0) != 0 or flat.shape != (shape[0] * shape[1], *shape[2:]):
        return
    for start, column in (add.inputs, reversed(add.inputs)):
        starts = finder.of(start)
        if starts == Positions((shape[0],), 0, (shape[1],)) and column is not None and _is_argmax(column, shape[1]):
            index = editor.emit(node, "Reshape", column, attrs=reshape_attrs((shape[0], 1)))
            editor.replace(node.output, editor.emit(node, "GatherND", source, index, attrs={"batch_dims": 1}))
            return


def _is_argmax(value: Value, extent: Dim) -> bool:
    """Whether a value comes from ArgMax or ArgMin over an axis of this extent, so that it holds valid indices."""
    node = value.producer
    while node is not None and (node.op in ("Cast", "Identity") or is_view_node(node)):
        node = node.inputs[0].producer if node.inputs[0] is not None else None
    if node is None or node.op not in ("ArgMax", "ArgMin"):
        return False
    axis, shape = node.attrs.get("axis", 0), shape_of(node.inputs[0])
    return isinstance(axis, int) and shape is not None and shape[axis] == extent


def _gather_elements(editor: Editor, finder: PositionFinder, node: Node) -> None:
    """Replaces a GatherElements of each element at its own index with its input, and one from a vector with a Gather.

    The vector is broadcast along all other axes.
    """
    source, data, axis = node.inputs[0], shape_of(node.input(0)), node.attrs.get("axis", 0)
    if source is None or data is None or not isinstance(axis, int):
        return
    indices = finder.of(node.input(1))
    if indices is not None and indices.shape == data and indices.axis() == axis % len(data):
        if _may_replace(editor, node, source):
            editor.replace(node.output, source)
        return
    vector = _broadcast_vector(source, axis % len(data))
    if vector is not None and can_reshape_to(editor.graph, (vector.shape[axis],)):
        flat = editor.emit(node, "Reshape", vector, attrs=reshape_attrs((vector.shape[axis],)))
        editor.replace(node.output, editor.emit(node, "Gather", flat, node.inputs[1], attrs={"axis": 0}))


def _broadcast_vector(data: Value, axis: int) -> Value | None:
    """The tensor, of extent 1 along all axes but `axis`, that `data` repeats along these; None if `data` does not."""
    producer = data.producer
    source = producer.inputs[0] if producer is not None and producer.op == "Expand" else data
    shape, full = shape_of(source), shape_of(data)
    if source is None or shape is None or full is None or len(shape) != len(full) or shape[axis] != full[axis]:
        return None
    return source if all(extent == 1 for i, extent in enumerate(shape) if i != axis) else None


def _may_replace(editor: Editor, node: Node, source: Value) -> bool:
    return not editor.is_output(node.output) or editor.renamable(source)


def _gather_nd(editor: Editor, finder: PositionFinder, node: Node) -> None:
    """Rewrites a GatherND whose coordinates each count a whole axis as a Transpose, a Reshape and an Expand.

    The Reshape inserts axes of extent 1, which the Expand repeats where no coordinate varies. If only the leading
    coordinates count axes, these become batch dimensions (`_gather_rows`).
    """
    data, indices = node.input(0), node.input(1)
    shape, wanted = shape_of(data), shape_of(node.output)
    if data is None or shape is None or wanted is None or node.attrs.get("batch_dims", 0) != 0:
        return
    coordinates = _coordinates(finder, indices)
    axes = [_counting_axis(found, shape[i]) for i, found in enumerate(coordinates)]
    counted = [axis for axis in axes if axis is not None]
    if not counted or len(counted) != len(coordinates) or len(set(counted)) != len(counted):
        _gather_rows(editor, node, axes)
        return
    places = wanted[: len(wanted) - len(shape) + len(counted)]
    viewed = tuple(extent if axis in counted else 1 for axis, extent in enumerate(places)) + shape[len(counted) :]
    if not (can_reshape_to(editor.graph, viewed) and can_reshape_to(editor.graph, wanted)):
        return
    order = sorted(range(len(counted)), key=lambda i: counted[i])
    if order != sorted(order):
        perm = (*order, *range(len(order), len(shape)))
        data = editor.emit(node, "Transpose", data, attrs={"perm": perm})
    new = editor.emit(node, "Reshape", data, attrs=reshape_attrs(viewed))
    if viewed != wanted:
        new = editor.emit(node, "Expand", new, attrs={"shape": wanted})
    editor.replace(node.output, new)


def _gather_rows(editor: Editor, node: Node, axes: Sequence[int | None]) -> None:
    """Makes leading coordinates of a GatherND that count the leading axes batch dimensions.

    Each row then reads its own elements. `axes` has for each coordinate the axis that it counts, or None.
    """
    rows = next((i for i, axis in enumerate(axes) if axis != i), len(axes))
    if not 0 < rows < len(axes):
        return
    rest = _parts(node.inputs[1])[rows:]
    indices = rest[0] if len(rest) == 1 else editor.emit(node, "Concat", *rest, attrs={"axis": -1})
    editor.replace(node.output, editor.emit(node, "GatherND", node.inputs[0], indices, attrs={"batch_dims": rows}))


def _scatter_nd(editor: Editor, finder: PositionFinder, node: Node) -> None:
    """Rewrites a ScatterND that overwrites one contiguous part along an axis, as in `x[..., :2] = y`, as a Concat.

    The Concat joins the slice before the part, the updates, and the slice after the part.
    """
    data, updates = node.inputs[0], node.inputs[2]
    shape, coordinates = shape_of(data), _coordinates(finder, node.input(1))
    if data is None or updates is None or shape is None or node.attrs.get("reduction", "none") != "none":
        return
    parts = [_range_of(found, axis, len(coordinates)) for axis, found in enumerate(coordinates)]
    region = [part for part in parts if part is not None]
    if not region or len(region) != len(parts):
        return
    if shape_of(updates) != (*(count for _, count in region), *shape[len(region) :]):
        return
    cut = [axis for axis, part in enumerate(region) if part != (0, shape[axis])]
    if len(cut) != 1:
        return
    axis = cut[0]
    first, count = region[axis]
    after = shape[axis] - first - count
    if not is_never_negative(after):
        return
    joined: list[Value] = [updates]
    if first:
        joined.insert(0, _slice(editor, node, axis, 0, first))
    if after != 0 and isinstance(count, int):
        joined.append(_slice(editor, node, axis, first + count, _END))
    elif after != 0:
        return
    editor.replace(node.output, editor.emit(node, "Concat", *joined, attrs={"axis": axis}))


def _range_of(found: Positions | None, axis: int, axes: int) -> tuple[int, Dim] | None:
    """The first of the coordinates `found`, and their number; None unless they count up by 1 along `axis` alone.

    None also unless the first one is a number of at least 0, and they have as many axes as `axes`.
    """
    if found is None or len(found.shape) != axes or not isinstance(found.offset, int) or found.offset < 0:
        return None
    steps = tuple(int(each == axis and found.shape[axis] != 1) for each in range(axes))
    return (found.offset, found.shape[axis]) if found.steps == steps else None


def _slice(editor: Editor, node: Node, axis: int, start: int, end: int) -> Value:
    attrs = {"starts": (start,), "ends": (end,), "axes": (axis,), "steps": (1,)}
    return editor.emit(node, "Slice", node.inputs[0], attrs=attrs)


def _parts(indices: Value | None) -> list[Value]:
    """The values that a Concat joins along the last axis of GatherND's indices; empty unless each is one coordinate.

    Without a Concat, the indices themselves.
    """
    node, shape = indices.producer if indices is not None else None, shape_of(indices)
    if indices is None or not shape:
        return []
    joined = node is not None and node.op == "Concat" and node.attrs.get("axis") in (-1, len(shape) - 1)
    parts = [part for part in (node.inputs if joined and node is not None else [indices]) if part is not None]
    return parts if all((shape_of(part) or ())[-1:] == (1,) for part in parts) else []


def _coordinates(finder: PositionFinder, indices: Value | None) -> list[Positions | None]:
    """For each axis of the data that `indices` index, the coordinates as `Positions`, or None; empty if not known.

    The last axis of the indices, of extent 1, is left out.
    """
    found = [finder.of(part) for part in _parts(indices)]
    return [part and Positions(part.shape[:-1], part.offset, part.steps[:-1]) for part in found]


def _counting_axis(found: Positions | None, extent: Dim) -> int | None:
    """The axis along which coordinates count 0, 1, ..., extent - 1, or None."""
    axis = found.axis() if found is not None else None
    return axis if found is not None and axis is not None and found.shape[axis] == extent else None


def _reshape(editor: Editor, node: Node, shape: Sequence[Dim]) -> None:
    if can_reshape_to(editor.graph, shape):
        editor.replace(node.output, editor.emit(node, "Reshape", node.inputs[0], attrs=reshape_attrs(shape)))


def _at_least(editor: Editor, finder: PositionFinder, node: Node) -> None:
    """Rewrites `positions >= bound` as true and `positions < bound` as false, if no position is less than `bound`."""
    found, bound = finder.of(node.input(0)), finder.number(node.input(1))
    lowest, shape = found.lowest() if found is not None else None, shape_of(node.output)
    if lowest is None or not isinstance(bound, int) or shape is None or not can_reshape_to(editor.graph, shape):
        return
    if lowest >= bound:
        answer = editor.constant(np.array(node.op == "GreaterOrEqual"))
        editor.replace(node.output, editor.emit(node, "Expand", answer, attrs={"shape": tuple(shape)}))


def _and(editor: Editor, finder: PositionFinder, node: Node) -> None:
    """Rewrites `x and true` as x, expanded to the shape of the output."""
    shape = shape_of(node.output)
    for value, other in (node.inputs, reversed(node.inputs)):
        if value is None or other is None or not _is_true(editor, value) or shape is None:
            continue
        if shape_of(other) == shape and _may_replace(editor, node, other):
            editor.replace(node.output, other)
        elif shape_of(other) is not None and can_reshape_to(editor.graph, shape):
            editor.replace(node.output, editor.emit(node, "Expand", other, attrs={"shape": tuple(shape)}))
        return


def _is_true(editor: Editor, value: Value) -> bool:
    """Whether a value is a constant, or a view or an expansion of one, whose elements are all true."""
    node = value.producer
    source = node.inputs[0] if node is not None and node.op in ("Expand", "Reshape") else value
    array = editor.array(source)
    return array is not None and value.dtype is DType.BOOL and bool(array.all())


_REWRITES = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "GreaterOrEqual": _at_least,
    "Less": _at_least,
    "And": _and,
}
