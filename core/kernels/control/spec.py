"""Control flow as kernels: one native function runs the tape of a body as often as the node requires.

A body is planned like a graph of its own (`lathe.core.plan.control`); the classes here describe that plan for the code
generator. The function calls the kernels of the body one after the other, on one thread. Its own memory is one scratch
operand:

    counter line | flags | operands of one call | two buffers for each carried value | the body's arena
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from lathe.core.ir.types import Dim
from lathe.core.kernels.call import KernelSpec

LINE = 64  # bytes of the counter line, and the alignment of each part of the scratch
ITERATION, GOING, TRUE = LINE, LINE + 8, LINE + 9  # offsets: int64; bool that the body writes; bool that is true
TABLE = 2 * LINE  # offset of the operands of one call


@dataclass(frozen=True, slots=True)
class Place:
    """An address inside a body: an index into the bases of its tape, and an offset in bytes."""

    base: int
    offset: Dim


@dataclass(frozen=True, slots=True)
class TapeCall:
    """One kernel call on the tape of a body."""

    symbol: str
    operands: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class TapeMove:
    """A copy of `nbytes` bytes after the calls of a body (of an If, Loop or Scan).

    It is for a result of the body that lies elsewhere than the node needs it.
    """

    source: Place
    target: Place
    nbytes: Dim


@dataclass(frozen=True, slots=True)
class Tape:
    """A planned body. `bases` are the addresses of its arena, weights, inputs and outputs, in this order."""

    calls: tuple[TapeCall, ...]
    moves: tuple[TapeMove, ...]
    bases: tuple[Base, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of the node, the same in all iterations."""

    index: int


@dataclass(frozen=True, slots=True)
class Own:
    """Memory of the function itself, at `offset` bytes in its scratch."""

    offset: Dim


@dataclass(frozen=True, slots=True)
class Slice:
    """Row i of an operand in iteration i; if `backward`, row i counted from its end."""

    index: int
    nbytes: Dim
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Carried:
    """The memory of a loop's carried value `index`: of its value before the iteration, or after it if `next`."""

    index: int
    next: bool = False


Base: TypeAlias = Operand | Own | Slice | Carried


@dataclass(frozen=True, slots=True)
class CarriedValue:
    """The memory of a carried value: operands for its initial and final value, and two buffers in the scratch."""

    initial: int
    final: int
    nbytes: Dim
    buffers: tuple[Dim, Dim]


@dataclass(frozen=True)
class RepeatSpec(KernelSpec):
    """Loop and Scan: runs a tape while the flag at `GOING` is true, up to a limit.

    `trips` is the number of iterations, if it is known. `limit` and `condition` are indices of scalar operands: the
    most iterations (int64), and whether to begin at all (bool).
    """

    family: ClassVar[str] = "control"
    generator: ClassVar[str] = "control.cpu"
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
    """If: runs the tape `then` if operand 0, a bool, is true, otherwise the tape `other`."""

    family: ClassVar[str] = "control"
    generator: ClassVar[str] = "control.cpu"
    then: Tape
    other: Tape
    scratch: int

    @property
    def summary(self) -> str:
        return f"native branch({len(self.then.calls)} or {len(self.other.calls)} kernels, one thread)"
