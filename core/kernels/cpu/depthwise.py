"""Depthwise convolutions: vectors of channels, a register tile of neighbouring columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer, register_type
from core.ir.types import DType
from core.kernels.catalog.depthwise import DepthwiseSpec
from core.kernels.catalog.pool import Window
from core.kernels.cpu.nest import even_chunks, grain, offsets_of
from core.kernels.cpu.results import Results
from core.kernels.target import Target

F32 = DType.FLOAT32
Lines: TypeAlias = Callable[[Val], Pointer]  # where the line of the image begins that a line of the window meets
Emit: TypeAlias = Callable[[Val, int, Sequence[int]], None]


def generate(spec: DepthwiseSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    dtypes = (spec.source, F32, *spec.finish.extra_dtypes, spec.dtype)
    operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
    image, weights = operands[0].computing(F32), operands[1]
    results = Results(k, spec.finish.epilogue, tuple(operands[2:]), (*spec.finish.extra_steps, 1))
    bias = weights.at(spec.taps * spec.channels) if spec.fill else None
    taps = Taps(
        k, spec.windows, spec.channels, spec.columns, spec.lanes, weights, results, spec.source, spec.fill, bias
    )
    lines, columns = spec.windows
    work = columns.count * spec.channels
    steps = grain(work * F32.itemsize, work * lines.kernel * columns.kernel)
    with even_chunks(k, k.dim(spec.batch * lines.count), steps) as (start, stop), k.loop(start, stop) as line:
        number, row = k.unravel(line, [0, lines.count])
        corner = row * lines.stride - lines.before
        top = image.at((number * lines.size + corner) * taps.line_elements)
        inner = taps.inner_lines(corner)

        def tile(column: Val, count: int, inside: Sequence[int]) -> None:
            pixel = line * columns.count + column
            offsets = [offsets_of(k, spec.finish.pixels, pixel + c) for c in range(count)]
            taps.tile(lambda step: top.at(step * (lines.dilation * taps.line_elements)), inner, column, inside, offsets)

        taps.each_tile(tile)
    return k


@dataclass(frozen=True)
class Taps:
    """Writes the results of depthwise windows, `columns` neighbours of one line at a time. Bytes count from `fill`, and
    `full` holds what windows full of that add up to."""

    kernel: Kernel
    windows: tuple[Window, Window]
    channels: int
    columns: int
    lanes: int
    weights: Pointer
    results: Results
    source: DType = F32  # of the image
    fill: int = 0
    full: Pointer | None = None

    @property
    def line_elements(self) -> int:
        """Of the image."""
        return self.windows[1].size * self.channels

    def each_tile(self, emit: Emit) -> None:
        """Cover a line: `emit(column, count, taps)` one by one for columns whose windows reach outside, with the taps
        of the window that lie in the image; for the others in tiles."""
        k, columns = self.kernel, self.windows[1]
        begin, end = columns.inside
        full = begin + (end - begin) // self.columns * self.columns
        for column in (*range(begin), *range(end, columns.count)):
            emit(k.index(column), 1, self._inside(column))
        with k.loop(begin, full, self.columns) as at:
            emit(at, self.columns, range(columns.kernel))
        if end > full:
            emit(k.index(full), end - full, range(columns.kernel))

    def inner_lines(self, corner: Val) -> tuple[Val, Val]:
        """Which lines of the window [first, last) lie in the image."""
        k, lines = self.kernel, self.windows[0]
        step = lines.dilation
        if lines.inside == (0, lines.count):
            return k.index(0), k.index(lines.kernel)
        first = (k.ops.max(k.index(0) - corner, 0) + (step - 1)) // step
        after = (k.ops.max(k.index(lines.size) - corner, 0) + (step - 1)) // step
        return first, k.ops.min(after, lines.kernel)

    def tile(
        self, lines: Lines, inner: tuple[Val, Val], column: Val, taps: Sequence[int], offsets: Sequence[Sequence[Val]]
    ) -> None:
        """Neighbouring results from `column` on, for all channels. `offsets`: where each operand of the results is, one
        list for each of them."""
        k, window = self.kernel, self.windows[1]
        left = (column * window.stride - window.before) * self.channels

        def channels(at: Val, mask: Val | None) -> None:
            sums = self._sums(lambda step: lines(step).at(left + at), inner, at, taps, len(offsets), mask)
            self.results.at_column(at).store([[self._total(value)] for value in sums], offsets, mask)

        k.strip(self.channels, channels, lanes=self.lanes)

    def _total(self, total: Val) -> Val:
        """A sum as the epilogue takes it: that of bytes as the integer that it is."""
        if not self.source.is_integer:
            return total
        k = self.kernel
        whole = k.builder.convert("fptosi", total.ir, register_type(DType.INT32, total.lanes))
        return Val(k, whole, DType.INT32, total.lanes)

    def _inside(self, column: int) -> Sequence[int]:
        """Which columns of the window around a given column lie in the image."""
        window = self.windows[1]
        corner = column * window.stride - window.before
        return [tap for tap in range(window.kernel) if 0 <= corner + tap * window.dilation < window.size]

    def _sums(
        self, lines: Lines, inner: tuple[Val, Val], at: Val, taps: Sequence[int], count: int, mask: Val | None
    ) -> list[Val]:
        """The results of the vector of channels `at`, line of the window by line."""
        k, window, lanes = self.kernel, self.windows[1], self.lanes
        begin = k.zeros(F32, lanes) if self.full is None else self.full.load(at, lanes, mask)
        with k.fold(*inner, [begin] * count) as fold:
            line = lines(fold.index)
            kernel = self.weights.at(fold.index * (window.kernel * self.channels) + at)
            factors = {tap: kernel.load(tap * self.channels, lanes, mask) for tap in taps}
            sums, seen = list(fold.values), dict[int, Val]()
            for c in range(count):
                for tap in taps:
                    place = c * window.stride + tap * window.dilation
                    if place not in seen:
                        value = line.load(place * self.channels, lanes, mask)
                        seen[place] = value - float(self.fill) if self.fill else value
                    sums[c] = k.ops.fma(seen[place], factors[tap], sums[c])
            fold.values = sums
        return fold.values
