"""Tiling of GPU kernels that reduce or normalise along axes: a program handles a few lines of elements."""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.nest import Nest

NUMBERS = frozenset({
    DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.INT64, DType.INT32, DType.INT16, DType.INT8,
    DType.UINT64, DType.UINT32, DType.UINT16, DType.UINT8,
})  # fmt: skip
_WHOLE = 8192  # the longest line that a program holds in registers
_BLOCK = 2048  # elements per program
_BESIDE = 32  # lines per program, where lines are adjacent in memory
_ACROSS = 64  # elements of each of those lines at a time
_PER_WARP = 512  # elements per warp


@dataclass(frozen=True, slots=True)
class LineTile:
    """A program handles `rows` lines, `columns` elements of each at a time. Both are powers of two."""

    rows: int
    columns: int
    warps: int

    def __str__(self) -> str:
        return f"{self.rows} lines by {self.columns}"


@dataclass(frozen=True, slots=True)
class Lines:
    """A set of lines: one for each point of the nest `lines`, its elements walked by the nest `along`.

    Both nests have the same operands.
    """

    lines: Nest
    along: Nest
    tile: LineTile

    @property
    def count(self) -> Dim:
        """The number of lines."""
        return product(self.lines.extents)

    @property
    def length(self) -> Dim:
        """The number of elements per line."""
        return product(self.along.extents)

    @property
    def whole(self) -> bool:
        """Whether a program holds complete lines in registers."""
        return isinstance(self.length, int) and self.length <= self.tile.columns

    @property
    def programs(self) -> Dim:
        """The number of programs that cover all lines."""
        return blocks(self.count, self.tile.rows)


def middle_axis(outer: Dim, length: Dim, inner: Dim) -> tuple[Nest, Nest]:
    """The nests of `Lines` for the middle axis of one dense operand [outer, length, inner]: over lines, then along."""
    lines = Nest((outer, inner), ((length * inner, 1),)).collapsed()
    return lines, Nest((length,), ((inner,),))


def covering(lines: Nest, along: Nest) -> tuple[Lines, ...]:
    """The lines with each candidate tile; the tile expected to be fastest for the first operand comes first.

    Adjacent threads should read adjacent elements: those of one line, or of lines that lie side by side.
    """
    beside = lines.strides[0][-1] == 1 and along.strides[0][-1] != 1
    length = product(along.extents)
    wide = _power(length) if isinstance(length, int) else _WHOLE
    if beside:
        shapes = [(_BESIDE, min(wide, _ACROSS)), (2 * _BESIDE, min(wide, _ACROSS // 2)), (_BESIDE, min(wide, 16))]
    else:
        columns = wide if isinstance(length, int) and length <= _WHOLE else _BLOCK
        rows = max(_BLOCK // columns, 1)
        shapes = [(rows, columns), (max(rows // 4, 1), columns), (min(rows * 2, 32), columns)]
    tiles = dict.fromkeys(LineTile(r, c, _warps(r * c)) for r, c in shapes)
    return tuple(Lines(lines, along, tile) for tile in tiles)


def _warps(elements: int) -> int:
    return min(max(elements // _PER_WARP, 1), 16)


def _power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
