"""Repacking at run time: strided or wider matrices into panels, and rows of narrow floats into float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer, register_type
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.register_shuffles import transpose_rows


def gather_panel(
    k: Kernel,
    source: Pointer,
    target: Pointer,
    shape: tuple[int, int],
    steps: tuple[int, int],
    lanes: int,
    element: DType | None = None,
) -> None:
    """Copy a matrix of `shape` (depth, columns) with the strides `steps` into a panel.

    A panel holds the rows one after the other, each padded with zeros to whole vectors. Numbers are rounded to
    `element`, if it is given.
    """
    (depth, columns), (down, across) = shape, steps
    width = -(-columns // lanes) * lanes
    for first, count in _vectors(columns, lanes):
        begin, panel = source.at(first * across), target.at(first)
        if down == 1:
            _transpose(k, begin, panel, (depth, count), across, width, lanes, element)
            continue
        mask = k.lane_mask(count, lanes) if count < lanes else None
        with k.loop(0, depth) as i:
            line = begin.at(i * down)
            if across == 1 and element is not None:
                values = line.load(0, lanes, mask)
            else:
                values = line.gather(k.lane_numbers(lanes) * across, mask)
            panel.store(_round_to(k, values, element), i * width)


def _round_to(k: Kernel, values: Val, element: DType | None) -> Val:
    """The values rounded to the precision of `element`, without changing their type."""
    return values if element is None else k.ops.cast(k.ops.cast(values, element), values.dtype)


def widen_rows(k: Kernel, rows: Sequence[Pointer], scratch: Pointer, count: int, lanes: int) -> list[Pointer]:
    """Copy `rows` of `count` narrow floats to `scratch` as float32, `row_pitch` apart; returns the copies' addresses.

    A factor is loaded once for every vector of a panel; converting it each time would take longer than its products.
    """
    pitch = -(-count // lanes) * lanes
    whole = count // lanes * lanes

    def copy(at: Val, mask: Val | None) -> None:
        for r, row in enumerate(rows):
            scratch.store(row.load(at, lanes, mask), at + r * pitch)

    with k.loop(0, whole, lanes) as i:
        copy(i, None)
    if count > whole:
        copy(k.index(whole), k.lane_mask(count - whole, lanes))
    return [scratch.at(r * pitch) for r in range(len(rows))]


def _vectors(columns: int, lanes: int) -> list[tuple[int, int]]:
    """The first column of each vector of a panel, and its number of columns."""
    return [(first, min(lanes, columns - first)) for first in range(0, columns, lanes)]


def _for_each_square(k: Kernel, depth: int, lanes: int, square: Callable[[Val, int], None]) -> None:
    """Call `square(first, count)` for each group of at most `lanes` rows along the depth."""
    whole = depth // lanes * lanes
    with k.loop(0, whole, lanes) as i:
        square(i, lanes)
    if depth > whole:
        square(k.index(whole), depth - whole)


def _transpose(
    k: Kernel,
    source: Pointer,
    target: Pointer,
    shape: tuple[int, int],
    across: int,
    width: int,
    lanes: int,
    element: DType | None,
) -> None:
    """Copy at most `lanes` columns, each contiguous along the depth, to the rows of a panel, by transposed squares.

    `across` is the distance between columns, `width` that between rows of the panel.
    """
    depth, columns = shape

    def square(i: Val, valid: int) -> None:
        mask = k.lane_mask(valid, lanes) if valid < lanes else None
        lines = [
            source.load(i + j * across, lanes, mask) if j < columns else k.zeros(source.computed or source.dtype, lanes)
            for j in range(lanes)
        ]
        for step, line in enumerate(transpose_rows(k, lines)[:valid]):
            target.store(_round_to(k, line, element), (i + step) * width)

    _for_each_square(k, depth, lanes, square)


def gather_pairs(
    k: Kernel, source: Pointer, target: Pointer, shape: tuple[int, int], steps: tuple[int, int], lanes: int
) -> None:
    """Like `gather_panel`, from float32 to words of two bfloat16 that are adjacent along the depth.

    `shape` counts words, `steps` count elements.
    """
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
            panel.store(_pack_pairs(k, lower, upper), i * width)


def _pack_pairs(k: Kernel, lower: Val, upper: Val) -> Val:
    """Words with `lower` in the lower half and `upper` in the upper half, both rounded to bfloat16."""
    halves = [k.ops.bitcast(k.ops.cast(x, DType.BFLOAT16), DType.UINT16) for x in (lower, upper)]
    first, second = (k.ops.cast(half, DType.UINT32) for half in halves)
    return k.ops.bitcast(k.ops.bit_or(first, k.ops.shift_left(second, 16)), DType.INT32)


def _transpose_pairs(
    k: Kernel, source: Pointer, target: Pointer, shape: tuple[int, int], across: int, width: int, lanes: int
) -> None:
    """Like `_transpose`, for words: two adjacent elements become a word, then squares of words are transposed."""
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

    _for_each_square(k, depth, lanes, square)
