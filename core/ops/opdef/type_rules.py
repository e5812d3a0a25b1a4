"""Shape and type rules, and rules for rows, that several operator families share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lathe.core.ir.dim import is_never_negative
from lathe.core.ir.equation import solve_maximum
from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType
from lathe.core.ops.opdef.registry import Infer, MixesRows, NodeView, RowAxis

Shape = tuple[Dim, ...]
MAX_RANK = 64  # NumPy's own limit


@dataclass(frozen=True, slots=True)
class Kind:
    """A set of element types that an operator accepts, and its name in error messages."""

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
    """The element type of input `index`; ModelError unless it is of this kind."""
    dtype = c.dtype(index)
    if dtype not in kind:
        c.fail(f"input {index} ({c.op.input_name(index)}) is {dtype}, expected {kind.label}")
    return dtype


def as_dtype(c: NodeView, value: Any) -> DType:
    """The element type that an attribute's value, a `DType` or an ONNX code, means. UnsupportedError for others."""
    if isinstance(value, DType):
        return value
    try:
        return DType.from_onnx(int(value))
    except ValueError as error:
        return c.unsupported(str(error))


def as_computed(x: Array) -> Array:
    """Arrays of floats of at most two bytes as float32, in which references compute; other arrays as they are."""
    narrow = x.dtype.itemsize <= 2 and DType.from_numpy(x.dtype).is_float
    return x.astype(np.float32) if narrow else x


def mean_over(x: Array, axes: Iterable[int]) -> Array:
    """The mean over `axes`, which stay with extent 1; NaN over no elements, without NumPy's warning."""
    reduced = {axis % x.ndim for axis in axes}
    if all(x.shape[axis] for axis in reduced):
        return np.mean(x, tuple(reduced), keepdims=True)
    return np.full([1 if axis in reduced else size for axis, size in enumerate(x.shape)], np.nan, x.dtype)


