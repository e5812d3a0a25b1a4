"""`LineWriter`: GPU programs that process lines as blocks of [lines, elements], at once or chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lathe.core.ir.types import DType
from lathe.core.kernels.cuda.algebra import NARROW, Algebra, Reg, register_name
from lathe.core.kernels.cuda.nest import Place, split
from lathe.core.kernels.cuda.product import depth_range
from lathe.core.kernels.cuda.source import Writer, text_of, total
from lathe.core.kernels.shared.cuda_lines import Lines

# Triton's own combine functions: its interpreter knows them, and would call any other function for each element.
SUM, PRODUCT = "tl.standard._sum_combine", "tl.standard._prod_combine"
GREATEST, LEAST = "tl.standard._elementwise_max", "tl.standard._elementwise_min"


@dataclass(frozen=True, slots=True)
class LineChunk:
    """A chunk of elements [1, columns] of a program's lines.

    `index` is the variable of the elements' numbers in a line, `place` holds their indices in the nest along the line,
    and `mask` is true for elements that exist (None: all).
    """

    index: str
    place: Place
    mask: str | None


class LineWriter:
    """Generates code for the lines of one program. Lines that fit into registers are read once.

    If `parts` is above 1, that many programs along the second axis of the grid share each line.
    """

    def __init__(self, w: Writer, lines: Lines, parts: int = 1) -> None:
        self.w, self.e, self.lines, self.parts = w, Algebra(w), lines, parts
        tile = lines.tile
        self.index = w.let(f"tl.program_id(0) * {tile.rows} + tl.arange(0, {tile.rows})[:, None]", "line")
        self.mask = w.let(f"{self.index} < {text_of(lines.count)}", "inside")
        places = split(w, self.index, lines.lines.extents)
        self.place = Place(tuple(places), (self.mask,) * len(places))
        self._piece = self._at("0") if lines.whole else None
        self._loaded: dict[tuple[str, int], Reg] = {}

    @contextmanager
    def pieces(self) -> Iterator[LineChunk]:
        """Code written inside runs for each chunk of the lines, or of this program's part of the lines.

        It runs once, without a loop, if a whole line is one chunk.
        """
        if self._piece is not None:
            yield self._piece
            return
        steps = depth_range(self.w, self.lines.length, self.lines.tile.columns, self.parts)
        with self.w.block(f"for start in range({steps})"):
            yield self._at("start")

    def _at(self, start: str) -> LineChunk:
        columns, length = self.lines.tile.columns, self.lines.length
        index = self.w.let(f"{start} + tl.arange(0, {columns})[None, :]", "k")
        full = isinstance(length, int) and length % columns == 0
        mask = None if full else self.w.let(f"{index} < {text_of(length)}", "inside")
        places = split(self.w, index, self.lines.along.extents)
        return LineChunk(index, Place(tuple(places), (mask,) * len(places)), mask)

    def both(self, piece: LineChunk) -> str:
        """The mask expression of a block [lines, columns]: both the line and the element of `piece` exist."""
        return self.mask if piece.mask is None else f"{self.mask} & {piece.mask}"

    def load(self, pointer: str, operand: int, dtype: DType, piece: LineChunk) -> Reg:
        """The elements of operand `operand` of the lines' nests at this chunk, in their register type.

        `dtype` is their type in memory. Elements outside the lines are undefined. Lines that are one chunk are loaded
        only once.
        """
        if piece is self._piece and (pointer, operand) in self._loaded:
            return self._loaded[pointer, operand]
        lines, along = self.lines.lines.strides[operand], self.lines.along.strides[operand]
        masks = (self.place.mask(lines), piece.place.mask(along))
        mask = " & ".join(mask for mask in masks if mask) or None
        value = self.e.load(pointer, self._offset(operand, piece), dtype, mask)
        if piece is self._piece:
            self._loaded[pointer, operand] = value
        return value

    def store(self, pointer: str, operand: int, value: Reg, piece: LineChunk) -> None:
        """Store a chunk of an operand, inside the lines only."""
        self.e.store(pointer, f"{self._offset(operand, piece)} + {self.index} * 0", value, self.both(piece))

    def _offset(self, operand: int, piece: LineChunk) -> str:
        lines, along = self.lines.lines.strides[operand], self.lines.along.strides[operand]
        return total([_unless_zero(self.place.offset(lines)), _unless_zero(piece.place.offset(along))])

    def store_result(self, pointer: str, value: Reg, operand: int | None = None) -> None:
        """Store one number per line, [lines, 1]; without an `operand` they are contiguous."""
        offset = self.index if operand is None else f"{self.place.offset(self.lines.lines.strides[operand])}"
        self.e.store(pointer, f"{offset} + {self.index} * 0", value, self.mask)

    # Results of lines

    def start(self, value: str, dtype: DType) -> str:
        """A block with one accumulator per element, all with the initial `value`."""
        tile = self.lines.tile
        return self.w.let(f"tl.full(({tile.rows}, {tile.columns}), {value}, {register_name(dtype)})", "total")

    def within(self, value: str, piece: LineChunk, other: str) -> str:
        """The variable of a block that is `value` where line and element exist, and `other` elsewhere."""
        return self.w.let(f"tl.where({self.both(piece)}, {value}, {other})")

    def reduce(self, value: str, combine: str, dtype: DType) -> Reg:
        """The block `value` [lines, columns] reduced to one number per line, [lines, 1].

        `combine` is the name of a Triton function of two values, such as `SUM`.
        """
        return Reg(self.w.let(f"tl.reduce({value}, 1, {combine})[:, None]", "line"), dtype)

    def sum(self, value: str, dtype: DType = DType.FLOAT32) -> Reg:
        return self.reduce(value, SUM, dtype)

    def extreme(self, value: str, combine: str, dtype: DType) -> Reg:
        """The maximum or minimum (by `combine`) of each line of the block `value`, or NaN if the line has one.

        Comparisons alone would lose the NaN.
        """
        best = self.reduce(value, combine, dtype)
        if not dtype.is_float:
            return best
        nan = self.reduce(f"({value} != {value}).to(tl.int32)", SUM, DType.INT32)
        return Reg(self.w.let(f'tl.where({nan.name} > 0, float("nan"), {best.name})', "line"), dtype)


def register_dtype(dtype: DType) -> DType:
    """The type of a block in registers whose type in memory is `dtype`: float32 for float16 and bfloat16."""
    return DType.FLOAT32 if dtype in NARROW else dtype


def lowest(dtype: DType) -> str:
    """The least value of a type (minus infinity for floats), as an expression."""
    return 'float("-inf")' if dtype.is_float else str(-(1 << (8 * dtype.itemsize - 1)) if _signed(dtype) else 0)


def highest(dtype: DType) -> str:
    """The greatest value of a type (infinity for floats), as an expression."""
    bits = 8 * dtype.itemsize - (1 if _signed(dtype) else 0)
    return 'float("inf")' if dtype.is_float else str((1 << bits) - 1)


def _signed(dtype: DType) -> bool:
    return dtype.label.startswith("int")


def _unless_zero(text: str) -> str | None:
    return None if text == "0" else text
