"""Which of two dimensions is the lesser, where that depends on their symbols.

Models clamp what they compute of shapes. A number of at most 1 is a lower bound there, which extents keep: the end of
`x[:, :1]`, the 0 of Max(n - 5, 0). A greater number is an upper bound, such as the number of positions that a model
knows. Code for all sizes may rely on that only as long as what it supposes holds: see `core.ops.supposed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.ir.dim import Dim, is_never_negative

_LARGEST_LOWER_BOUND = 1


@dataclass(frozen=True, slots=True)
class Bound:
    """The lesser or the greater of two dimensions, and the dimensions that must not be negative for that."""

    dim: Dim
    supposed: tuple[Dim, ...] = ()

    def after(self, before: Bound) -> Bound:
        """The same, which supposes what was supposed before, too."""
        return Bound(self.dim, (*before.supposed, *self.supposed))


def lesser(bound: Bound, other: Dim) -> Bound:
    """The lesser of two dimensions. TypeError where neither is a number and neither is the lesser for every value of
    their symbols."""
    return _lesser(bound.dim, other).after(bound)


def greater(bound: Bound, other: Dim) -> Bound:
    """The greater of two dimensions. TypeError where `lesser` has one, and for a number of more than 1: no model says
    what that bounds."""
    least = _lesser(bound.dim, other)
    if any(isinstance(dim, int) and dim > _LARGEST_LOWER_BOUND for dim in (bound.dim, other)) and least.supposed:
        raise TypeError(f"which is the greater of {bound.dim} and {other} depends on their symbols")
    return Bound(bound.dim + other - least.dim, least.supposed).after(bound)


def _lesser(a: Dim, b: Dim) -> Bound:
    if is_never_negative(b - a):
        return Bound(a)
    if is_never_negative(a - b):
        return Bound(b)
    if isinstance(a, int):
        a, b = b, a
    if not isinstance(b, int):
        raise TypeError(f"which is the lesser of {a} and {b} depends on their symbols")
    return Bound(b, (a - b,)) if b <= _LARGEST_LOWER_BOUND else Bound(a, (b - a,))
