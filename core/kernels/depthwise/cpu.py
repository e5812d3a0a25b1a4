"""Depthwise convolutions: vectors over channels, register tiles of adjacent columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks, grain, offsets_of
from lathe.core.kernels.cpu.reduction import whole_numbers
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.depthwise.spec import DepthwiseSpec
from lathe.core.kernels.shared.window import Window
from lathe.core.kernels.target import Target

F32 = DType.FLOAT32
Lines: TypeAlias = Callable[[Val], Pointer]  # from a line of the window to the start of its image line
Emit: TypeAlias = Callable[[Val, int, Sequence[int]], None]


def generate(spec: DepthwiseSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    dtypes = (spec.source, F32, *spec.finish.extra_dtypes, spec.dtype)
    operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
    image, weights = operands[0].converting(F32), operands[1]
    results = ResultWriter(k, spec.finish.epilogue, tuple(operands[2:]), (*spec.finish.extra_steps, 1))
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
    """Generates depthwise convolutions, `columns` adjacent results of one line at a time.

    If the image holds bytes, `fill` is subtracted from each, and `full` holds the sums of windows filled with it.
    """

    kernel: Kernel
    windows: tuple[Window, Window]
    channels: int
    columns: int
    lanes: int
    weights: Pointer
    results: ResultWriter
    source: DType = F32  # of the image
    fill: int = 0
    full: Pointer | None = None

    @property
    def line_elements(self) -> int:
        """Elements of a line of the image."""
        return self.windows[1].size * self.channels

    def each_tile(self, emit: Emit) -> None:
        """Cover a line of results by calls `emit(column, count, taps)`: `count` results from `column` on.

        Columns whose windows reach outside the image are emitted one by one, with the taps that lie inside; the others
        in tiles, with all taps.
        """
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
        """The range [first, last) of window lines that lie in the image, for a window whose first line is `corner`."""
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
        """Compute adjacent results from `column` on, for all channels.

        `lines(step)` is the address of the image line for line `step` of the window, `inner` the range of window lines
        and `taps` the window columns inside the image. `offsets` has one list per result, with the offset of each
        operand of `results`.
        """
        k, window = self.kernel, self.windows[1]
        left = (column * window.stride - window.before) * self.channels

        def channels(at: Val, mask: Val | None) -> None:
            sums = self._sums(lambda step: lines(step).at(left + at), inner, at, taps, len(offsets), mask)
            self.results.at_column(at).store([[self._total(value)] for value in sums], offsets, mask)

        k.strip(self.channels, channels, lanes=self.lanes)

    def _total(self, total: Val) -> Val:
        """A sum in the type that the epilogue expects: int32 for bytes."""
        return whole_numbers(self.kernel, total) if self.source.is_integer else total

    def _inside(self, column: int) -> Sequence[int]:
        """The columns of the window (0 is its first) of result `column` that lie in the image."""
        window = self.windows[1]
        corner = column * window.stride - window.before
        return [tap for tap in range(window.kernel) if 0 <= corner + tap * window.dilation < window.size]

    def _sums(
        self, lines: Lines, inner: tuple[Val, Val], at: Val, taps: Sequence[int], count: int, mask: Val | None
    ) -> list[Val]:
        """The sums of `count` adjacent results for a vector of channels from `at` on, over the window lines `inner`."""
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
