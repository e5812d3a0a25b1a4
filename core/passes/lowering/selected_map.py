"""Writes the computation of selected rows as one MapSelected, whose kernel computes no other rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lathe.core.ir.dim import Dim, SymDim, product, substitute, symbols
from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.control.map_selected import SELECTED
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.terms import Writer
from lathe.core.passes.proofs.selected_rows import Places, Selection, source_of
from lathe.core.passes.rewrite.base import shape_of
from lathe.core.passes.rewrite.editor import Editor


def bound_attr(attr: Attr, env: Mapping[str, Dim]) -> Attr:
    """An attribute in which the dimensions of `env` replace symbols, also inside tuples."""
    if isinstance(attr, SymDim):
        return substitute(attr, env)
    return tuple(bound_attr(item, env) for item in attr) if isinstance(attr, tuple) else attr


def bind_parameters(selection: Selection, node: Node) -> tuple[list[Value | None], dict[str, Attr]]:
    """The inputs and attributes of a node, with parameter inputs (shapes, axes) of known value moved to attributes.

    Such an input is then None.
    """
    op, inputs, attrs = registry.get(node.op), list(node.inputs), dict(node.attrs)
    for name, index in op.params.items():
        value = node.input(index)
        array = selection.known.get(value) if value is not None else None
        items = None if array is None else op.param_of(name, array)
        if items is not None:
            attrs[name], inputs[index] = items, None
    return inputs, attrs


@dataclass
class SelectedMap:
    """Writes one MapSelected before `anchor`, a scatter of rows.

    The axes `targets` of the mask are the leading axes of the tensor that the scatter writes to, in this order. Along
    the other axes of the mask, `beside`, several elements write to one row.
    """

    editor: Editor
    selection: Selection
    anchor: Node
    mask: Value
    targets: tuple[int, ...]
    beside: tuple[int, ...]
    sources: list[Value] = field(default_factory=list)
    per_place: list[int] = field(default_factory=list)

    def can_write(self, updates: Value) -> bool:
        """Whether MapSelected can compute `updates`, the rows to scatter: they are float32 or float64.

        All extents of rows, and of other values that the computation reads, must be numbers.
        """
        own = {str(self.selection.counts[self.mask])}
        nodes = self.selection.nodes_of(updates)
        computed = {value for node in nodes for value in node.outputs}
        for node in nodes:
            if any(not _has_static_rest(value) for value in node.outputs):
                return False
            if self._is_gather(node):
                continue
            for value in node.inputs:
                if value is None or value in computed or value in self.selection.known:
                    continue
                shape = shape_of(value)
                if shape is None or any(symbols(dim) - own for dim in shape):
                    return False
        return updates.dtype in (DType.FLOAT32, DType.FLOAT64)

    def write(self, base: Value, updates: Value, adds: bool) -> Value:
        """The output of a new MapSelected: `base` [rows, ...] after the scatter of `updates` (`adds`: added to it)."""
        body = Graph("selected")
        writer = Writer(body, self.selection.known)
        computed: dict[Value, Value] = {}
        for node in self.selection.nodes_of(updates):
            self._add_to_body(writer, node, computed)
        body.outputs = [computed[updates]]
        mask = self.mask
        if mask.dtype is not DType.BOOL:
            mask = self.editor.emit(self.anchor, "Cast", mask, attrs={"to": DType.BOOL.onnx_code})
        mask = self._laid_out(mask, tuple(range(len(mask.shape))), (*self.beside, *self.targets))
        mask = self.editor.reshaped(self.anchor, mask, (self._extent(self.beside), self._extent(self.targets)))
        attrs: dict[str, Attr] = {"body": body, "per_place": tuple(self.per_place), "adds": int(adds)}
        inputs = [base, mask, *self.sources]
        return self.editor.emit_many(self.anchor, "MapSelected", inputs, 1, attrs, self.anchor.name)[0]

    def _extent(self, axes: Sequence[int]) -> Dim:
        return product(self.mask.shape[axis] for axis in axes)

    def _is_gather(self, node: Node) -> bool:
        """Whether a node gathers the selected rows of a tensor."""
        if node.op not in ("Gather", "GatherND") or self.selection.rows(node.input(0)) is not None:
            return False
        return self.selection.places(node.input(1)) is not None

    def _add_to_body(self, writer: Writer, node: Node, computed: dict[Value, Value]) -> None:
        source, rows = node.input(0), self.selection.rows(node.input(0))
        index = self.selection.places(node.input(1)) if self._is_gather(node) else None
        if source is not None and index is not None:
            computed[node.output] = self._add_source(writer, source, index)
            return
        inputs, attrs = bind_parameters(self.selection, node)
        if node.op == "Expand" and source is not None and rows is not None and inputs[1:] not in ([], [None]):
            computed[node.output] = computed[source]  # the shape is that of the rows: see `Selection`
            return
        env: dict[str, Dim] = {str(self.selection.counts[self.mask]): SELECTED}
        attrs = {name: bound_attr(attr, env) for name, attr in attrs.items()}
        given = [computed.get(value, value) if value is not None else None for value in inputs]
        results = writer.emit(node.op, given, attrs, len(node.outputs))
        computed.update(zip(node.outputs, results, strict=True))

    def _add_source(self, writer: Writer, data: Value, index: Places) -> Value:
        """A new input of the body, which has the row of `data` for each selected element that `index` refers to.

        `data` becomes an input of the MapSelected.
        """
        found = source_of(data, index)
        assert found is not None
        data = self.editor.reshaped(self.anchor, data, found.shape)
        is_per_place = any(axis in self.beside for axis in found.axes)
        wanted = (*self.beside, *self.targets) if is_per_place else self.targets
        data = self._laid_out(data, found.axes, wanted)
        rest = data.shape[len(wanted) :]
        leading = (self._extent(self.beside),) if is_per_place else ()
        data = self.editor.reshaped(self.anchor, data, (*leading, self._extent(self.targets), *rest))
        self.sources.append(data)
        self.per_place.append(int(is_per_place))
        return writer.input("rows", TensorType(data.dtype, (SELECTED, *rest))).value

    def _laid_out(self, data: Value, axes: tuple[int, ...], wanted: tuple[int, ...]) -> Value:
        """`data`, whose leading axes are the axes `axes` of the mask, with `wanted` as leading axes instead.

        Axes are transposed; missing ones are added by an Expand.
        """
        rest = data.shape[len(axes) :]
        order = [axis for axis in wanted if axis in axes]
        if order != list(axes):
            perm = (*map(axes.index, order), *range(len(axes), len(axes) + len(rest)))
            data = self.editor.emit(self.anchor, "Transpose", data, attrs={"perm": perm})
        if len(order) < len(wanted):
            extents = [self.mask.shape[axis] for axis in wanted]
            ones = tuple(extent if axis in order else 1 for axis, extent in zip(wanted, extents, strict=True))
            data = self.editor.reshaped(self.anchor, data, (*ones, *rest))
            data = self.editor.emit(self.anchor, "Expand", data, attrs={"shape": (*extents, *rest)})
        return data


def _has_static_rest(value: Value) -> bool:
    """Whether all extents of a value but the first are numbers."""
    return all(isinstance(dim, int) for dim in value.shape[1:])
