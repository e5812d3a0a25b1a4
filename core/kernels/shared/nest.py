"""Loop nests over strided operands, the iteration space of kernels that map, reduce or move elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lathe.core.ir.dim import Atom, FloorDiv, Maximum, SymDim
from lathe.core.ir.dims import size_index
from lathe.core.ir.graph import Node
from lathe.core.ir.types import Dim, DType, TensorType, ValueType

BATCH = "n"


@dataclass(frozen=True, slots=True)
class Nest:
    """Perfectly nested loops, outermost first.

    Loop k has `extents[k]` iterations; each moves operand i by `strides[i][k]` elements (0: operand i does not move).
    """

    extents: tuple[Dim, ...]
    strides: tuple[tuple[Dim, ...], ...]

    @property
    def rank(self) -> int:
        return len(self.extents)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """All extents and strides in one tuple: the extents, then the strides of each operand."""
        return tuple(dim for dims in (self.extents, *self.strides) for dim in dims)

    def loop(self, k: int) -> tuple[Dim, ...]:
        """The strides of all operands in loop `k`."""
        return tuple(strides[k] for strides in self.strides)

    def take(self, loops: Iterable[int]) -> Nest:
        """The nest of the given loops only, in the given order."""
        order = list(loops)
        return Nest(
            tuple(self.extents[k] for k in order),
            tuple(tuple(strides[k] for k in order) for strides in self.strides),
        )

    def collapsed(self) -> Nest:
        """A nest that visits the same elements in the same order with as few loops as possible.

        Loops of one iteration are dropped. Adjacent loops are merged where each operand goes through both with one
        stride. At least one loop remains.
        """
        nontrivial = [k for k in range(self.rank) if self.extents[k] != 1]
        loops: list[tuple[Dim, tuple[Dim, ...]]] = []
        for k in nontrivial:
            extent, steps = self.extents[k], self.loop(k)
            if loops and loops[-1][1] == tuple(step * extent for step in steps):
                loops[-1] = (loops[-1][0] * extent, steps)
            else:
                loops.append((extent, steps))
        if not loops:
            loops = [(1, tuple(0 for _ in self.strides))]
        return Nest(
            tuple(extent for extent, _ in loops),
            tuple(tuple(steps[i] for _, steps in loops) for i in range(len(self.strides))),
        )


def row_major(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """The strides, in elements, of a dense array of `shape` whose last axis varies fastest."""
    strides: list[Dim] = []
    step: Dim = 1
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))


def broadcast_strides(
    shape: Sequence[Dim], to: Sequence[Dim], strides: tuple[Dim, ...] | None = None
) -> tuple[Dim, ...]:
    """The strides of an array of `shape` when it is broadcast to the shape `to`.

    They are 0 along axes that the array lacks and along its axes of extent 1. `strides` are those of the array itself;
    by default they are row-major.
    """
    dense = (0,) * (len(to) - len(shape)) + (row_major(shape) if strides is None else strides)
    padded = (1,) * (len(to) - len(shape)) + tuple(shape)
    return tuple(0 if extent == 1 else stride for extent, stride in zip(padded, dense, strict=True))


def is_plannable(dim: Dim) -> bool:
    """Whether generated code can compute `dim` at run time.

    It can for polynomials in the batch symbol, in entries of the table of sizes, in quotients of such entries by
    positive numbers, and in maxima of them.
    """
    if not isinstance(dim, SymDim):
        return True
    return all(_can_compute(atom) for monomial, _ in dim.terms for atom in monomial)


def _can_compute(atom: Atom) -> bool:
    if isinstance(atom, FloorDiv):
        by_number = isinstance(atom.denominator, int) and atom.denominator > 0
        return by_number and BATCH not in _names(atom.numerator) and is_plannable(atom.numerator)
    if isinstance(atom, Maximum):
        return all(BATCH not in _names(side) and is_plannable(side) for side in atom.sides)
    return atom == BATCH or size_index(atom) is not None


def _names(dim: Dim) -> frozenset[str]:
    return dim.names if isinstance(dim, SymDim) else frozenset()


def is_fixed_size(dtype: DType) -> bool:
    """Whether elements have 1, 2, 4 or 8 bytes, so that a register holds one."""
    return dtype is not DType.STRING and dtype.itemsize in (1, 2, 4, 8)


def has_plannable_types(node: Node) -> bool:
    """Whether all inputs and outputs are tensors whose dimensions generated code can compute."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return all(_is_plannable_type(value.type) for value in values)


def traffic(node: Node) -> Dim:
    """Minimum memory traffic of a node in bytes: each input is read once, each output is written once."""
    total: Dim = 0
    for value in dict.fromkeys((*node.inputs, *node.outputs)):
        if value is not None:
            total = total + value.tensor.nbytes
    return total


def _is_plannable_type(type_: ValueType) -> bool:
    return isinstance(type_, TensorType) and type_.shape is not None and all(map(is_plannable, type_.shape))