def fits(shape: Sequence[Dim], expected: Sequence[Dim | str]) -> bool:
    """Whether a tensor of this shape may have the expected extents: the ranks and all numbers are equal.

    A symbol may be any number in a run, and a string stands for any extent.
    """
    if len(shape) != len(expected):
        return False
    pairs = zip(shape, expected, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def agree(c: NodeView, shape: Sequence[Dim], expected: Sequence[Dim | str]) -> bool:
    """Like `fits`, but compares by `c.agree`, in which subclasses of NodeView record the extents that must be equal."""
    pairs = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(c.agree(a, b) for a, b in pairs if not isinstance(b, str))


def expect_shape(c: Infer, index: int, expected: Sequence[Dim | str]) -> None:
    """ModelError unless input `index` is absent, of unknown rank, or `fits` the expected shape.

    Symbols can only be checked in a run, by `check_run_inputs`; for that the operator must set `agreeing`.
    """
    shape = c.shape(index) if c.has_input(index) else None
    if shape is not None and not agree(c, shape, expected):
        c.fail(f"{c.op.input_name(index)} is {c.tensor(index)}, expected [{','.join(map(str, expected))}]")


def same_dtype(c: Infer, indices: Iterable[int]) -> DType:
    """The common element type of the present inputs at `indices`. ModelError if they differ or all are absent."""
    found = {i: c.dtype(i) for i in indices if c.has_input(i)}
    if not found:
        c.fail("has no inputs, expected at least 1")
    if len(set(found.values())) > 1:
        listing = ", ".join(f"{c.op.input_name(i)}: {dtype}" for i, dtype in found.items())
        c.fail(f"inputs must have one element type, got {listing}")
    return next(iter(found.values()))


def broadcast_shapes(c: Infer, shapes: Sequence[Shape | None]) -> Shape | None:
    """The broadcast of several shapes; None if a rank is unknown. ModelError for numbers that do not broadcast.

    A symbolic extent and a number other than 1 give the number. Two different symbolic extents give a new symbol, since
    either may be 1, unless they are assumed equal because of a maximum in one of them (`supposed_equal`). Symbolic
    extents that do not broadcast are an error of the run.
    """
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


def shape_text(shape: Sequence[object] | None) -> str:
    """A shape, or another list of sizes, as error messages show it: "[n,3]"; "?" if it is not known."""
    return "?" if shape is None else "[" + ",".join(map(str, shape)) + "]"


def _broadcast_dim(c: Infer, axis: int, dims: Sequence[Dim], shapes: Sequence[Shape]) -> Dim:
    distinct = list(dict.fromkeys(dim for dim in dims if dim != 1))
    numbers = [dim for dim in distinct if isinstance(dim, int)]
    if len(numbers) > 1:
        c.fail(f"shapes {' and '.join(map(shape_text, shapes))} do not broadcast")
    c.broadcast(distinct)
    if numbers:
        return numbers[0]
    if not distinct:
        return 1
    whole = [dim for dim in distinct if all(dim == other or supposed_equal(other, dim) for other in distinct)]
    return min(whole, key=lambda dim: len(str(dim))) if whole else c.fresh_dim(f"b{axis}")


def supposed_equal(one: Dim, other: Dim) -> tuple[Dim, ...]:
    """The dimensions that must be 0 or more so that two broadcasting extents are equal: 64 - n for min(n, 64) and n.

    Empty if no maximum decides whether they are equal, or if one of the extents is at most 1, such as min(n, 1): that
    extent is repeated.
    """
    return () if any(is_never_negative(1 - dim) for dim in (one, other)) else supposed_for(one, other)


def supposed_for(one: Dim, other: Dim) -> tuple[Dim, ...]:
    """The dimensions that must be 0 or more so that two dimensions are equal; empty if no maximum decides that."""
    found = solve_maximum(one, other)
    return tuple(found[1] - side for side in found[0].sides if side != found[1]) if found is not None else ()


def unknown_shape(c: Infer, lengths: Shape | None) -> Shape | None:
    """The shape of a tensor whose extents are the unknown elements of a vector: one new symbol for each element.

    `lengths` is the shape of that vector. None if it does not give the number of elements. ModelError for more than
    `MAX_RANK` elements.
    """
    if lengths is None or len(lengths) != 1 or not isinstance(lengths[0], int):
        return None
    if lengths[0] > MAX_RANK:
        c.fail(f"gives a tensor of rank {lengths[0]}, expected at most {MAX_RANK}")
    return tuple(c.fresh_dim(f"d{i}") for i in range(lengths[0]))


def broadcast_rows(c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
    """The rule for batch rows (`OpDef.rows`) of elementwise operators that broadcast.

    Counted from the last axis, all inputs with rows must have them along the same axis. Every other input must have
    extent 1 there, or lack the axis.
    """
    if all(axis is None for axis in axes):
        return [None] * len(c.node.outputs)
    shapes = [c.shape(i) if c.has_input(i) else () for i in range(len(axes))]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return MixesRows("the rank of an input is not known")
    pairs = list(zip(axes, known, strict=True))
    found = {axis - len(shape) for axis, shape in pairs if axis is not None}
    if len(found) > 1:
        return MixesRows("its inputs have their rows along different axes")
    back = found.pop()
    if any(axis is None and len(shape) >= -back and shape[back] != 1 for axis, shape in pairs):
        return MixesRows("an input without rows varies along the row axis")
    return [max(map(len, known)) + back] * len(c.node.outputs)


def untouched_rows(c: Infer, axes: Sequence[RowAxis], touched: Collection[int]) -> Sequence[RowAxis] | MixesRows:
    """The rule for batch rows (`OpDef.rows`) of operators that keep their first input's axes and mix along `touched`.

    Rows may lie along any other axis of the first input; the other inputs may have none. `touched` holds axes as
    numbers from 0 on.
    """
    first, rest = axes[0], axes[1:]
    if any(axis is not None for axis in rest):
        return MixesRows(f"a parameter of {c.op.name} has rows")
    if first is not None and first in touched:
        return MixesRows(f"{c.op.name} works along the row axis")
    return [first] * len(c.node.outputs)


def normalize_axes(c: NodeView, axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """The axes as non-negative numbers, in the given order. ModelError if one is out of range or occurs twice."""
    result = tuple(normalize_axis(c, int(axis), rank) for axis in axes)
    if len(set(result)) < len(result):
        c.fail(f"axes {list(result)} name an axis twice")
    return result


def unique_axes(c: NodeView, axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """The axes as non-negative numbers, without duplicates. ModelError if one is out of range.

    For operators that treat all axes alike, ONNX does not forbid duplicates, and ONNX Runtime ignores them.
    """
    return tuple(dict.fromkeys(normalize_axis(c, int(axis), rank) for axis in axes))


def normalize_axis(c: NodeView, axis: int, rank: int) -> int:
    """A possibly negative axis as a non-negative one. ModelError if it is out of range."""
    if not -rank <= axis < rank:
        c.fail(f"axis {axis} is out of range for rank {rank}")
    return axis % rank
