"""Shape and type rules that several families share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.ir.types import Dim, DType
from core.ops.registry import Infer, Mixes, RowAxis

Shape = tuple[Dim, ...]


def same_dtype(c: Infer, indices: Iterable[int]) -> DType:
    """The element type that the given inputs (absent ones skipped) must share."""
    found = {i: c.dtype(i) for i in indices if c.has_input(i)}
    if len(set(found.values())) > 1:
        listing = ", ".join(f"{c.op.input_name(i)}: {dtype}" for i, dtype in found.items())
        c.fail(f"inputs must have one element type, got {listing}")
    return next(iter(found.values()))


def broadcast_shapes(c: Infer, shapes: Sequence[Shape | None]) -> Shape | None:
    """The broadcast of shapes; None when a rank is unknown. A symbol meets 1 or itself; against another
    number above 1 it is taken to be that number, checked when the model runs."""
    if any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape is not None]
    rank = max(map(len, known), default=0)
    return tuple(
        _broadcast_dim(c, [s[len(s) - rank + axis] for s in known if len(s) - rank + axis >= 0], known)
        for axis in range(rank)
    )


def _broadcast_dim(c: Infer, dims: Sequence[Dim], shapes: Sequence[Shape]) -> Dim:
    distinct = list(dict.fromkeys(dim for dim in dims if dim != 1))
    numbers = [dim for dim in distinct if isinstance(dim, int)]
    if len(numbers) > 1:
        listing = " and ".join("[" + ",".join(map(str, shape)) + "]" for shape in shapes)
        c.fail(f"shapes {listing} do not broadcast")
    if numbers:
        return numbers[0]
    return distinct[0] if distinct else 1


def broadcast_rows(c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
    """Rows stay apart in an elementwise operator when, counted from the right, they lie along one axis of all inputs
    that have them, and every other input has extent 1 there or lacks the axis."""
    shapes = [c.shape(i) if c.has_input(i) else () for i in range(len(axes))]
    rank = max(len(shape) for shape in shapes if shape is not None)
    found = {axis - len(shape) for axis, shape in zip(axes, shapes, strict=True) if axis is not None and shape is not None}
    if not found:
        return [None] * len(c.node.outputs)
    if len(found) > 1:
        return Mixes("its inputs have their rows along different axes")
    back = found.pop()
    for axis, shape in zip(axes, shapes, strict=True):
        if axis is None and shape is not None and len(shape) >= -back and shape[back] != 1:
            return Mixes("an input without rows varies along the row axis")
    return [rank + back] * len(c.node.outputs)


def normalize_axis(c: Infer, axis: int, rank: int) -> int:
    """A possibly negative axis as a non-negative one."""
    if not -rank <= axis < rank:
        c.fail(f"axis {axis} is out of range for rank {rank}")
    return axis % rank if rank else 0
