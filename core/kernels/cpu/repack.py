"""Panels made while a kernel runs: of matrices whose columns are not neighbours, or that are to be bfloat16."""

from __future__ import annotations

from collections.abc import Callable

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer, register_type
from core.ir.types import DType
from core.kernels.cpu.tile import transpose_rows


def gather_panel(
    k: Kernel, source: Pointer, target: Pointer, shape: tuple[int, int], steps: tuple[int, int], lanes: int
) -> None:
    """Copy a matrix of `shape` (depth, columns), whose elements lie `steps` apart along either axis, into a panel:
    its rows one after the other, each padded with zeros to whole vectors."""
    (depth, columns), (down, across) = shape, steps
    width = -(-columns // lanes) * lanes
    for first, count in _vectors(columns, lanes):
        begin, panel = source.at(first * across), target.at(first)
        if down == 1:
            _transpose(k, begin, panel, (depth, count), across, width, lanes)
            continue
        mask = k.lane_mask(count, lanes) if count < lanes else None
        with k.loop(0, depth) as i:
            numbers = k.lane_numbers(lanes) * across
            panel.store(begin.at(i * down).gather(numbers, mask), i * width)


def _vectors(columns: int, lanes: int) -> list[tuple[int, int]]:
    """The first column of each vector of a panel, and how many columns it has."""
    return [(first, min(lanes, columns - first)) for first in range(0, columns, lanes)]


def _by_squares(k: Kernel, depth: int, lanes: int, square: Callable[[Val, int], None]) -> None:
    """Call `square` with the first of each `lanes` rows, and with how many of them there are."""
    whole = depth // lanes * lanes
    with k.loop(0, whole, lanes) as i:
        square(i, lanes)
    if depth > whole:
        square(k.index(whole), depth - whole)


def _transpose(
    k: Kernel, source: Pointer, target: Pointer, shape: tuple[int, int], across: int, width: int, lanes: int
) -> None:
    """At most `lanes` contiguous columns, a square of `lanes` x `lanes` at a time."""
    depth, columns = shape

    def square(i: Val, valid: int) -> None:
        mask = k.lane_mask(valid, lanes) if valid < lanes else None
        lines = [
            source.load(i + j * across, lanes, mask) if j < columns else k.zeros(source.computed or source.dtype, lanes)
            for j in range(lanes)
        ]
        for step, line in enumerate(transpose_rows(k, lines)[:valid]):
            target.store(line, (i + step) * width)

    _by_squares(k, depth, lanes, square)


def gather_pairs(
    k: Kernel, source: Pointer, target: Pointer, shape: tuple[int, int], steps: tuple[int, int], lanes: int
) -> None:
    """The same from float32 to words of two bfloat16, neighbours along the depth; `shape` counts words, `steps`
    elements."""
    (depth, columns), (down, across) = shape, steps
    width = -(-columns // lanes) * lanes
    for first, count in _vectors(columns, lanes):
        begin, panel = source.at(first * across), target.at(first)
        if down == 1:
            _transpose_pairs(k, begin, panel, (depth, count), across, width, lanes)
            continue
        mask = k.lane_mask(count, lanes) if count < lanes else None
        with k.loop(0, depth) as i:
            pair = [begin.at((i * 2 + half) * down) for half in range(2)]
            if across == 1:
                lower, upper = (line.load(0, lanes, mask) for line in pair)
            else:
                lower, upper = (line.gather(k.lane_numbers(lanes) * across, mask) for line in pair)
            panel.store(_paired(k, lower, upper), i * width)


def _paired(k: Kernel, lower: Val, upper: Val) -> Val:
    """Words of which the first half comes from `lower`, the second one from `upper`, rounded to bfloat16."""
    halves = [k.ops.bitcast(k.ops.cast(x, DType.BFLOAT16), DType.UINT16) for x in (lower, upper)]
    first, second = (k.ops.cast(half, DType.UINT32) for half in halves)
    return k.ops.bitcast(k.ops.bit_or(first, k.ops.shift_left(second, 16)), DType.INT32)


def _transpose_pairs(
    k: Kernel, source: Pointer, target: Pointer, shape: tuple[int, int], across: int, width: int, lanes: int
) -> None:
    """Columns whose elements are contiguous: two become a word where they are, words are transposed by squares."""
    depth, columns = shape

    def line(j: int, i: Val, mask: Val | None) -> Val:
        if j >= columns:
            return k.zeros(DType.INT32, lanes)
        pairs = k.ops.cast(source.load(i * 2 + j * across, 2 * lanes, mask), DType.BFLOAT16)
        return Val(k, k.builder.convert("bitcast", pairs.ir, register_type(DType.INT32, lanes)), DType.INT32, lanes)

    def square(i: Val, valid: int) -> None:
        mask = k.lane_mask(2 * valid, 2 * lanes) if valid < lanes else None
        words = [line(j, i, mask) for j in range(lanes)]
        for step, row in enumerate(transpose_rows(k, words)[:valid]):
            target.store(row, (i + step) * width)

    _by_squares(k, depth, lanes, square)
