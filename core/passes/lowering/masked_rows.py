"""Replaces computations on the rows that a mask selects with computations on all rows, followed by a Where.

In `y = zeros(x.shape); y[mask] = f(x[mask])` the number of rows depends on data. So none of its nodes has a kernel, and
the proof that rows are independent fails. If f computes each row by itself, the result equals Where(mask, f(x), y),
whose shape is known. The same holds for the tokens of an expert, with a mask of places and tokens:
`y.index_add_(0, token, f(x[token]) * weights[token, place])`. The few places get separate nodes.

The results of f for rows that are not selected have no effect, not even NaN: the Where drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product as combinations_of
from math import prod
from typing import TypeAlias

import numpy as np

from lathe.core.ir.dim import Dim, product
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.lowering.selected_map import SelectedMap, bind_parameters, bound_attr
from lathe.core.passes.proofs.selected_rows import Places, Rows, Selection, repeats, source_of
from lathe.core.passes.rewrite.base import PassResult, can_reshape_to, shape_of
from lathe.core.passes.rewrite.editor import Editor

_Write: TypeAlias = Callable[["Editor", "Selection", "_Scatter"], Value]

_MOST_REPEATS = 16  # the most indices along the mask axes that are no targets: nodes are written for each
_FEW = 2  # groups of at most 2 scatters are always rewritten: all rows are computed about twice at most


@dataclass(frozen=True)
class SelectedRows:
    """Rewrites scatters of selected rows, in groups that write to one tensor.

    `maps`: groups of more than two scatters with matrix products become MapSelected, where that can compute them.
    `most_work`: the most multiplications per row in other groups of more than two scatters. Each mask of a large
    mixture of experts selects few rows, so the computation of all rows for each expert would take longer.
    """

    maps: bool = True
    most_work: int = 1 << 22
    name: str = "selected_rows"

    def run(self, graph: Graph) -> PassResult:
        if all(node.op != "NonZero" for node in graph.nodes):
            return PassResult(0)
        selection, editor = Selection(graph.nodes, infer_graph(graph)), Editor(graph)
        for chain in _chains(filter(None, (_scatter(graph, selection, node) for node in graph.nodes))):
            write = self._choose(selection, editor, chain)
            if write is not None:
                for each in chain:
                    editor.replace(each.node.output, write(editor, selection, each))
        return editor.finish()

    def _choose(self, selection: Selection, editor: Editor, chain: Sequence[_Scatter]) -> _Write | None:
        """The function that rewrites each scatter of a group (`_mapped` or `_written`); None to leave the group."""
        work = sum(_work(selection, each.updates) for each in chain)
        is_costly = len(chain) > _FEW and work > 0
        if self.maps and is_costly and all(_map(editor, selection, each) is not None for each in chain):
            return _mapped
        if len(chain) <= _FEW or work <= self.most_work:
            return _written
        return None


@dataclass(frozen=True)
class _Scatter:
    """A scatter of rows that a mask selects, `updates`, into `base`; `node` is the ScatterND or ScatterElements.

    The leading axes of `base` are the axes `targets` of the mask, in this order. `beside`: the other axes of the mask.
    """

    node: Node
    base: Value
    updates: Value
    rows: Rows
    targets: tuple[int, ...]

    @property
    def beside(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(self.rows.mask.shape)) if axis not in self.targets)


def _chains(scatters: Iterable[_Scatter]) -> list[list[_Scatter]]:
    """The scatters in groups: each scatter of a group but the first writes to the result of an earlier one."""
    by_result: dict[Value, list[_Scatter]] = {}
    chains: list[list[_Scatter]] = []
    for each in scatters:
        chain = by_result.get(each.base)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(each)
        by_result[each.node.output] = chain
    return chains


def _work(selection: Selection, updates: Value) -> int:
    """The multiplications per row in the matrix products that compute `updates`; symbolic extents count as 1."""
    work = 0
    for node in selection.nodes_of(updates):
        weights = shape_of(node.input(1)) if node.op in ("MatMul", "Gemm") else None
        extents = (*weights, *node.output.shape[1:-1]) if weights else (0,)
        work += prod(extent for extent in extents if isinstance(extent, int))
    return work


def _scatter(graph: Graph, selection: Selection, node: Node) -> _Scatter | None:
    """The node as a scatter of each selected row to the place of its element in the mask; None for any other node.

    None also if more than 16 elements of the mask belong to one row of the result, or shapes do not fit.
    """
    if node.op not in ("ScatterND", "ScatterElements") or node.attrs.get("reduction", "none") not in ("none", "add"):
        return None
    found = _scatter_nd(selection, node) if node.op == "ScatterND" else _scatter_elements(selection, node)
    if found is None:
        return None
    extents = shape_of(found.rows.mask) or ()
    wanted = tuple(extents[axis] for axis in found.targets)
    times = product(extents[axis] for axis in found.beside)
    fits = shape_of(found.base) == (*wanted, *found.rows.rest) and can_reshape_to(graph, (*extents, *found.rows.rest))
    few = isinstance(times, int) and 0 < times <= _MOST_REPEATS
    return found if fits and few else None


def _scatter_nd(selection: Selection, node: Node) -> _Scatter | None:
    base, updates, places = node.input(0), node.input(2), selection.places(node.input(1))
    rows = selection.rows(updates)
    if base is None or updates is None or places is None or rows is None or places.axis != 1:
        return None
    targets = places.coordinates()
    if targets is None:
        return None
    if not rows.flat:
        return _Scatter(node, base, updates, rows, targets) if places.mask is rows.mask else None
    if targets != tuple(range(len(targets))) or not repeats(places.mask, rows.mask, rows.rest):
        return None
    shape = shape_of(rows.mask) or ()
    return _Scatter(node, base, _before_flat(updates), rows, tuple(range(len(shape))))


def _before_flat(value: Value) -> Value:
    """The tensor of rows that views flattened to `value`: the first value backwards that is not of rank 1."""
    while len(value.shape) == 1 and value.producer is not None and value.producer.inputs[0] is not None:
        value = value.producer.inputs[0]
    return value


def _scatter_elements(selection: Selection, node: Node) -> _Scatter | None:
    """A ScatterElements along axis 0 with one index for all elements of a row, as a scatter of rows; otherwise None."""
    base, index, updates = node.inputs
    rows, source = selection.rows(updates), index.producer if index is not None else None
    if base is None or updates is None or rows is None or rows.flat or source is None or source.op != "Expand":
        return None
    places = selection.places(source.input(0))
    targets = places.coordinates() if places is not None and places.axis == 1 else None
    if places is None or places.mask is not rows.mask or targets is None or len(targets) != 1:
        return None
    same = shape_of(index) == shape_of(updates) and len(updates.shape) == 2
    return _Scatter(node, base, updates, rows, targets) if same and node.attrs.get("axis", 0) == 0 else None


def _map(editor: Editor, selection: Selection, found: _Scatter) -> SelectedMap | None:
    """The writer of a MapSelected for the scatter; None if MapSelected cannot compute its rows."""
    written = SelectedMap(editor, selection, found.node, found.rows.mask, found.targets, found.beside)
    return written if written.can_write(found.updates) else None


def _mapped(editor: Editor, selection: Selection, found: _Scatter) -> Value:
    """The value that replaces the result of the scatter, computed by a new MapSelected; it must be able to."""
    written = _map(editor, selection, found)
    assert written is not None
    base = found.node.required_input(0)  # `found.base`, or its replacement
    rows = product(found.rows.mask.shape[axis] for axis in found.targets)
    flat = editor.reshaped(found.node, base, (rows, *found.rows.rest))
    result = written.write(flat, found.updates, found.node.attrs.get("reduction", "none") == "add")
    return editor.reshaped(found.node, result, base.shape)


def _written(editor: Editor, selection: Selection, found: _Scatter) -> Value:
    """The value that replaces the result of the scatter, computed for all rows and chosen by Where.

    If several elements of the mask write to one row, their updates are applied in the order of these elements.
    """
    anchor, adds = found.node, found.node.attrs.get("reduction", "none") == "add"
    dense = _Dense(editor, selection, anchor, found.rows.mask, found.targets)
    shape = (dense.size, *found.rows.rest)
    base = anchor.inputs[0]  # `found.base`, or its replacement
    assert base is not None
    result = editor.reshaped(anchor, base, shape)
    zero = editor.constant(np.zeros((), result.dtype.numpy)) if adds else None
    counts = [int(str(found.rows.mask.shape[axis])) for axis in found.beside]
    for places in combinations_of(*map(range, counts)):
        fixed = dict(zip(found.beside, places, strict=True))
        keeps = editor.reshaped(anchor, dense.mask_at(fixed), (dense.size, *[1] * len(found.rows.rest)))
        made = dense.of(found.updates, fixed)
        if adds:
            kept = editor.emit(anchor, "Where", keeps, made, zero)
            result = editor.emit(anchor, "Add", result, kept)
        else:
            result = editor.emit(anchor, "Where", keeps, made, result)
    return editor.reshaped(anchor, result, base.shape)


@dataclass
class _Dense:
    """Emits nodes that compute for all rows what other nodes compute for selected rows.

    There is one row for each index along the axes `targets` of the mask, in this order of the axes. Along the mask's
    other axes the index is fixed.
    """

    editor: Editor
    selection: Selection
    anchor: Node
    mask: Value
    targets: tuple[int, ...]
    made: dict[tuple[Value, tuple[int, ...]], Value] = field(default_factory=dict)

    @property
    def size(self) -> Dim:
        return product(self.mask.shape[axis] for axis in self.targets)

    def mask_at(self, fixed: Mapping[int, int]) -> Value:
        """bool [rows]: whether the mask selects each row; `fixed` has the index along each axis that is no target."""
        mask = self.mask
        if mask.dtype is not DType.BOOL:
            mask = self.editor.emit(self.anchor, "Cast", mask, attrs={"to": DType.BOOL.onnx_code})
        return self._laid_out(mask, tuple(range(len(mask.shape))), fixed)

    def of(self, value: Value, fixed: Mapping[int, int]) -> Value:
        for node in self.selection.nodes_of(value):
            self._write(node, fixed)
        return self.made[self._key(value, fixed)]

    def _key(self, value: Value, fixed: Mapping[int, int]) -> tuple[Value, tuple[int, ...]]:
        rows = self._rows(value)
        return value, tuple(place for axis, place in fixed.items() if axis in rows.axes)

    def _rows(self, value: Value) -> Rows:
        rows = self.selection.rows(value)
        assert rows is not None
        return rows

    def _write(self, node: Node, fixed: Mapping[int, int]) -> None:
        if self._key(node.outputs[0], fixed) in self.made:
            return
        index = self.selection.places(node.input(1)) if node.op in ("Gather", "GatherND") else None
        source = self.selection.rows(node.input(0))
        if index is not None and source is None:
            outputs = [self._gathered(node, index, fixed)]
        elif node.op == "Expand" and source is not None and not self._is_bound(node):
            outputs = [self.made[self._key(node.inputs[0], fixed)]]  # type: ignore[arg-type]
        else:
            outputs = self._computed(node, fixed)
        for value, made in zip(node.outputs, outputs, strict=True):
            self.made[self._key(value, fixed)] = made

    def _is_bound(self, node: Node) -> bool:
        return node.input(1) is None or node.input(1) in self.selection.known

    def _gathered(self, node: Node, index: Places, fixed: Mapping[int, int]) -> Value:
        data = node.inputs[0]
        source = source_of(data, index) if data is not None else None
        assert data is not None and source is not None
        return self._laid_out(self.editor.reshaped(self.anchor, data, source.shape), source.axes, fixed)

    def _laid_out(self, data: Value, axes: tuple[int, ...], fixed: Mapping[int, int]) -> Value:
        """`data`, which begins with the axes `axes` of the mask, as a tensor with one row per index along `targets`."""
        left, rest = list(axes), data.shape[len(axes) :]
        for axis in [axis for axis in axes if axis in fixed]:
            place = self.editor.constant(np.array(fixed[axis]))
            data = self.editor.emit(self.anchor, "Gather", data, place, attrs={"axis": left.index(axis)})
            left.remove(axis)
        order = [axis for axis in self.targets if axis in left]
        if order != left:
            perm = (*map(left.index, order), *range(len(left), len(left) + len(rest)))
            data = self.editor.emit(self.anchor, "Transpose", data, attrs={"perm": perm})
        if len(order) < len(self.targets):
            extents = [self.mask.shape[axis] for axis in self.targets]
            ones = tuple(extent if axis in order else 1 for axis, extent in zip(self.targets, extents, strict=True))
            data = self.editor.reshaped(self.anchor, data, (*ones, *rest))
            data = self.editor.emit(self.anchor, "Expand", data, attrs={"shape": (*extents, *rest)})
        return self.editor.reshaped(self.anchor, data, (self.size, *rest))

    def _computed(self, node: Node, fixed: Mapping[int, int]) -> list[Value]:
        """The outputs of a copy of `node` for all rows, from inputs that were written for all rows before."""
        inputs, attrs = bind_parameters(self.selection, node)
        env: dict[str, Dim] = {str(self.selection.counts[self.mask]): self.size}
        given = [
            self.made[self._key(value, fixed)]
            if value is not None and self.selection.rows(value) is not None
            else value
            for value in inputs
        ]
        bound = {name: bound_attr(attr, env) for name, attr in attrs.items()}
        return self.editor.emit_many(self.anchor, node.op, given, len(node.outputs), bound, node.name)
