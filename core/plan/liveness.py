"""Buffers and their lifetimes: which bytes must exist between which steps.

Values that share bytes (a view and what it looks at, an output computed in place) share one `Buffer`. A lifetime is the
closed interval of steps from the first write to the last read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.ir.graph import Value

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register


@dataclass(frozen=True, slots=True)
class Affine:
    """`a*n + b`, for the batch size `n` of a run."""

    a: int = 0
    b: int = 0

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.a + other.a, self.b + other.b)

    def at(self, n: int) -> int:
        return self.a * n + self.b

    def __str__(self) -> str:
        parts = [f"{self.a}*n" if self.a else "", str(self.b) if self.b or not self.a else ""]
        return " + ".join(filter(None, parts))


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
    if size.a:
        return Affine(a=_round_up(size.a + size.b))
    return Affine(b=_round_up(size.b))


def lower_bound(buffers: list[Buffer], n: int) -> int:
    """The most bytes alive at one step: no arrangement needs less."""
    steps = {buffer.first for buffer in buffers}
    return max((sum(b.size.at(n) for b in buffers if b.first <= step <= b.last) for step in steps), default=0)


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
