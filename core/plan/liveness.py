"""Buffers and their lifetimes: which bytes must exist between which steps.

Values that share bytes (a view and what it looks at, an output computed in place) share one `Buffer`. A lifetime is the
closed interval of steps from the first write to the last read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from core.ir.dim import Dim, evaluate, symbols
from core.ir.graph import Value

TYPICAL = 32  # what a size is taken for where a plan weighs memory, or is shown to people
ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register


Units: TypeAlias = tuple[tuple[Dim, int], ...]  # multiples of dimensions over sizes


@dataclass(frozen=True, slots=True)
class Affine:
    """`a*n + b`, for the batch size `n` of a run. In code for any sizes, which has no `n`: `b`, and multiples of
    dimensions over sizes (`core.ir.dims`)."""

    a: int = 0
    b: int = 0
    units: Units = ()

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.a + other.a, self.b + other.b, _summed(self.units, other.units))

    def times(self, number: int) -> Affine:
        return Affine(self.a * number, self.b * number, tuple((unit, number * count) for unit, count in self.units))

    def at(self, n: int) -> int:
        """The value for a batch of `n`. Of code for any sizes, that for sizes which are typical."""
        value = self.a * n + self.b
        return value + sum(count * typical(unit) for unit, count in self.units) if self.units else value

    def __str__(self) -> str:
        units = [f"{count}*({unit})" for unit, count in self.units]
        parts = [f"{self.a}*n" if self.a else "", *units, str(self.b) if self.b or not (self.a or units) else ""]
        return " + ".join(filter(None, parts))


def typical(dim: Dim) -> int:
    """The value of a dimension over sizes where each size is the typical one; 0 for one that has none there."""
    try:
        return max(evaluate(dim, dict.fromkeys(symbols(dim), TYPICAL)), 0)
    except KeyError:  # a quotient by zero
        return 0


def _summed(some: Units, others: Units) -> Units:
    if not some or not others:
        return some or others
    total = dict(some)
    for unit, count in others:
        total[unit] = total.get(unit, 0) + count
    return tuple((unit, count) for unit, count in total.items() if count)


@dataclass(eq=False, slots=True)
class Buffer:
    """Bytes in the arena. `size` is rounded so that buffers laid end to end stay aligned for every `n`."""

    size: Affine
    first: int
    last: int
    values: list[Value] = field(default_factory=list)
    offset: Affine | None = None  # filled by the arena

    def overlaps(self, other: Buffer) -> bool:
        """Whether both must exist at the same step."""
        return self.first <= other.last and other.first <= self.last


def aligned(size: Affine) -> Affine:
    """`size` rounded up, per row and for the constant part, to the alignment.

    A size with both parts counts its constant once per row, which holds it for every n >= 1; so a buffer is either
    constant or proportional to n, and both kinds can be placed by one number.
    """
    if size.units:  # the buffer of an `exact_affine` size is a multiple of one unit
        return Affine(units=tuple((unit, _round_up(count)) for unit, count in size.units))
    if size.a:
        return Affine(a=_round_up(size.a + size.b))
    return Affine(b=_round_up(size.b))


def lower_bound(buffers: list[Buffer], n: int) -> int:
    """The most bytes alive at one step: no arrangement needs less."""
    steps = {buffer.first for buffer in buffers}
    return max((sum(b.size.at(n) for b in buffers if b.first <= step <= b.last) for step in steps), default=0)


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
