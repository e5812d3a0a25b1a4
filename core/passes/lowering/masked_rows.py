"""Rows that a mask selects are computed where they are: all of them, and a Where takes those that the mask keeps.

`y = zeros(x.shape); y[mask] = f(x[mask])` has a number of rows that only data show: nothing of it has a kernel, and no
proof follows its rows. Where f computes something of each row by itself, that is Where(mask, f(x), y), whose shape is
known. The same with the tokens of an expert, `y.index_add_(0, token, f(x[token]) * weights[token, place])` for a mask
of places and tokens: there are few places, so each is written out.

What f makes of rows that are not selected has no effect, whatever it is: a NaN is not multiplied by 0, but left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product as combinations_of
from math import prod

import numpy as np

from lathe.core.ir.dim import Dim, SymDim, product, substitute
from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.proofs.selected_rows import Places, Rows, Selection, repeats, source_of
from lathe.core.passes.rewrite.base import PassResult, can_reshape_to, shape_of
from lathe.core.passes.rewrite.editor import Editor

_MOST_REPEATS = 16  # how often a row may be looked at, once for each place beside it
_FEW = 2  # masks: all rows take twice as long at most as those that they select together


@dataclass(frozen=True)
class SelectedRows:
    """`most_work`: how many multiplications a row may take in all that many masks write to one tensor. Each of them
    would select a few rows, and all are computed: the experts of a large model are better left as they are."""

    most_work: int = 1 << 22
    name: str = "selected_rows"

    def run(self, graph: Graph) -> PassResult:
        if all(node.op != "NonZero" for node in graph.nodes):
            return PassResult(0)
        selection, editor = Selection(graph.nodes, infer_graph(graph)), Editor(graph)
        for chain in _chains(filter(None, (_scatter(graph, selection, node) for node in graph.nodes))):
            if len(chain) <= _FEW or sum(_work(selection, each.updates) for each in chain) <= self.most_work:
                for each in chain:
                    editor.replace(each.node.output, _written(editor, selection, each))
        return editor.finish()


@dataclass(frozen=True)
class _Scatter:
    """Rows that are written to `base`, whose leading axes are the axes `targets` of their mask. `beside`: its other
    axes."""

    node: Node
    base: Value
    updates: Value
    rows: Rows
    targets: tuple[int, ...]

    @property
    def beside(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(self.rows.mask.shape)) if axis not in self.targets)


def _chains(scatters: Iterable[_Scatter]) -> list[list[_Scatter]]:
    """Scatters in groups, each of which but the first writes to what the one before has written."""
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
    """How many multiplications products take for a row, or for an element of it along extents that only a run shows."""
    work = 0
    for node in selection.nodes_of(updates):
        weights = shape_of(node.input(1)) if node.op in ("MatMul", "Gemm") else None
        extents = (*weights, *node.output.shape[1:-1]) if weights else (0,)
        work += prod(extent for extent in extents if isinstance(extent, int))
    return work


def _scatter(graph: Graph, selection: Selection, node: Node) -> _Scatter | None:
    """A scatter of rows to the places that they have in their mask, of extents that are known before a run."""
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
    """The rows whose elements, one after the other, are this value."""
    while len(value.shape) == 1 and value.producer is not None and value.producer.inputs[0] is not None:
        value = value.producer.inputs[0]
    return value


def _scatter_elements(selection: Selection, node: Node) -> _Scatter | None:
    """The same index for each element of a row."""
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


def _written(editor: Editor, selection: Selection, found: _Scatter) -> Value:
    """What the scatter gives. Several places beside a row follow one on the other, as the elements of its mask do."""
    anchor, adds = found.node, found.node.attrs.get("reduction", "none") == "add"
    dense = _Dense(editor, selection, anchor, found.rows.mask, found.targets)
    shape = (dense.size, *found.rows.rest)
    base = anchor.inputs[0]  # what the scatters before have become
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
    """Writes what is computed of selected rows for all rows. These are the places along the axes `targets` of a mask,
    in their order; along its other axes a place is fixed."""

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
        """Whether the mask selects a row, for each of them."""
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
        """A tensor whose leading axes are these axes of the mask, with one row for each place along the targets."""
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
        """What a node computes of each row, for all of them."""
        op, inputs, attrs = registry.get(node.op), list(node.inputs), dict(node.attrs)
        count = self.selection.counts[self.mask]
        env: dict[str, Dim] = {str(count): self.size}
        for name, index in op.params.items():
            value = node.input(index)
            array = self.selection.known.get(value) if value is not None else None
            items = None if array is None else op.param_of(name, array)
            if items is not None:
                attrs[name], inputs[index] = items, None
        given = [
            self.made[self._key(value, fixed)]
            if value is not None and self.selection.rows(value) is not None
            else value
            for value in inputs
        ]
        bound = {name: _bound(attr, env) for name, attr in attrs.items()}
        return self.editor.emit_many(self.anchor, node.op, given, len(node.outputs), bound, node.name)


def _bound(attr: Attr, env: Mapping[str, Dim]) -> Attr:
    """An attribute with another dimension for the count."""
    if isinstance(attr, SymDim):
        return substitute(attr, env)
    return tuple(_bound(item, env) for item in attr) if isinstance(attr, tuple) else attr
