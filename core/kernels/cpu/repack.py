"""Panels made while a kernel runs: of matrices whose columns are not neighbours, or that are to be narrower floats;
and rows of narrow floats made wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer, register_type
from core.ir.types import DType
from core.kernels.cpu.tile import transpose_rows


def gather_panel(
    k: Kernel,
    source: Pointer,
    target: Pointer,
    shape: tuple[int, int],
    steps: tuple[int, int],
    lanes: int,
    element: DType | None = None,
) -> None:
    """Copy a matrix of `shape` (depth, columns), whose elements lie `steps` apart along either axis, into a panel:
    its rows one after the other, each padded with zeros to whole vectors. Numbers are rounded to `element`,
    if one is given."""
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
            panel.store(_rounded(k, values, element), i * width)


def _rounded(k: Kernel, values: Val, element: DType | None) -> Val:
    """The nearest numbers that `element` has, of the type that they were."""
    return values if element is None else k.ops.cast(k.ops.cast(values, element), values.dtype)


def widened(k: Kernel, rows: Sequence[Pointer], scratch: Pointer, count: int, lanes: int) -> list[Pointer]:
    """Copies of rows of `count` narrow floats as float32, `row_pitch` apart: a factor is loaded once for every vector
    of a panel, and converting it each time would take longer than its products."""
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
    k: Kernel,
    source: Pointer,
    target: Pointer,
    shape: tuple[int, int],
    across: int,
    width: int,
    lanes: int,
    element: DType | None,
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
            target.store(_rounded(k, line, element), (i + step) * width)

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
