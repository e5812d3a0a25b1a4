"""Products with weights of few bits by dot products of bytes: rows of A become integers of 8 or 16 bits.

Each row of A is rounded to integers, with a scale for some adjacent elements. An integer of 16 bits is two bytes, each
multiplied by the codes themselves: one instruction multiplies 64 bytes where it would multiply 16 floats. Sums of
integers are exact, so the only error is the rounding of A: at most 2^-16 of the largest element with the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lathe.core.kernels.call import KernelCall, Request, Scratch
from lathe.core.kernels.shared.number_tables import first_of_count
from lathe.core.kernels.shared.panels import BLOCK_TILES, Tile
from lathe.core.kernels.shared.words import WORD_BYTES
from lathe.core.kernels.weight_only.spec import BYTE_BITS, WeightOnlySpec, codes_per_word, operands_of, weight_only

PIECES = 2  # bytes of an integer of A
_ROWS, _VECTORS = 4, 4  # of a tile; four rows take the vectors in pairs
_MOST_SUM = 1 << 31
_LARGEST = 1 << 15  # of an integer of A
_STEP = 128  # elements of A with one scale, if sums over a block of weights could exceed 32 bits


@dataclass(frozen=True)
class WeightOnlyDotSpec(WeightOnlySpec):
    """`WeightOnlySpec` with codes that count up: the number of code c is c - zero. All codes lie in words.

    Each element of A becomes two bytes. `step` elements of a row share a scale.
    """

    family: ClassVar[str] = "weight_only_dot"
    generator: ClassVar[str] = "weight_only.dot_cpu"
    zero: int = 0
    step: int = 32

    @property
    def summary(self) -> str:
        kind = "" if self.step == self.block else f" in steps of {self.step}"
        return f"weight_only_dot {self.bits} bits in blocks of {self.block}, A of {BYTE_BITS * PIECES} bits{kind}"

    @property
    def per_word(self) -> int:
        return codes_per_word(self.bits)

    @property
    def padded_depth(self) -> int:
        """Bytes of a piece of a row: the depth in whole words of codes."""
        return -(-self.depth // self.per_word) * self.per_word

    @property
    def steps(self) -> int:
        return -(-self.depth // self.step)

    @property
    def task_rows(self) -> int:
        """The most rows that a task rounds to integers before it multiplies them."""
        most = BLOCK_TILES * self.tile.rows
        return min(self.rows, most) if isinstance(self.rows, int) else most

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Scratch operands: the rows as bytes; for each step its scale, the integer at which sums begin, its sum."""
        numbers = self.task_rows * self.steps * WORD_BYTES
        return (Scratch(self.task_rows * PIECES * self.padded_depth), *[Scratch(numbers)] * (2 + self.has_offsets))


def weight_only_dot(request: Request) -> KernelCall | None:
    """Selector of products that `weight_only` covers, with codes that count up, on CPUs that multiply such bytes.

    None also if blocks cannot be cut into steps (`_step`).
    """
    call = weight_only(request)
    if call is None or not isinstance(call.spec, WeightOnlySpec):
        return None
    spec, target = call.spec, request.cpu
    zero = _zero(spec)
    lanes = spec.tile.lanes
    has_dot = target.has_byte_dot if spec.bits == BYTE_BITS else target.has_small_byte_dot
    step = _step(spec)
    if zero is None or step is None or not has_dot:
        return None
    vectors = min(_VECTORS, -(-spec.columns // lanes))
    tile = Tile(_ROWS, vectors, lanes)
    dot = WeightOnlyDotSpec(**{**spec.facts, "tile": tile}, zero=zero, step=step)
    return replace(call, spec=dot, operands=operands_of(dot, request.node))


def _zero(spec: WeightOnlySpec) -> int | None:
    """The code whose number is 0, in codes from 0 on; None if numbers do not count up by 1."""
    if not spec.numbers:
        return 1 << (BYTE_BITS - 1)
    first = first_of_count(spec.numbers)
    return -first if first is not None else None


def _step(spec: WeightOnlySpec) -> int | None:
    """Elements of A with one scale: a block of weights, or 128 of its elements if its sums could exceed 32 bits.

    None if there are several blocks, and a block does not hold whole words of codes, or is cut but no multiple of 128.
    """
    if spec.blocks > 1 and spec.block % codes_per_word(spec.bits):
        return None
    if spec.block * ((1 << spec.bits) - 1) * 2 * _LARGEST < _MOST_SUM:
        return spec.block
    return _STEP if spec.blocks == 1 or spec.block % _STEP == 0 else None
