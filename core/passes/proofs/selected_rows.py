"""Finds the values that are computed from the rows that a mask selects, as in `hidden[mask]` or a mixture of experts.

NonZero returns the coordinates of a mask's nonzero elements. PyTorch's exporters gather rows at these coordinates,
compute each row by itself, and scatter the results to the same coordinates. This module finds the values between;
`lowering/masked_rows.py` replaces them with computations on all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lathe.core.ir.dim import Dim, SymDim, product, symbols
from lathe.core.ir.graph import Array, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import MixesRows
from lathe.core.passes.rewrite.base import shape_of, view_source

# These operators accept any numbers, so they can be computed for rows that the mask does not select, too.
_OF_ROWS = (
    "MatMul",
    "Gemm",
    "Softmax",
    "LogSoftmax",
    "LayerNormalization",
    "RMSNormalization",
    "Gelu",
    "Swish",
    "Cast",
)
_PARTS = ("Split", "Slice", "Concat", "Pad", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand")
_SUMS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare")
_ROWWISE = frozenset((*_OF_ROWS, *_PARTS, *_SUMS, "Cast", "Identity"))


@dataclass(frozen=True)
class Places:
    """Integers for each nonzero element of a mask: in every column, a linear function of the element's coordinates.

    `columns` has the factor of each coordinate, for every column: a column that is a coordinate has factor 1 for it and
    0 for the others. `axis` is the axis, 0 or 1, that counts the columns; None for a single column of rank 1.
    """

    mask: Value
    columns: tuple[tuple[Dim, ...], ...]
    axis: int | None

    def coordinates(self) -> tuple[int, ...] | None:
        """For each column the axis of the mask whose coordinate it is; None unless all are different coordinates."""
        axes = [steps.index(1) if _is_unit(steps) else None for steps in self.columns]
        found = tuple(axis for axis in axes if axis is not None)
        return found if len(set(found)) == len(axes) else None


@dataclass(frozen=True)
class Rows:
    """A tensor with one row for each nonzero element of a mask.

    `axes`: the axes of the mask on whose coordinates the rows depend. `rest`: the extents of a row. `flat`: the rows
    are flattened to rank 1.
    """

    mask: Value
    axes: frozenset[int]
    rest: tuple[Dim, ...]
    flat: bool = False


Found = Places | Rows
_NO_MASKS: frozenset[Value] = frozenset()


def _is_unit(steps: Sequence[Dim]) -> bool:
    return sorted(map(str, steps)) == ["0"] * (len(steps) - 1) + ["1"]


class Selection:
    """Classifies values whose extents contain the number of a mask's nonzero elements, as `Places` or `Rows`.

    `known`: the values that inference knows. `counts`: by mask, the symbol for the number of its nonzero elements.
    """

    def __init__(self, nodes: Sequence[Node], known: Mapping[Value, Array]) -> None:
        self.known = known
        self.found: dict[Value, Found] = {}
        self.counts: dict[Value, Dim] = {}  # by mask: the number of its nonzero elements
        self._mixed: dict[Value, frozenset[Value]] = {}  # of other values: the masks they depend on
        for node in nodes:
            self._look(node)

    def places(self, value: Value | None) -> Places | None:
        found = self.found.get(value) if value is not None else None
        return found if isinstance(found, Places) else None

    def rows(self, value: Value | None) -> Rows | None:
        found = self.found.get(value) if value is not None else None
        return found if isinstance(found, Rows) else None

    def is_count(self, dim: Dim, mask: Value) -> bool:
        return mask in self.counts and dim == self.counts[mask]

    def repeated_number(self, value: Value) -> float | None:
        """The number that all elements of a value equal: a constant of one element, also expanded; otherwise None."""
        node = value.producer
        source = node.inputs[0] if node is not None and node.op == "Expand" else value
        array = self.known.get(source) if source is not None else None
        return float(array.ravel()[0]) if array is not None and array.size == 1 and array.dtype != object else None

    def nodes_of(self, value: Value) -> list[Node]:
        """The nodes that compute `value` and the rows that it is computed from, in the order of the graph."""
        wanted, pending = set[Value](), [value]
        while pending:
            current = pending.pop()
            if current not in wanted and self.rows(current) is not None and current.producer is not None:
                wanted.add(current)
                pending += [each for each in current.producer.inputs if each is not None]
        made = (each.producer for each in self.found if each in wanted)
        return list(dict.fromkeys(node for node in made if node is not None))

    def _look(self, node: Node) -> None:
        if node.op == "NonZero":
            self._add_mask(node)
            return
        if any(value in self.found for value in node.inputs):
            rule = _RULES.get(node.op)
            made = (rule(self, node) if rule is not None else None) or list(self._rowwise(node))
            pairs = zip(node.outputs, made, strict=False)
            self.found.update((value, found) for value, found in pairs if isinstance(found, Rows) or _counts(value))
        self._note_mixed(node)

    def _note_mixed(self, node: Node) -> None:
        """Record, for values that are neither places nor rows, the masks that they depend on: a mean of selected rows.

        Results of scatters are not recorded: their rows are assumed to be where they were gathered.
        """
        if node.op in ("ScatterND", "ScatterElements") or node.outputs[0] in self.found:
            return
        given = [self.found.get(value) for value in node.inputs if value is not None]
        masks = [self._mixed.get(value, _NO_MASKS) for value in node.inputs if value is not None]
        mixed = _NO_MASKS.union(*masks, (each.mask for each in given if each is not None))
        if mixed:
            self._mixed.update(dict.fromkeys(node.outputs, mixed))

    def _add_mask(self, node: Node) -> None:
        (mask,), shape = node.inputs, shape_of(node.input(0))
        if mask is None or not shape or not isinstance(node.output.shape[1], SymDim):
            return
        axes = range(len(shape))
        self.counts.setdefault(mask, node.output.shape[1])
        self.found[node.output] = Places(mask, tuple(tuple(int(i == k) for i in axes) for k in axes), 0)

    def _rowwise(self, node: Node) -> Iterator[Found]:
        """Yield each output as `Rows`, if the node computes each row of one mask by itself; otherwise nothing."""
        op, given = registry.get(node.op), [self.rows(value) for value in node.inputs]
        masks = {rows.mask for rows in given if rows is not None}
        if len(masks) != 1 or any(rows.flat for rows in given if rows is not None):
            return
        (mask,) = masks
        if not (op.is_elementwise or node.op in _ROWWISE) or not op.pure or not self._has_parameters(node, mask):
            return
        view = registry.Infer(op, node, self.known, str(self.counts[mask]))
        moved = op.rows(view, [None if rows is None else 0 for rows in given])
        if isinstance(moved, MixesRows) or any(axis != 0 for axis in moved):
            return
        axes = frozenset().union(*(rows.axes for rows in given if rows is not None))
        for value in node.outputs:
            if not self._leads(value, mask) or not (value.dtype.is_float or value.dtype is DType.BOOL):
                return
        yield from (Rows(mask, axes, value.shape[1:]) for value in node.outputs)

    def _has_parameters(self, node: Node, mask: Value) -> bool:
        """Whether every input is absent, a tensor of rows, a known parameter, or independent of the mask."""
        parameters = registry.get(node.op).params.values()
        return all(
            value is None
            or self.rows(value) is not None
            or (index in parameters and value in self.known)
            or not (value in self.found or _is_open(value) or mask in self._mixed.get(value, _NO_MASKS))
            for index, value in enumerate(node.inputs)
        )

    def _leads(self, value: Value, mask: Value) -> bool:
        """Whether the leading extent is the number of the mask's nonzero elements, and no other depends on that."""
        shape = shape_of(value)
        if not shape or not self.is_count(shape[0], mask):
            return False
        return not any(symbols(dim) & symbols(self.counts[mask]) for dim in shape[1:])


