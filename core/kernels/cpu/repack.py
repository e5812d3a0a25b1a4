"""Panels made while a kernel runs, from matrices whose columns are not neighbours."""

from __future__ import annotations

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.kernels.cpu.tile import transpose_rows


def gather_panel(
    k: Kernel, source: Pointer, target: Pointer, shape: tuple[int, int], steps: tuple[int, int], lanes: int
) -> None:
    """Copy a matrix of `shape` (depth, columns), whose elements lie `steps` apart along either axis, into a panel:
    its rows one after the other, each padded with zeros to whole vectors."""
    (depth, columns), (down, across) = shape, steps
    width = -(-columns // lanes) * lanes
    for first in range(0, width, lanes):
        count = min(lanes, columns - first)
        begin, panel = source.at(first * across), target.at(first)
        if down == 1:
            _transpose(k, begin, panel, (depth, count), across, width, lanes)
            continue
        mask = k.lane_mask(count, lanes) if count < lanes else None
        with k.loop(0, depth) as i:
            numbers = k.lane_numbers(lanes) * across
            panel.store(begin.at(i * down).gather(numbers, mask), i * width)


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

    whole = depth // lanes * lanes
    with k.loop(0, whole, lanes) as i:
        square(i, lanes)
    if depth > whole:
        square(k.index(whole), depth - whole)
