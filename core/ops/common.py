"""Shape and type rules that several families share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.ir.dim import is_never_negative
from core.ir.equation import side_taken
from core.ir.graph import Array
from core.ir.types import Dim, DType
from core.ops.registry import Infer, Mixes, NodeView, RowAxis

Shape = tuple[Dim, ...]
MAX_RANK = 64  # NumPy's own limit


@dataclass(frozen=True, slots=True)
class Kind:
    """A set of element types that an operator accepts, and how errors call it."""

    label: str
    members: frozenset[DType]

    def __contains__(self, dtype: DType) -> bool:
        return dtype in self.members


ANY = Kind("any type", frozenset(DType))
FLOAT = Kind("a floating-point type", frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64}))
INTEGER = Kind("an integer type", frozenset(dtype for dtype in DType if dtype.is_integer))
NUMBER = Kind("a number type", FLOAT.members | INTEGER.members)
BOOL = Kind("bool", frozenset({DType.BOOL}))
INDEX = Kind("int32 or int64", frozenset({DType.INT32, DType.INT64}))


def check_kind(c: Infer, index: int, kind: Kind) -> DType:
    """The element type of an input, which must be of this kind."""
    dtype = c.dtype(index)
    if dtype not in kind:
        c.fail(f"input {index} ({c.op.input_name(index)}) is {dtype}, expected {kind.label}")
    return dtype


def as_dtype(c: NodeView, value: Any) -> DType:
    """An attribute that names an element type, by type or by ONNX code."""
    if isinstance(value, DType):
        return value
    try:
        return DType.from_onnx(int(value))
    except ValueError as error:
        return c.unsupported(str(error))


def wide(x: Array) -> Array:
    """Floats of two bytes or less as float32, in which references compute; anything else as it is."""
    narrow = x.dtype.itemsize <= 2 and DType.from_numpy(x.dtype).is_float
    return x.astype(np.float32) if narrow else x


def mean_over(x: Array, axes: Iterable[int]) -> Array:
    """The mean over axes, which stay with extent 1; of nothing it is NaN (NumPy would warn as well)."""
    reduced = {axis % x.ndim for axis in axes}
    if all(x.shape[axis] for axis in reduced):
        return np.mean(x, tuple(reduced), keepdims=True)
    return np.full([1 if axis in reduced else size for axis, size in enumerate(x.shape)], np.nan, x.dtype)


def fits(shape: Sequence[Dim], expected: Sequence[Dim | str]) -> bool:
    """Whether a tensor of this shape may have the expected extents: the ranks are equal, and numbers agree.

    A symbol may turn out to be any number, and text stands for any extent.
    """
    if len(shape) != len(expected):
        return False
    pairs = zip(shape, expected, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def agree(c: NodeView, shape: Sequence[Dim], expected: Sequence[Dim | str]) -> bool:
    """Whether a tensor of this shape, which must have the expected extents, `fits` them."""
    pairs = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(c.agree(a, b) for a, b in pairs if not isinstance(b, str))


def expect_shape(c: Infer, index: int, expected: Sequence[Dim | str]) -> None:
    """ModelError unless input `index` is absent, of unknown rank, or `fits` the expected shape.

    Where a symbol is left, the operator must be `agreeing`: then the executor checks what a run shows.
    """
    shape = c.shape(index) if c.has_input(index) else None
    if shape is not None and not agree(c, shape, expected):
        c.fail(f"{c.op.input_name(index)} is {c.tensor(index)}, expected [{','.join(map(str, expected))}]")


def same_dtype(c: Infer, indices: Iterable[int]) -> DType:
    """The element type that the given inputs (absent ones skipped) must share."""
    found = {i: c.dtype(i) for i in indices if c.has_input(i)}
    if not found:
        c.fail("has no inputs, expected at least 1")
    if len(set(found.values())) > 1:
        listing = ", ".join(f"{c.op.input_name(i)}: {dtype}" for i, dtype in found.items())
        c.fail(f"inputs must have one element type, got {listing}")
    return next(iter(found.values()))


def broadcast_shapes(c: Infer, shapes: Sequence[Shape | None]) -> Shape | None:
    """The broadcast of shapes; None when a rank is unknown. A symbol that meets a number above 1 is that number or 1.
    Of two symbols either may be 1: their extent is a symbol of its own, unless a maximum in them has to be one of its
    sides (`supposed_equal`). What does not fit shows when the model runs."""
    if any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape is not None]
    if known and known.count(known[0]) == len(known):
        return known[0]
    rank = max(map(len, known), default=0)
    return tuple(
        _broadcast_dim(c, axis, [s[len(s) - rank + axis] for s in known if len(s) - rank + axis >= 0], known)
        for axis in range(rank)
    )


def _broadcast_dim(c: Infer, axis: int, dims: Sequence[Dim], shapes: Sequence[Shape]) -> Dim:
    distinct = list(dict.fromkeys(dim for dim in dims if dim != 1))
    numbers = [dim for dim in distinct if isinstance(dim, int)]
    if len(numbers) > 1:
        listing = " and ".join("[" + ",".join(map(str, shape)) + "]" for shape in shapes)
        c.fail(f"shapes {listing} do not broadcast")
    c.broadcast(distinct)
    if numbers:
        return numbers[0]
    if not distinct:
        return 1
    whole = [dim for dim in distinct if all(dim == other or supposed_equal(other, dim) for other in distinct)]
    return min(whole, key=lambda dim: len(str(dim))) if whole else c.fresh_dim(f"b{axis}")


def supposed_equal(one: Dim, other: Dim) -> tuple[Dim, ...]:
    """What must not be negative for two different extents, which broadcast, to be equal: 64 - n, of min(n, 64) and n.
    Empty where no maximum in them has to be one of its sides for that, and where one of the extents is at most 1, as of
    min(n, 1) and n: it is repeated."""
    return () if any(is_never_negative(1 - dim) for dim in (one, other)) else supposed_for(one, other)


def supposed_for(one: Dim, other: Dim) -> tuple[Dim, ...]:
    """What must not be negative for two different dimensions to be equal, where a maximum in them has to be one of its
    sides for that; else empty."""
    found = side_taken(one, other)
    return tuple(found[1] - side for side in found[0].sides if side != found[1]) if found is not None else ()


def unknown_shape(c: Infer, lengths: Shape | None) -> Shape | None:
    """The shape that a vector of that length will give: its rank is known, nothing else."""
    if lengths is None or len(lengths) != 1 or not isinstance(lengths[0], int):
        return None
    if lengths[0] > MAX_RANK:
        c.fail(f"makes a tensor of rank {lengths[0]}, expected at most {MAX_RANK}")
    return tuple(c.fresh_dim(f"d{i}") for i in range(lengths[0]))


def broadcast_rows(c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
    """Rows stay apart in an elementwise operator when, counted from the right, they lie along one axis of all inputs
    that have them, and every other input has extent 1 there or lacks the axis."""
    if all(axis is None for axis in axes):
        return [None] * len(c.node.outputs)
    shapes = [c.shape(i) if c.has_input(i) else () for i in range(len(axes))]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return Mixes("the rank of an input is not known")
    pairs = list(zip(axes, known, strict=True))
    found = {axis - len(shape) for axis, shape in pairs if axis is not None}
    if len(found) > 1:
        return Mixes("its inputs have their rows along different axes")
    back = found.pop()
    if any(axis is None and len(shape) >= -back and shape[back] != 1 for axis, shape in pairs):
        return Mixes("an input without rows varies along the row axis")
    return [max(map(len, known)) + back] * len(c.node.outputs)


def rows_beside(c: Infer, axes: Sequence[RowAxis], touched: Collection[int]) -> Sequence[RowAxis] | Mixes:
    """Rows stay apart in an operator on its first input that keeps all axes in place and works along `touched` only."""
    first, rest = axes[0], axes[1:]
    if any(axis is not None for axis in rest):
        return Mixes(f"a parameter of {c.op.name} has rows")
    if first is not None and first in touched:
        return Mixes(f"{c.op.name} works along the row axis")
    return [first] * len(c.node.outputs)


def normalize_axes(c: NodeView, axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Axes as non-negative numbers, in the given order, none twice."""
    result = tuple(normalize_axis(c, int(axis), rank) for axis in axes)
    if len(set(result)) < len(result):
        c.fail(f"axes {list(result)} name an axis twice")
    return result


def axis_set(c: NodeView, axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Axes as non-negative numbers, each once: of what treats all of them alike ONNX does not forbid to name one
    twice, and ONNX Runtime takes it as one."""
    return tuple(dict.fromkeys(normalize_axis(c, int(axis), rank) for axis in axes))


def normalize_axis(c: NodeView, axis: int, rank: int) -> int:
    """A possibly negative axis as a non-negative one."""
    if not -rank <= axis < rank:
        c.fail(f"axis {axis} is out of range for rank {rank}")
    return axis % rank