def _counts(value: Value) -> bool:
    """Whether the elements are int32 or int64, as `Places` must be: floats may have been rounded."""
    return value.dtype in (DType.INT32, DType.INT64)


def _is_open(value: Value) -> bool:
    shape = shape_of(value)
    return shape is None or any(name.startswith("_") for dim in shape for name in symbols(dim))


# -- places ------------------------------------------------------------------------------------------------------------


def _same(selection: Selection, node: Node) -> list[Found] | None:
    found = selection.places(node.input(0))
    return [found] if found is not None else None


def _transposed(selection: Selection, node: Node) -> list[Found] | None:
    found = selection.places(node.input(0))
    if found is None or found.axis is None or node.attrs.get("perm") not in ((1, 0), None):
        return None
    return [replace(found, axis=1 - found.axis)]


def _split(selection: Selection, node: Node) -> list[Found] | None:
    found, sizes = selection.places(node.input(0)), [shape_of(value) for value in node.outputs]
    axis = node.attrs.get("axis", 0)
    if found is None or found.axis is None or axis not in (found.axis, found.axis - 2):
        return None
    made: list[Found] = []
    first = 0
    for shape in sizes:
        count = shape[found.axis] if shape else None
        if not isinstance(count, int):
            return None
        made.append(replace(found, columns=found.columns[first : first + count]))
        first += count
    return made


