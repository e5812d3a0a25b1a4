"""Products with weights of few bits by dot products of bytes: rows of A become integers of 8 or 16 bits.

Each row of A is rounded to integers, with a scale for some adjacent elements. An integer of 16 bits is two bytes (its
pieces), each multiplied by the codes themselves: one instruction multiplies 64 bytes where it would multiply 16 floats.
Sums of integers are exact, so the only error is the rounding of A: of the largest element with the same scale at most
2^-16 with two pieces, and 1/254 with one. One piece takes half of the products, and is for nodes that permit it
(`row_bits` of `DequantizedMatMul`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from lathe.core.kernels.call import KernelCall, Request, Scratch
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.number_tables import first_of_count
from lathe.core.kernels.shared.panels import LINE_BYTES, Tile
from lathe.core.kernels.shared.words import WORD_BYTES
from lathe.core.kernels.target import Target
from lathe.core.kernels.weight_only.spec import (
    BYTE_BITS,
    WeightOnlySpec,
    codes_per_word,
    operands_of,
    weight_only,
    zero_points,
)
from lathe.core.ops.quantized.dequantized_product import group_of

_EXACT = 2  # pieces of an integer of A whose error is that of float32 sums, or nearly
# Rows and vectors of a tile that measured fast (Zen 4), by pieces and registers. Tiles of two pieces with several rows
# take the vectors one after the other.
_TILES = {(1, 16): (3, 2), (1, 32): (4, 3), (2, 16): (4, 4), (2, 32): (4, 4)}
# Rows of one task have half as many tiles with two pieces. More tiles read panels less often; 32 took as long as 16.
_BLOCK_TILES = 16
_MOST_SUM = 1 << 31
_STEP = 128  # elements of A with one scale, if sums over a block of weights could exceed 32 bits


@dataclass(frozen=True)
class WeightOnlyDotSpec(WeightOnlySpec):
    """`WeightOnlySpec` with codes that count up: the number of code c is c - zero. All codes lie in words.

    Each element of A becomes `pieces` bytes. `step` elements of a row share a scale. `is_signed`: bytes of 8-bit codes
    are their numbers, otherwise they are larger by 128.
    """

    family: ClassVar[str] = "weight_only_dot"
    generator: ClassVar[str] = "weight_only.dot_cpu"
    zero: int = 0
    step: int = 32
    pieces: int = _EXACT
    is_signed: bool = False

    @property
    def summary(self) -> str:
        kind = "" if self.step == self.block else f" in steps of {self.step}"
        return f"weight_only_dot {self.bits} bits in blocks of {self.block}, A of {BYTE_BITS * self.pieces} bits{kind}"

    @property
    def per_word(self) -> int:
        return codes_per_word(self.bits)

    @property
    def padded_depth(self) -> int:
        """Bytes of a piece of a row: the depth in whole words of codes."""
        return -(-self.depth // self.per_word) * self.per_word

    @property
    def row_bytes(self) -> int:
        """Bytes between rows in scratch: an odd number of cache lines, so that rows use different sets of a cache."""
        lines = -(-self.pieces * self.padded_depth // LINE_BYTES)
        return (lines + (lines + 1) % 2) * LINE_BYTES

    @property
    def steps(self) -> int:
        return -(-self.depth // self.step)

    @property
    def block_tiles(self) -> int:
        """Tiles of rows that a task rounds to integers, and then multiplies by all of its panels."""
        return _BLOCK_TILES // self.pieces

    @property
    def task_rows(self) -> int:
        """The most rows of a task."""
        most = self.block_tiles * self.tile.rows
        return min(self.rows, most) if isinstance(self.rows, int) else most

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Scratch operands: the rows as bytes; for each step its scale, the integer at which sums begin, its sum."""
        numbers = self.task_rows * self.steps * WORD_BYTES
        return (Scratch(self.task_rows * self.row_bytes), *[Scratch(numbers)] * (2 + self.has_offsets))


