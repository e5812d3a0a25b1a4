"""Where a value that depends on the number of rows may be used: what the proofs of `rows` and `token_flow` rest on.

The number of rows is known through Shape and Size only. Arithmetic on it gives further *counts*: values whose elements
are all known, as numbers and as dimensions of which at least one holds the symbol of the rows. A count is never data:
Lathe asks of each use of one, be it an input or an attribute, whether the pair of operator and input stands in `_USES`,
and whether it is used there in the one way that leaves every row what it is. Any other use ends the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from core.ir.dim import Dim, SymDim, floor_div, symbol
from core.ir.graph import Array, Graph, Node, Value
from core.ir.ratio import Ratio
from core.ops import registry
from core.ops.registry import Infer, OpDef, describe
from core.ops.resize import is_kept, resized_axes
from core.ops.slicing import Slice
from core.passes.base import shape_of


class Mixed(Exception):
    """The proof failed; the message says where."""


def depends(dim: object, rows: str) -> bool:
    """Whether a dimension, or a ratio of some, depends on the number of rows."""
    return isinstance(dim, SymDim | Ratio) and rows in dim.names


def steps_per_row(dim: Dim, rows: str) -> Dim | None:
    """`k` of a dimension that is k*n, n being the number of rows and k positive and free of it; else None."""
    if not depends(dim, rows):
        return None
    quotient = floor_div(dim, symbol(rows))
    if quotient * symbol(rows) != dim or depends(quotient, rows) or (isinstance(quotient, int) and quotient < 1):
        return None
    return quotient


class Counts:
    """The counts of a graph, and the check of their uses. `rows` is the symbol; `label` is what messages call them."""

    def __init__(self, known: Mapping[Value, Array], rows: str, label: str = "rows") -> None:
        self.known, self.rows, self._label = known, rows, label

    def __contains__(self, value: Value | None) -> bool:
        array = self.known.get(value) if value is not None else None
        return array is not None and array.dtype == object and any(depends(x, self.rows) for x in array.ravel())

    def check(self, node: Node) -> None:
        """Mixed where the node uses a count otherwise than `_USES` allows, or measures what has no known shape."""
        op = registry.get(node.op)
        if op.shape_arithmetic and all(output in self.known for output in node.outputs):
            return  # what it computes is a count again, or the same for every number of rows
        if node.op in ("Shape", "Size"):
            raise Mixed(f"{describe(node)}: the shape of its input is not known")
        view = Infer(op, node, self.known, self.rows)
        for name, label in self._used(op, node):
            use = _USES.get((node.op, name))
            if use is None or not use(view, lambda dim: depends(dim, self.rows)):
                raise Mixed(f"{describe(node)}: computes with the number of {self._label} ({label})")

    def _used(self, op: OpDef, node: Node) -> Iterator[tuple[str, str]]:
        """The counts that a node uses: the name of the parameter or input, and what messages call it."""
        names = {index: name for name, index in op.params.items()}
        for index, value in enumerate(node.inputs):
            if value in self:
                yield names.get(index, ""), f"input {index}, {op.input_name(index)}"
        for name, attr in node.attrs.items():
            if any(depends(item, self.rows) for item in _items(attr)):
                yield name, f"attribute {name}"

    def check_body(self, body: Graph, node: Node) -> None:
        """Mixed where a nested graph gives a count to the graph around it, which would not know it for one."""
        if any(value in self for value in body.outputs):
            raise Mixed(f"{describe(node)}: its nested graph gives the number of {self._label} to others")


def _items(attr: object) -> Iterable[object]:
    if isinstance(attr, np.ndarray):
        return attr.ravel().tolist() if attr.dtype == object else ()
    return attr if isinstance(attr, tuple | list) else (attr,)


# -- the uses that keep rows apart -------------------------------------------------------------------------------------

Depends = Callable[[Any], bool]


def _names_extents(view: Infer, counted: Depends) -> bool:
    """Reshape and ConstantOfShape: the elements say how long the axes of the output are and nothing else.

    The elements of the output and their order are those of the input, or all are one number. That only the row axis is
    as long as the number of rows says is checked of every value anyway.
    """
    return True


def _repeats_one(view: Infer, counted: Depends) -> bool:
    """Expand: every count is the extent that the output has at its place.

    The input has this extent already, and nothing happens, or it has extent 1 or none, and one row is repeated. An
    extent that broadcasts to another one (n among 2*n for n = 1) would change with the number of rows.
    """
    wanted, shape = view.param("shape"), shape_of(view.node.output)
    if wanted is None or shape is None or len(shape) < len(wanted):
        return False
    ends = zip(reversed(wanted), reversed(shape), strict=False)
    return all(dim == extent for dim, extent in ends if counted(dim))


def _repeats_all(view: Infer, counted: Depends) -> bool:
    """Tile: what is repeated is the same for every row, or the number of rows would stand in its size twice, which is
    checked of every value anyway."""
    return True


def _takes_whole(view: Infer, counted: Depends) -> bool:
    """Slice: an axis with a count as an end is taken as a whole, from 0 to its extent in steps of 1."""
    shape, op = view.shape(0), view.op
    assert isinstance(op, Slice)
    ranges = None if shape is None else op.ranges(view, len(shape))
    if shape is None or ranges is None:
        return False
    return all(
        (start, end, step) == (0, shape[axis], 1)
        for axis, (start, end, step) in ranges.items()
        if counted(start) or counted(end)
    )


def _keeps_size(view: Infer, counted: Depends) -> bool:
    """Resize: an axis with a count as its size has that size before, and is not resampled."""
    shape, sizes = view.shape(0), view.param("sizes")
    if shape is None or sizes is None:
        return False
    axes = resized_axes(view, len(shape))
    return all(is_kept(view, axis, i) for i, axis in enumerate(axes) if counted(sizes[i]))


_USES: dict[tuple[str, str], Callable[[Infer, Depends], bool]] = {
    ("Reshape", "shape"): _names_extents,
    ("ConstantOfShape", "shape"): _names_extents,
    ("Expand", "shape"): _repeats_one,
    ("Tile", "repeats"): _repeats_all,
    ("Slice", "ends"): _takes_whole,
    ("Resize", "sizes"): _keeps_size,
}
