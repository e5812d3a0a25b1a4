"""Gathers by positions become views, or gathers of rows; scatters to them join parts; comparisons become constants.

PyTorch's exporters write `mask[arange(batch), None, None, arange(length)]` as GatherND with concatenated positions
(`dynamo`), or as a Gather of row * length + column from the flattened mask (`torchscript`). Both read the whole mask
once and in order. Likewise `hidden[arange(batch), last]` picks one token of each row, and `x[..., :2] = y` is written
as ScatterND at the positions of a part of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.ir.dim import Dim, is_never_negative, product
from core.ir.graph import Graph, Node, Value
from core.ir.types import DType
from core.ops.inference import infer_graph
from core.passes.base import PassResult, expressible, is_view_node, reshape_attrs, shape_of, view_origin
from core.passes.edit import Editor
from core.passes.positions import Finder, Positions

_END = (1 << 63) - 1  # of a slice that takes all that is left


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


def wanted_extents(graph: Graph) -> list[tuple[Dim, Dim]]:
    """Pairs of extents of which gathers would read every element in order if they were equal."""
    finder = Finder(infer_graph(graph))
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


def _gather(editor: Editor, finder: Finder, node: Node) -> None:
    """The elements along an axis, each once and in order: the axis becomes those of the indices."""
    data, indices = shape_of(node.input(0)), finder.of(node.input(1))
    axis = node.attrs.get("axis", 0)
    if data is None or not isinstance(axis, int):
        return
    axis %= len(data)
    if indices is None:
        _gather_one_of_each_row(editor, finder, node)
    elif indices.counts_all() and product(indices.shape) == data[axis]:
        _reshape(editor, node, (*data[:axis], *indices.shape, *data[axis + 1 :]))


def _gather_one_of_each_row(editor: Editor, finder: Finder, node: Node) -> None:
    """`flat[row * length + place]`, where `flat` joins rows of this length, and no place lies beyond a row."""
    flat, total = node.inputs[0], node.inputs[1]
    source, add = view_origin(flat) if flat is not None else None, total.producer if total is not None else None
    shape = shape_of(source)
    if flat is None or source is None or shape is None or len(shape) < 2 or add is None or add.op != "Add":
        return
    if node.attrs.get("axis", 0) != 0 or flat.shape != (shape[0] * shape[1], *shape[2:]):
        return
    for begin, place in (add.inputs, reversed(add.inputs)):
        begins = finder.of(begin)
        if begins == Positions((shape[0],), 0, (shape[1],)) and place is not None and _is_place(place, shape[1]):
            column = editor.emit(node, "Reshape", place, attrs=reshape_attrs((shape[0], 1)))
            editor.replace(node.output, editor.emit(node, "GatherND", source, column, attrs={"batch_dims": 1}))
            return


def _is_place(value: Value, extent: Dim) -> bool:
    """Whether all elements are 0 or more, and less than an extent."""
    node = value.producer
    while node is not None and (node.op in ("Cast", "Identity") or is_view_node(node)):
        node = node.inputs[0].producer if node.inputs[0] is not None else None
    if node is None or node.op not in ("ArgMax", "ArgMin"):
        return False
    axis, shape = node.attrs.get("axis", 0), shape_of(node.inputs[0])
    return isinstance(axis, int) and shape is not None and shape[axis] == extent


def _gather_elements(editor: Editor, finder: Finder, node: Node) -> None:
    """Each element at its own place; or all from one line."""
    source, data, axis = node.inputs[0], shape_of(node.input(0)), node.attrs.get("axis", 0)
    if source is None or data is None or not isinstance(axis, int):
        return
    indices = finder.of(node.input(1))
    if indices is not None and indices.shape == data and indices.axis() == axis % len(data):
        if _may_replace(editor, node, source):
            editor.replace(node.output, source)
        return
    line = _line(source, axis % len(data))
    if line is not None and expressible(editor.graph, (line.shape[axis],)):
        flat = editor.emit(node, "Reshape", line, attrs=reshape_attrs((line.shape[axis],)))
        editor.replace(node.output, editor.emit(node, "Gather", flat, node.inputs[1], attrs={"axis": 0}))


def _line(data: Value, axis: int) -> Value | None:
    """The elements along an axis, where they are the same at all other places."""
    producer = data.producer
    source = producer.inputs[0] if producer is not None and producer.op == "Expand" else data
    shape, full = shape_of(source), shape_of(data)
    if source is None or shape is None or full is None or len(shape) != len(full) or shape[axis] != full[axis]:
        return None
    return source if all(extent == 1 for i, extent in enumerate(shape) if i != axis) else None


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
    axes = [_counted(found, shape[i]) for i, found in enumerate(coordinates)]
    counted = [axis for axis in axes if axis is not None]
    if not counted or len(counted) != len(coordinates) or len(set(counted)) != len(counted):
        _gather_rows(editor, node, axes)
        return
    places = wanted[: len(wanted) - len(shape) + len(counted)]
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


def _gather_rows(editor: Editor, node: Node, axes: Sequence[int | None]) -> None:
    """Leading coordinates that count the leading axes are those of rows, of which each picks its own elements."""
    rows = next((i for i, axis in enumerate(axes) if axis != i), len(axes))
    if not 0 < rows < len(axes):
        return
    rest = _parts(node.inputs[1])[rows:]
    own = rest[0] if len(rest) == 1 else editor.emit(node, "Concat", *rest, attrs={"axis": -1})
    editor.replace(node.output, editor.emit(node, "GatherND", node.inputs[0], own, attrs={"batch_dims": rows}))


def _scatter_nd(editor: Editor, finder: Finder, node: Node) -> None:
    """Coordinates that count all of one part along an axis: `x[..., :2] = y`, as both exporters write it, is y between
    what lies before and behind that part."""
    data, updates = node.inputs[0], node.inputs[2]
    shape, coordinates = shape_of(data), _coordinates(finder, node.input(1))
    if data is None or updates is None or shape is None or node.attrs.get("reduction", "none") != "none":
        return
    parts = [_part_of(found, axis, len(coordinates)) for axis, found in enumerate(coordinates)]
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
    behind = shape[axis] - first - count
    if not is_never_negative(behind):
        return
    pieces: list[Value] = [updates]
    if first:
        pieces.insert(0, _sliced(editor, node, axis, 0, first))
    if behind != 0 and isinstance(count, int):
        pieces.append(_sliced(editor, node, axis, first + count, _END))
    elif behind != 0:
        return
    editor.replace(node.output, editor.emit(node, "Concat", *pieces, attrs={"axis": axis}))


def _part_of(found: Positions | None, axis: int, axes: int) -> tuple[int, Dim] | None:
    """Where the coordinates of an axis begin, and how many there are, if they count along that axis alone."""
    if found is None or len(found.shape) != axes or not isinstance(found.offset, int) or found.offset < 0:
        return None
    steps = tuple(int(each == axis and found.shape[axis] != 1) for each in range(axes))
    return (found.offset, found.shape[axis]) if found.steps == steps else None


def _sliced(editor: Editor, node: Node, axis: int, start: int, end: int) -> Value:
    attrs = {"starts": (start,), "ends": (end,), "axes": (axis,), "steps": (1,)}
    return editor.emit(node, "Slice", node.inputs[0], attrs=attrs)


def _parts(indices: Value | None) -> list[Value]:
    """The values that are joined along the last axis of indices, where each is one coordinate."""
    node, shape = indices.producer if indices is not None else None, shape_of(indices)
    if indices is None or not shape:
        return []
    joined = node is not None and node.op == "Concat" and node.attrs.get("axis") in (-1, len(shape) - 1)
    parts = [part for part in (node.inputs if joined and node is not None else [indices]) if part is not None]
    return parts if all((shape_of(part) or ())[-1:] == (1,) for part in parts) else []


def _coordinates(finder: Finder, indices: Value | None) -> list[Positions | None]:
    """The positions along each axis of the data, without the last axis, which joins them; None for what is none."""
    found = [finder.of(part) for part in _parts(indices)]
    return [part and Positions(part.shape[:-1], part.offset, part.steps[:-1]) for part in found]


def _counted(found: Positions | None, extent: Dim) -> int | None:
    """The axis along which coordinates count 0, 1, ... up to the extent of what they index."""
    axis = found.axis() if found is not None else None
    return axis if found is not None and axis is not None and found.shape[axis] == extent else None


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
    "ScatterND": _scatter_nd,
    "GreaterOrEqual": _at_least,
    "Less": _at_least,
    "And": _and,
}
