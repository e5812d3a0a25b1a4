"""Matrix products with weights of 1, 2, 4 or 8 bits: `DequantizedMatMul` of float32 rows.

A product of few rows takes as long as its weights take from memory. With 4 bits per weight that is an eighth of the
time of float32. The kernel turns codes into float32 in registers: never more than a panel of weights is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, Scratch
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, traffic
from lathe.core.kernels.shared.panels import Tile, choose_tile, pack_panels
from lathe.core.kernels.shared.words import WORD_BYTES

_FIRST_EXTRA = 4  # input of the first extra of the epilogue
BYTE_BITS = 8
# From this number of rows on, a panel is first written to memory as float32: then its codes are read once for all rows.
STAGED_ROWS = 12


@dataclass(frozen=True)
class WeightOnlySpec(KernelSpec):
    """Y[i, j] = epilogue(sum over k of A[i, k] * W[k, j], extras[i, j]), see `DequantizedMatMul`.

    The loops of `nest` are the batch axes and then the rows i; its operands are A, the extras and Y. Strides count
    elements. Codes lie in panels of `tile.columns` columns (`lathe.core.kernels.shared.panels`): int8, or words of
    codes (`pack_codes`). Scales and offsets lie in panels too, in their narrowest exact types; offsets of int8 are zero
    points: an offset is minus the zero point times the scale.
    """

    family: ClassVar[str] = "weight_only"
    generator: ClassVar[str] = "weight_only.cpu"
    nest: Nest
    depth: int
    columns: int
    bits: int
    block: int  # rows of the weight that share a scale
    numbers: tuple[float, ...]  # of each code; empty for int8
    has_offsets: bool
    extra_steps: tuple[int, ...]  # stride of each extra along j
    y_step: int  # stride of Y along j
    epilogue: Graph | None
    extra_dtypes: tuple[DType, ...]
    dtype: DType  # of Y
    tile: Tile  # of float32 products of many rows
    scale_dtype: DType
    offset_dtype: DType

    @property
    def summary(self) -> str:
        return f"weight_only {self.bits} bits in blocks of {self.block}, {self.tile}"

    @property
    def rows(self) -> Dim:
        return self.nest.extents[-1]

    @property
    def per_word(self) -> int:
        """Rows of the weight in a word of codes; 1 for int8."""
        return 1 if self.bits == BYTE_BITS else codes_per_word(self.bits)

    @property
    def blocks(self) -> int:
        """Blocks of rows along the depth, each with its scales."""
        return -(-self.depth // self.block)

    @property
    def is_never_staged(self) -> bool:
        return isinstance(self.rows, int) and self.rows < STAGED_ROWS

    @property
    def is_always_staged(self) -> bool:
        return isinstance(self.rows, int) and self.rows >= STAGED_ROWS

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Scratch operands: a panel of weights as float32, unless there are always few rows; sums of A's blocks."""
        panel = 0 if self.is_never_staged else self.depth * self.tile.columns * WORD_BYTES
        sums = self.blocks * WORD_BYTES if self.has_offsets and not self.is_always_staged else 0
        return tuple(Scratch(nbytes) for nbytes in (panel, sums) if nbytes)


def weight_only(request: Request) -> KernelCall | None:
    """Selector of DequantizedMatMul with constant codes, scales and offsets, whose A is contiguous along the depth.

    Codes are int8, or indices of a table of 2, 4 or 16 numbers. None for other nodes, if code cannot compute a
    dimension, if the epilogue has operators that are not elementwise, if the stride of Y along the columns is not a
    number, and if a word of 4 bytes would hold codes of two blocks, which have different scales.
    """
    node, codes = request.node, request.constant(1)
    scales, offsets = request.constant(2), request.constant(3)
    a, y, epilogue = node.required_input(0), node.output, node.attrs.get("epilogue")
    if codes is None or scales is None or (node.input(3) is not None and offsets is None):
        return None
    if not has_plannable_types(node) or not (epilogue is None or isinstance(epilogue, Graph)):
        return None
    if epilogue is not None and not bodies.is_scalar(epilogue):
        return None
    a_strides, y_strides = request.strides_of(a), request.strides_of(y)
    numbers, block = tuple(map(float, attribute(node, "numbers"))), node.attrs["block"]
    bits = _bits(numbers)
    if a_strides[-1] != 1 or not isinstance(y_strides[-1], int) or not isinstance(block, int) or bits is None:
        return None
    if codes.shape[0] > block and block % (1 if bits == BYTE_BITS else codes_per_word(bits)):
        return None  # a word of codes would have two scales
    extras = {i: request.walk(value, y.shape) for i, value in _extras_of(node).items()}
    nest = Nest(y.shape[:-1], (a_strides[:-1], *(strides[:-1] for strides in extras.values()), y_strides[:-1]))
    spec = WeightOnlySpec(
        nest=nest.collapsed(),
        depth=codes.shape[0],
        columns=codes.shape[1],
        bits=bits,
        block=min(block, codes.shape[0]),
        numbers=numbers,
        has_offsets=offsets is not None,
        extra_steps=tuple(int(strides[-1] != 0) for strides in extras.values()),
        y_step=y_strides[-1],
        epilogue=bodies.canonical(epilogue, {}) if epilogue is not None else None,
        extra_dtypes=tuple(value.dtype for value in _extras_of(node).values()),
        dtype=y.dtype,
        tile=choose_tile(request.cpu, product(y.shape[:-1]), codes.shape[1], request.rank),
        scale_dtype=DType.FLOAT32,
        offset_dtype=DType.FLOAT32,
    )
    alike = [i for i, value in _extras_of(node).items() if value.dtype is y.dtype]
    replaceable = [i for i in alike if extras[i] == y_strides]
    flops = product(y.shape) * (2 * spec.depth)
    return KernelCall(spec, operands_of(spec, request), tuple(replaceable), flops=flops, bytes=_traffic(node, spec))