def weight_only_dot(request: Request) -> KernelCall | None:
    """Selector of the DequantizedMatMul nodes that `weight_only` covers, on CPUs that multiply bytes (AVX2 or later).

    The numbers of the codes must count up by 1; so do those of int8 codes, which need the instructions of VNNI. None
    for other nodes, and if blocks cannot be cut into steps (`_step`). Rows of A become integers of 16 bits, whose error
    is about that of float32 sums.
    """
    return _call(request, _EXACT)


def weight_only_coarse(request: Request) -> KernelCall | None:
    """As `weight_only_dot`, with rows of A as integers of 8 bits, also for int8 codes on CPUs without VNNI.

    None for nodes that do not permit such rows (attribute `row_bits` other than 8), and as `weight_only_dot`.
    """
    return _call(request, 1) if attribute(request.node, "row_bits") == BYTE_BITS else None


def finer_rows(request: Request) -> Iterator[KernelCall]:
    """Offers for nodes that permit rows of 8 bits: the kernels of `weight_only_dot` and `weight_only`.

    They do not round so coarsely, and win if they are faster. No offers for other nodes, nor of a kernel that does not
    cover the node.
    """
    if attribute(request.node, "row_bits") == BYTE_BITS:
        yield from filter(None, (weight_only_dot(request), weight_only(request)))


def _call(request: Request, pieces: int) -> KernelCall | None:
    call = weight_only(request)
    if call is None or not isinstance(call.spec, WeightOnlySpec):
        return None
    spec, target = call.spec, request.cpu
    is_signed = spec.bits == BYTE_BITS and not target.has_byte_dot
    zero = 0 if is_signed else _zero(spec)
    step = _step(spec, pieces)
    if zero is None or step is None or not target.has_small_byte_dot or (is_signed and pieces > 1):
        return None
    tile = _tile(target, spec, pieces)
    facts = {**spec.facts, "tile": tile}
    facts |= _narrowest(request)
    dot = WeightOnlyDotSpec(**facts, zero=zero, step=step, pieces=pieces, is_signed=is_signed)
    return replace(call, spec=dot, operands=operands_of(dot, request, is_signed))


def _narrowest(request: Request) -> dict[str, DType]:
    """The narrowest exact types of scales and offsets: scales of GGUF files are float16, most offsets zero points.

    They are up to a third of the bytes of weights of 4 bits.
    """
    scales, offsets = request.constant(2), request.constant(3)
    assert scales is not None, "weight_only"
    found = {"scale_dtype": _float_type(scales)}
    if offsets is not None:
        are_points = zero_points(scales, offsets) is not None
        found["offset_dtype"] = DType.INT8 if are_points else _float_type(offsets)
    return found


def _float_type(numbers: Array) -> DType:
    """float16 if it holds all of these finite float32 numbers, otherwise float32."""
    with np.errstate(over="ignore"):
        return DType.FLOAT16 if np.array_equal(numbers.astype(np.float16), numbers) else DType.FLOAT32


def _tile(target: Target, spec: WeightOnlySpec, pieces: int) -> Tile:
    rows, vectors = _TILES[pieces, target.registers]
    return Tile(rows, min(vectors, -(-spec.columns // spec.tile.lanes)), spec.tile.lanes)


def _zero(spec: WeightOnlySpec) -> int | None:
    """The code whose number is 0, in codes from 0 on; None if numbers do not count up by 1."""
    if not spec.numbers:
        return 1 << (BYTE_BITS - 1)
    first = first_of_count(spec.numbers)
    return -first if first is not None else None


def _step(spec: WeightOnlySpec, pieces: int) -> int | None:
    """Elements of A with one scale.

    With one piece, see `group_of`. With two, a block of weights, or 128 of its elements if its sums could exceed 32
    bits. None if there are several blocks, and a block does not hold whole words of codes, or should be cut but is no
    multiple of 128.
    """
    if spec.blocks > 1 and spec.block % codes_per_word(spec.bits):
        return None
    step = group_of(spec.block, spec.depth) if pieces == 1 else spec.block
    if step * ((1 << spec.bits) - 1) << (BYTE_BITS * pieces) < _MOST_SUM:
        return step
    return _STEP if spec.blocks == 1 or spec.block % _STEP == 0 else None
