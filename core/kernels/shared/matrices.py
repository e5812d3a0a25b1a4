"""Strided views of the operands of matrix products as [batch..., rows, columns]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lathe.core.ir.graph import Node, Value
from lathe.core.ir.types import Dim
from lathe.core.kernels.shared.nest import row_major

Perm = tuple[int, ...]


@dataclass(frozen=True)
class Matrices:
    """An operand of a product, viewed as [batch..., rows, columns]: its shape, and its strides in elements."""

    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]

    @classmethod
    def of(cls, value: Value, perm: Perm | None, strides: tuple[Dim, ...] | None = None) -> Matrices:
        """The view of `value` with its axes in the order `perm`; None: in their own order. No data are moved.

        `strides` are those of the axes of `value` before `perm`, in elements; by default row-major.
        """
        axes, strides = perm or range(len(value.shape)), row_major(value.shape) if strides is None else strides
        return cls(tuple(value.shape[axis] for axis in axes), tuple(strides[axis] for axis in axes))

    def along(self, batch: Sequence[Dim]) -> tuple[Dim, ...]:
        """The operand's strides along the axes `batch` of the product: 0 where it is repeated (broadcast)."""
        missing = len(batch) - (len(self.shape) - 2)
        pairs = zip(self.shape[:-2], self.strides[:-2], batch[missing:], strict=True)
        return (*(0,) * missing, *(0 if extent == 1 and full != 1 else s for extent, s, full in pairs))


def perm_attribute(node: Node, name: str) -> Perm | None:
    """The permutation in attribute `name`; None if there is none."""
    perm = node.attrs.get(name)
    return tuple(int(axis) for axis in perm) if isinstance(perm, tuple | list) else None  # type: ignore[arg-type]


def to_product_axes(of_output: tuple[Dim, ...], perm: Perm | None) -> tuple[Dim, ...]:
    """Extents or strides of a node's output in the order of the product's axes [batch..., rows, columns].

    `perm` is the permutation that makes the output from the product, or None.
    """
    return of_output if perm is None else tuple(of_output[perm.index(axis)] for axis in range(len(perm)))