def _sliced(selection: Selection, node: Node) -> list[Found] | None:
    found = selection.places(node.input(0))
    if found is None:
        return _cut_to_count(selection, node)
    op = registry.get(node.op)
    ranges = op.ranges(registry.Infer(op, node, selection.known), 2) if found.axis is not None else None  # type: ignore[attr-defined]
    if not ranges or list(ranges) != [found.axis] or not all(isinstance(bound, int) for bound in ranges[found.axis]):
        return None
    return [replace(found, columns=found.columns[slice(*ranges[found.axis])])]


def _viewed(selection: Selection, node: Node) -> list[Found] | None:
    """The output of a view that adds or removes the axis of a single column, or that flattens rows; otherwise None."""
    found, shape = selection.places(node.input(0)), shape_of(node.output)
    if found is None:
        return _flattened(selection, node)
    if shape is None or len(found.columns) != 1:
        return None
    places = next((place for place, dim in enumerate(shape) if selection.is_count(dim, found.mask)), None)
    if places is None or [dim for i, dim in enumerate(shape) if i != places] not in ([], [1]):
        return None
    return [replace(found, axis=None if len(shape) == 1 else 1 - places)]


def _joined(selection: Selection, node: Node) -> list[Found] | None:
    parts = [selection.places(value) for value in node.inputs]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({(part.mask, part.axis) for part in known}) != 1:
        return None
    if known[0].axis is None or node.attrs.get("axis") not in (known[0].axis, known[0].axis - 2):
        return None
    return [replace(known[0], columns=tuple(steps for part in known for steps in part.columns))]


def _gathered(selection: Selection, node: Node) -> list[Found] | None:
    """The output of a Gather of constant columns of places, or of a tensor's rows at places; otherwise None."""
    found, axis = selection.places(node.input(0)), node.attrs.get("axis", 0)
    if found is None:
        return _picked(selection, node)
    chosen = selection.known.get(node.inputs[1]) if node.inputs[1] is not None else None
    if found.axis is None or axis not in (found.axis, found.axis - 2) or chosen is None or chosen.dtype == object:
        return None
    if chosen.ndim > 1 or not all(-len(found.columns) <= index < len(found.columns) for index in chosen.ravel()):
        return None
    columns = tuple(found.columns[int(index)] for index in chosen.ravel())
    return [replace(found, columns=columns, axis=found.axis if chosen.ndim else None)]


def _summed(selection: Selection, node: Node) -> list[Found] | None:
    """The sum of two single columns, such as row * length + column: an index into flattened axes; otherwise None."""
    one, other = (selection.places(value) for value in node.inputs)
    if one is None or other is None or (one.mask, one.axis) != (other.mask, other.axis):
        return None
    if len(one.columns) != 1 or len(other.columns) != 1:
        return None
    steps = tuple(a + b for a, b in zip(one.columns[0], other.columns[0], strict=True))
    return [replace(one, columns=(steps,))]


def _scaled(selection: Selection, node: Node) -> list[Found] | None:
    for value, factor in (node.inputs, reversed(node.inputs)):
        found, number = selection.places(value), selection.known.get(factor) if factor is not None else None
        if found is not None and number is not None and number.size == 1 and number.ndim < 2 and _counts(node.output):
            by = number.ravel()[0]
            scale: Dim = by if isinstance(by, SymDim) else int(by)
            return [replace(found, columns=tuple(tuple(step * scale for step in steps) for steps in found.columns))]
    return None


# -- rows --------------------------------------------------------------------------------------------------------------


def _picked(selection: Selection, node: Node) -> list[Found] | None:
    """The rows that a Gather or GatherND reads at places, from a tensor that is neither places nor rows; or None."""
    data, index = node.input(0), selection.places(node.input(1))
    if data is None or index is None or data in selection.found or _is_open(data):
        return None
    if node.attrs.get("axis" if node.op == "Gather" else "batch_dims", 0) != 0:
        return None
    if index.axis != (None if node.op == "Gather" else 1):
        return None
    source = source_of(data, index)
    if source is None or not selection._leads(node.output, index.mask):
        return None
    return [Rows(index.mask, frozenset(source.axes), node.output.shape[1:])]


@dataclass(frozen=True)
class Source:
    """A shape for the tensor that rows are gathered from, whose leading axes are the axes `axes` of the mask."""

    shape: tuple[Dim, ...]
    axes: tuple[int, ...]


def source_of(data: Value, index: Places) -> Source | None:
    """The shape of `data` with an axis for each axis of the mask that `index` depends on.

    None unless every index along these axes has its own row in `data`. Then rows exist for the zero elements as well.
    """
    extents, shape = shape_of(index.mask) or (), shape_of(data) or ()
    axes = index.coordinates()
    if axes is None and len(index.columns) == 1:
        axes = _joined_axes(index.columns[0], extents)
        wanted = tuple(extents[axis] for axis in axes or ())
        return Source((*wanted, *shape[1:]), axes) if axes and product(wanted) == shape[0] else None
    if axes is None or tuple(extents[axis] for axis in axes) != shape[: len(axes)]:
        return None
    return Source(shape, axes)


