"""The allowed uses of values that depend on the number of rows. The proofs of `rows` and `token_flow` rest on them.

A graph learns the number of rows through Shape and Size only. Arithmetic on it gives *counts*: values whose elements
are all known numbers or dimensions, at least one of which contains the symbol of the rows. Each use of a count, as an
input or in an attribute, must be listed in `_USES` under its operator and parameter, and must pass the check there,
which ensures that no row's result changes. Any other use ends the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from lathe.core.ir.dim import Dim, SymDim, floor_div, symbol
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.ratio import Ratio
from lathe.core.ops.image.resize import keeps_size, resized_axes
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Infer, OpDef, describe
from lathe.core.ops.tensor.slicing import Slice
from lathe.core.passes.rewrite.base import shape_of


class ProofFailed(Exception):
    """The proof failed; the message names the node and the reason."""


def depends(dim: object, rows: str) -> bool:
    """Whether a dimension, or a ratio of dimensions, contains the symbol `rows`."""
    return isinstance(dim, SymDim | Ratio) and rows in dim.names


def steps_per_row(dim: Dim, rows: str) -> Dim | None:
    """The factor k if `dim` is k*n, where n is the symbol `rows`; None if not, or if k contains n or is below 1."""
    if not depends(dim, rows):
        return None
    quotient = floor_div(dim, symbol(rows))
    if quotient * symbol(rows) != dim or depends(quotient, rows) or (isinstance(quotient, int) and quotient < 1):
        return None
    return quotient


class Counts:
    """The counts of a graph (values whose elements contain the number of rows), and the check of their uses.

    `known` holds the values that inference knows. `rows` is the symbol; `label` is the noun in error messages.
    """

    def __init__(self, known: Mapping[Value, Array], rows: str, label: str = "rows") -> None:
        self.known, self.rows, self._label = known, rows, label

    def __contains__(self, value: Value | None) -> bool:
        array = self.known.get(value) if value is not None else None
        return array is not None and array.dtype == object and any(depends(x, self.rows) for x in array.ravel())

    def check(self, node: Node) -> None:
        """ProofFailed if the node uses a count in a way that `_USES` does not allow.

        ProofFailed also for a Shape or Size of a value whose shape is not known.
        """
        op = registry.get(node.op)
        if op.shape_arithmetic and all(output in self.known for output in node.outputs):
            return  # its outputs are counts again, or constants
        if node.op in ("Shape", "Size"):
            raise ProofFailed(f"{describe(node)}: the shape of its input is not known")
        view = Infer(op, node, self.known, self.rows)
        for name, label in self._count_uses(op, node):
            use = _USES.get((node.op, name))
            if use is None or not use(view, lambda dim: depends(dim, self.rows)):
                raise ProofFailed(f"{describe(node)}: computes with the number of {self._label} ({label})")

    def _count_uses(self, op: OpDef, node: Node) -> Iterator[tuple[str, str]]:
        """Yield each use of a count in a node: its parameter or attribute ("" for other inputs), and a label.

        The label describes the use in messages.
        """
        names = {index: name for name, index in op.params.items()}
        for index, value in enumerate(node.inputs):
            if value in self:
                yield names.get(index, ""), f"input {index}, {op.input_name(index)}"
        for name, attr in node.attrs.items():
            if any(depends(item, self.rows) for item in _items(attr)):
                yield name, f"attribute {name}"

    def check_body(self, body: Graph, node: Node) -> None:
        """ProofFailed if a body outputs a count: the outer graph could not recognise it as one."""
        if any(value in self for value in body.outputs):
            raise ProofFailed(f"{describe(node)}: its nested graph outputs the number of {self._label}")


def _items(attr: object) -> Iterable[object]:
    if isinstance(attr, np.ndarray):
        return attr.ravel().tolist() if attr.dtype == object else ()
    return attr if isinstance(attr, tuple | list) else (attr,)


# -- the uses that keep rows apart -------------------------------------------------------------------------------------

Depends = Callable[[Any], bool]


def _sets_extents(view: Infer, is_count: Depends) -> bool:
    """True for each Reshape and ConstantOfShape: the counts set extents of the output and nothing else.

    The output has the elements of the input in their order, or one number everywhere. `rows` checks for every value
    that only the row axis depends on the number of rows, so no check is needed here.
    """
    return True


def _repeats_one(view: Infer, is_count: Depends) -> bool:
    """Whether every count in the shape of an Expand equals the extent of the output at its axis.

    Then the input either has this extent already, or has extent 1 and its one row is repeated. If the count differs
    from the extent, such as n from 2*n, the two broadcast for n = 1 alone, so the result would change with n.
    """
    wanted, shape = view.param("shape"), shape_of(view.node.output)
    if wanted is None or shape is None or len(shape) < len(wanted):
        return False
    ends = zip(reversed(wanted), reversed(shape), strict=False)
    return all(dim == extent for dim, extent in ends if is_count(dim))


def _repeats_all(view: Infer, is_count: Depends) -> bool:
    """True for each Tile whose repeats are counts: the repeated tensor is the same for every row.

    If the tensor held rows, extents of the result would contain n twice, which `rows` refuses for every value.
    """
    return True


def _takes_whole(view: Infer, is_count: Depends) -> bool:
    """Whether a Slice takes each axis whose start or end is a count whole, from 0 to its extent in steps of 1."""
    shape, op = view.shape(0), view.op
    assert isinstance(op, Slice)
    ranges = None if shape is None else op.ranges(view, len(shape))
    if shape is None or ranges is None:
        return False
    return all(
        (start, end, step) == (0, shape[axis], 1)
        for axis, (start, end, step) in ranges.items()
        if is_count(start) or is_count(end)
    )


def _keeps_size(view: Infer, is_count: Depends) -> bool:
    """Whether a Resize keeps the size of each axis whose size is a count, so that rows are not resampled."""
    shape, sizes = view.shape(0), view.param("sizes")
    if shape is None or sizes is None:
        return False
    axes = resized_axes(view, len(shape))
    return all(keeps_size(view, axis, i) for i, axis in enumerate(axes) if is_count(sizes[i]))


_USES: dict[tuple[str, str], Callable[[Infer, Depends], bool]] = {
    ("Reshape", "shape"): _sets_extents,
    ("ConstantOfShape", "shape"): _sets_extents,
    ("Expand", "shape"): _repeats_one,
    ("Tile", "repeats"): _repeats_all,
    ("Slice", "ends"): _takes_whole,
    ("Resize", "sizes"): _keeps_size,
}
