"""Control flow as kernels: the tape of a body runs inside one native function, as often as the node asks for.

A body is planned like a graph of its own (`core.plan.control`); here is what its function needs to know of that. The
function calls the kernels of the body one after the other, on one thread. Memory of its own is one scratch operand:

    counter line | flags | operands of one call | two buffers for each carried value | the body's arena
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from core.ir.types import Dim
from core.kernels.catalog.base import KernelSpec

LINE = 64  # bytes: the counter's, and what every part of the scratch is aligned to
ITERATION, GOING, TRUE = LINE, LINE + 8, LINE + 9  # int64; bool that the body writes; bool that is always true
TABLE = 2 * LINE  # the operands of one call


@dataclass(frozen=True, slots=True)
class Place:
    """An address inside a body: a number of its bases and an offset in bytes."""

    base: int
    offset: Dim


@dataclass(frozen=True, slots=True)
class Called:
    """One kernel of a body's tape."""

    symbol: str
    operands: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that the body leaves somewhere else than where they have to end up."""

    source: Place
    target: Place
    nbytes: Dim


@dataclass(frozen=True, slots=True)
class Tape:
    """A planned body. `bases` are where its bases lie, in their order: arena, weights, inputs, outputs."""

    calls: tuple[Called, ...]
    moves: tuple[Moved, ...]
    bases: tuple[Base, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of the node, the same for every iteration."""

    index: int


@dataclass(frozen=True, slots=True)
class Own:
    """Memory of the function itself, `offset` bytes into its scratch."""

    offset: Dim


@dataclass(frozen=True, slots=True)
class Slice:
    """Row `i` of an operand in iteration i, or, `backward`, as many rows from its end."""

    index: int
    nbytes: Dim
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Carried:
    """A carried value as the iteration finds it, or, `next`, as it leaves it."""

    index: int
    next: bool = False


Base: TypeAlias = Operand | Own | Slice | Carried


@dataclass(frozen=True, slots=True)
class CarriedValue:
    """Where a carried value lives: operands for the first and the last value, offsets of two buffers in the scratch."""

    initial: int
    final: int
    nbytes: Dim
    buffers: tuple[Dim, Dim]


@dataclass(frozen=True)
class RepeatSpec(KernelSpec):
    """Loop and Scan: runs a tape while the flag at `GOING` holds, at most as often as the limits say.

    `trips` is the number of iterations where it is known; `limit` and `condition` are operands of rank 0: the greatest
    number, int64, and whether to begin at all, bool.
    """

    family: ClassVar[str] = "control"
    tape: Tape
    scratch: int  # operand
    trips: Dim | None
    limit: int | None
    condition: int | None
    carried: tuple[CarriedValue, ...]

    @property
    def summary(self) -> str:
        return f"native loop({len(self.tape.calls)} kernels, one thread)"


@dataclass(frozen=True)
class BranchSpec(KernelSpec):
    """If: one of two tapes."""

    family: ClassVar[str] = "control"
    then: Tape
    other: Tape
    scratch: int

    @property
    def summary(self) -> str:
        return f"native branch({len(self.then.calls)} or {len(self.other.calls)} kernels, one thread)"