def _joined_axes(steps: Sequence[Dim], extents: Sequence[Dim]) -> tuple[int, ...] | None:
    """The axes whose steps are not 0, outermost first, if the steps are row-major strides over them; or None."""
    left = [axis for axis, step in enumerate(steps) if step != 0]
    axes: list[int] = []
    behind: Dim = 1
    while left:
        axis = next((axis for axis in left if steps[axis] == behind), None)
        if axis is None:
            return None
        left.remove(axis)
        axes.insert(0, axis)
        behind = behind * extents[axis]
    return tuple(axes)


def _flattened(selection: Selection, node: Node) -> list[Found] | None:
    found, shape = selection.rows(node.input(0)), shape_of(node.output)
    flat = found is not None and not found.flat and bool(found.rest) and shape is not None and len(shape) == 1
    return [replace(found, flat=True)] if found is not None and flat else None


def _cut_to_count(selection: Selection, node: Node) -> list[Found] | None:
    """Flattened rows, unchanged by a Slice of all elements; None for any other node.

    The end of the Slice must be the number of nonzero elements of another mask, which has each element of the rows'
    mask once for every element of a row (`repeats`).
    """
    found = selection.rows(node.input(0))
    if found is None or not found.flat:
        return None
    op = registry.get(node.op)
    ranges = op.ranges(registry.Infer(op, node, selection.known), 1)  # type: ignore[attr-defined]
    start, end, step = (ranges or {}).get(0, (1, 0, 1))
    masks = [mask for mask, count in selection.counts.items() if end == count]
    every = start == 0 and step == 1 and any(repeats(mask, found.mask, found.rest) for mask in masks)
    return [found] if every else None


def repeats(mask: Value, other: Value, rest: Sequence[Dim]) -> bool:
    """Whether `mask` is `other`, expanded by trailing axes of the extents `rest`."""
    node, shape = mask.producer, shape_of(other)
    if node is None or node.op != "Expand" or shape is None or shape_of(mask) != (*shape, *rest):
        return False
    source = node.inputs[0]
    if source is None or shape_of(source) != (*shape, *[1] * len(rest)):
        return False
    return view_source(source) is view_source(other)


def _repeated(selection: Selection, node: Node) -> list[Found] | None:
    """Rows, unchanged by an Expand to the shape that they have already; None for any other Expand.

    A sum over the whole mask must compute the leading extent.
    """
    found, shape = selection.rows(node.input(0)), node.input(1)
    if found is None or found.flat or shape is None or shape.producer is None or shape.producer.op != "Concat":
        return None
    parts = shape.producer.inputs
    count, *rest = parts
    extents = [selection.known.get(part) for part in rest if part is not None]
    if len(extents) != len(rest) or any(extent is None for extent in extents):
        return None
    dims = [dim for extent in extents if extent is not None for dim in extent.ravel().tolist()]
    return [found] if dims == list(found.rest) and _counts_all(selection, count, found.mask) else None


def _counts_all(selection: Selection, count: Value | None, mask: Value) -> bool:
    """Whether `count` is the sum over the whole mask, which is the number of its nonzero elements."""
    node = count.producer if count is not None else None
    source = node.inputs[0] if node is not None and node.op == "ReduceSum" and len(node.inputs) == 1 else None
    shape = shape_of(source)
    if node is None or source is None or shape is None:
        return False
    if node.attrs.get("axes") not in (None, tuple(range(len(shape)))):
        return False
    ones, every = (selection.repeated_number(value) for value in (source, mask))
    if ones == 1 and every == 1:
        return product(shape) == product(shape_of(mask) or ())
    view = view_source(source)
    cast = view.producer if view.producer is not None and view.producer.op == "Cast" else None
    return view_source(cast.inputs[0] if cast is not None and cast.inputs[0] is not None else view) is view_source(mask)


_Rule = Callable[[Selection, Node], list[Found] | None]
_RULES: dict[str, _Rule] = {
    "Transpose": _transposed,
    "Split": _split,
    "Slice": _sliced,
    "Reshape": _viewed,
    "Squeeze": _viewed,
    "Unsqueeze": _viewed,
    "Flatten": _viewed,
    "Identity": _same,
    "Cast": _same,
    "Concat": _joined,
    "Gather": _gathered,
    "GatherND": _picked,
    "Add": _summed,
    "Mul": _scaled,
    "Expand": _repeated,
}
