"""Buffers of the arena and their lifetimes.

Values that share bytes (a view and its source, an output computed in place and its input) share one `Buffer`. A
lifetime is the closed interval of times from the first write to the last read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from lathe.core.ir.dim import Dim, evaluate, symbols
from lathe.core.ir.graph import Value

TYPICAL_SIZE = (
    32  # the value assumed for each size of dynamic-shape code in comparisons of memory and in output for people
)
ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register


Units: TypeAlias = tuple[tuple[Dim, int], ...]  # dimensions over sizes, with coefficients


@dataclass(frozen=True, slots=True)
class Affine:
    """A number of bytes or operations, `a*n + b`, for the batch size `n` of a run.

    Dynamic-shape code has no `n`: there the number is `b` plus the sum of the `units`, which are pairs of a dimension
    over sizes (`lathe.core.ir.dims`) and its factor.
    """

    a: int = 0
    b: int = 0
    units: Units = ()

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.a + other.a, self.b + other.b, _add_units(self.units, other.units))

    def times(self, number: int) -> Affine:
        return Affine(self.a * number, self.b * number, tuple((unit, number * count) for unit, count in self.units))

    def at(self, n: int) -> int:
        """The value for a batch of `n`; in dynamic-shape code, the value for typical sizes."""
        value = self.a * n + self.b
        return value + sum(count * typical_value(unit) for unit, count in self.units) if self.units else value

    def __str__(self) -> str:
        units = [f"{count}*({unit})" for unit, count in self.units]
        parts = [f"{self.a}*n" if self.a else "", *units, str(self.b) if self.b or not (self.a or units) else ""]
        return " + ".join(filter(None, parts))


def typical_value(dim: Dim) -> int:
    """The value of a dimension if each of its symbols is `TYPICAL_SIZE`; 0 if it is negative or divides by zero."""
    try:
        return max(evaluate(dim, dict.fromkeys(symbols(dim), TYPICAL_SIZE)), 0)
    except KeyError:  # a quotient by zero
        return 0


def _add_units(left: Units, right: Units) -> Units:
    if not left or not right:
        return left or right
    total = dict(left)
    for unit, count in right:
        total[unit] = total.get(unit, 0) + count
    return tuple((unit, count) for unit, count in total.items() if count)


@dataclass(eq=False, slots=True)
class Buffer:
    """Bytes in the arena that hold `values` from time `first` to time `last`, both included.

    A time is the index of a stage. Scratch memory has no values. `size` is rounded up, so that consecutive buffers are
    aligned for every `n`.
    """

    size: Affine
    first: int
    last: int
    values: list[Value] = field(default_factory=list)
    offset: Affine | None = None  # set by `arena.place`

    def overlaps(self, other: Buffer) -> bool:
        """Whether the lifetimes overlap: both buffers are live at some time."""
        return self.first <= other.last and other.first <= self.last


def align_size(size: Affine) -> Affine:
    """`size` rounded up to multiples of 64 bytes, and so that the result is either constant or proportional to n.

    If both a and b are positive, b is added to a: that is enough for every n >= 1, and each buffer can be placed by a
    single number. A size with units (one unit and no constant, as from `exact_affine`) stays proportional to its unit.
    """
    if size.units:  # one unit: the size comes from `exact_affine`
        return Affine(units=tuple((unit, _round_up(count)) for unit, count in size.units))
    if size.a:
        return Affine(a=_round_up(size.a + size.b))
    return Affine(b=_round_up(size.b))


def lower_bound(buffers: list[Buffer], n: int) -> int:
    """The most bytes of `buffers` that are live at one time, for a batch of `n`: no arena can be smaller."""
    steps = {buffer.first for buffer in buffers}
    return max((sum(b.size.at(n) for b in buffers if b.first <= step <= b.last) for step in steps), default=0)


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