def operands_of(spec: WeightOnlySpec, request: Request, is_signed: bool = False) -> tuple[Operand, ...]:
    """The operands of a kernel in their order; `is_signed` as for `pack_codes`."""
    tile, node = spec.tile, request.node
    layout = f"panels{tile.columns}x{tile.lanes}"
    codes = Packed(1, layout, partial(pack_panels, tile=tile))
    if spec.per_word > 1:
        key = f"{layout} of {spec.bits} bits{', signed' if is_signed else ''}"
        codes = Packed(1, key, partial(pack_codes, bits=spec.bits, tile=tile, is_signed=is_signed))
    rest = [_packed_floats(2, spec.scale_dtype, layout, tile)]
    scales = request.constant(2)
    if scales is not None and spec.has_offsets and spec.offset_dtype is DType.INT8:
        zeros = partial(_pack_zero_points, scales=scales, tile=tile)
        rest.append(Packed(3, f"{layout} as zero points", zeros))
    elif spec.has_offsets:
        rest.append(_packed_floats(3, spec.offset_dtype, layout, tile))
    return (In(0), codes, *rest, *(In(i) for i in _extras_of(node)), Out(0), *spec.scratch)


def _packed_floats(index: int, dtype: DType, layout: str, tile: Tile) -> Packed:
    if dtype is DType.FLOAT32:
        return Packed(index, layout, partial(pack_panels, tile=tile))
    return Packed(index, f"{layout} of {dtype}", partial(_pack_narrow, dtype=dtype, tile=tile))


def _pack_narrow(numbers: Array, dtype: DType, tile: Tile) -> Array:
    return pack_panels(numbers.astype(dtype.numpy), tile)


def zero_points(scales: Array, offsets: Array) -> Array | None:
    """int8 numbers z such that each offset is exactly -z * scale, as float32; None if there are none."""
    with np.errstate(invalid="ignore", divide="ignore"):
        points = np.where(scales == 0, np.float32(0), np.rint(-offsets / scales))
    is_small = bool((np.abs(points + 0.5) <= 127.5).all())
    return points.astype(np.int8) if is_small and np.array_equal(-points * scales, offsets) else None


def _pack_zero_points(offsets: Array, scales: Array, tile: Tile) -> Array:
    points = zero_points(scales, offsets)
    assert points is not None, "the selector chose zero points"
    return pack_panels(points, tile)


def codes_per_word(bits: int) -> int:
    return WORD_BYTES * BYTE_BITS // bits


def pack_codes(codes: Array, bits: int, tile: Tile, is_signed: bool = False) -> Array:
    """Codes [K, N] in panels of int32 words, each of 32 / `bits` codes along K (see `shift_of`).

    int8 becomes uint8: larger by 128, or with `is_signed` the same bits.
    """
    if codes.dtype == np.int8:
        codes = codes.view(np.uint8) if is_signed else codes.astype(np.int32) + (1 << (BYTE_BITS - 1))
    per_word = codes_per_word(bits)
    depth, columns = codes.shape
    padded = np.zeros((-(-depth // per_word) * per_word, columns), np.uint32)
    padded[:depth] = codes
    shifts = np.array([shift_of(i, bits) for i in range(per_word)], np.uint32)[None, :, None]
    words = np.bitwise_or.reduce(padded.reshape(-1, per_word, columns) << shifts, axis=1)
    return pack_panels(words.view(np.int32), tile)


def shift_of(place: int, bits: int) -> int:
    """The first bit of code number `place` of a word.

    Four codes whose rows are adjacent lie at the same place of the four bytes: a mask makes them a word of bytes.
    """
    return BYTE_BITS * (place % WORD_BYTES) + bits * (place // WORD_BYTES)


def _bits(numbers: tuple[float, ...]) -> int | None:
    """The width of a code: 8 for int8, 1, 2 or 4 for a table of numbers; None for a table of another size."""
    return {0: BYTE_BITS, 2: 1, 4: 2, 16: 4}.get(len(numbers))


def _extras_of(node: Node) -> dict[int, Value]:
    """The extra inputs of the epilogue, by index."""
    return {i: value for i, value in enumerate(node.inputs) if i >= _FIRST_EXTRA and value is not None}


def _traffic(node: Node, spec: WeightOnlySpec) -> Dim:
    """The least memory traffic in bytes: that of all operands, with codes of `bits` bits instead of whole bytes."""
    return traffic(node) - spec.depth * spec.columns * (BYTE_BITS - spec.bits) // BYTE_BITS
