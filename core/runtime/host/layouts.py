"""The memory layout of a run of dynamic-shape code, computed once for each combination of sizes.

The offsets of such a plan are sums of multiples of units, which are dimensions over the sizes. For given sizes the
units are numbers, and one matrix product gives all addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lathe.core.ir.dim import Dim
from lathe.core.ir.dims import compile_dims
from lathe.core.ir.types import TensorType
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import Plan, Port

_MAX_ARENA = 1 << 46  # the largest arena: more than any machine addresses
_MAX_EXTENT = (1 << 63) - 1  # kernels compute with signed 64-bit numbers


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """The memory of a run for given sizes: operands, arena and outputs; and its work in operations."""

    sizes: NDArray[np.int64]  # the table that kernels read
    slots: NDArray[np.int64]  # (base, 0, offset) of each operand
    arena: int  # bytes
    outputs: tuple[tuple[tuple[int, ...], np.dtype[np.generic]], ...]
    work: int


class Layouts:
    """The memory layouts of one plan of dynamic-shape code: `of` computes the layout for given sizes."""

    def __init__(self, plan: Plan, slots: Sequence[tuple[int, Affine]]) -> None:
        """`slots`: the number of the base, and the offset from it, of every operand, in the order of the steps.

        TypeError for an output that is no tensor, or has no rank.
        """
        offsets = [offset for _, offset in slots]
        shapes = [_shape_of(port) for port in plan.outputs]
        dims: dict[Dim, int] = {}
        for unit in [unit for each in (*offsets, plan.arena, plan.work) for unit, _ in each.units]:
            dims.setdefault(unit, len(dims))
        for dim in [dim for shape in shapes for dim in shape]:
            dims.setdefault(dim, len(dims))
        self._supposed = len(dims)
        self._evaluate = compile_dims([*dims, *plan.supposed])
        self._bases = np.array([base for base, _ in slots], np.int64)
        self._constant = np.array([offset.b for offset in offsets], np.int64)
        self._factors = np.zeros((len(slots), self._supposed), np.int64)
        for row, offset in zip(self._factors, offsets, strict=True):
            for unit, count in offset.units:
                row[dims[unit]] += count
        self._arena, self._work = (_linear_form(each, dims) for each in (plan.arena, plan.work))
        self._shapes = [[dims[dim] for dim in shape] for shape in shapes]
        self._dtypes = [_tensor_of(port).dtype.numpy for port in plan.outputs]

    def of(self, sizes: Sequence[int]) -> Layout | None:
        """The layout for these values of the size table; None for values that the plan does not serve.

        MemoryError if the arena would exceed 64 TiB, which no machine has, or an extent does not fit in 64 bits.
        """
        values = self._evaluate(sizes)
        units, supposed = values[: self._supposed], values[self._supposed :]
        if min(supposed, default=0) < 0:
            return None
        arena = _value(self._arena, units)
        if arena > _MAX_ARENA:
            raise MemoryError(f"{arena} bytes")
        if max(units, default=0) > _MAX_EXTENT:
            raise MemoryError(f"an extent of {max(units)}")
        slots = np.zeros((len(self._bases), 3), np.int64)
        slots[:, 0] = self._bases
        slots[:, 2] = self._constant + self._factors @ np.array(units, np.int64)
        outputs = tuple(
            (tuple([units[place] for place in shape]), dtype)
            for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        )
        return Layout(np.array(sizes, np.int64), slots, arena, outputs, _value(self._work, units))


_LinearForm = tuple[int, list[tuple[int, int]]]


def _linear_form(offset: Affine, places: dict[Dim, int]) -> _LinearForm:
    return offset.b, [(places[unit], count) for unit, count in offset.units]


def _value(offset: _LinearForm, units: Sequence[int]) -> int:
    constant, parts = offset
    return constant + sum(units[place] * count for place, count in parts)


def _tensor_of(port: Port) -> TensorType:
    if not isinstance(port.type, TensorType):
        raise TypeError(f"output '{port.name}' is {port.type}, expected a tensor")
    return port.type


def _shape_of(port: Port) -> tuple[Dim, ...]:
    shape = _tensor_of(port).shape
    if shape is None:
        raise TypeError(f"output '{port.name}' has no rank")
    return shape
