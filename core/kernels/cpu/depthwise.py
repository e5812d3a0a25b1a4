"""Depthwise convolutions: vectors of channels, a register tile of neighbouring columns."""

from __future__ import annotations

from collections.abc import Sequence

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.types import DType
from core.kernels.catalog.depthwise import DepthwiseSpec
from core.kernels.cpu.nest import even_chunks, grain, offsets_of
from core.kernels.cpu.results import Results
from core.kernels.target import Target

F32 = DType.FLOAT32


def generate(spec: DepthwiseSpec, target: Target) -> Kernel:
    return _Depthwise(spec, target).kernel


class _Depthwise:
    """Writes the kernel of one spec."""

    def __init__(self, spec: DepthwiseSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        dtypes = (spec.source, F32, *spec.finish.extra_dtypes, spec.dtype)
        operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
        self.image, self.weights = operands[0].computing(F32), operands[1]
        self.results = Results(k, spec.finish.epilogue, tuple(operands[2:]), (*spec.finish.extra_steps, 1))
        lines, columns = spec.windows
        work = columns.count * spec.channels
        steps = grain(work * F32.itemsize, work * lines.kernel * columns.kernel)
        with even_chunks(k, k.dim(spec.batch * lines.count), steps) as (start, stop), k.loop(start, stop) as line:
            self._line(line)

    def _line(self, line: Val) -> None:
        """One line of results: columns whose window reaches outside one by one, the others in tiles."""
        k, spec = self.kernel, self.spec
        lines, columns = spec.windows
        image, row = k.unravel(line, [0, lines.count])
        corner = row * lines.stride - lines.before
        first, last = self._inner_lines(corner)
        top = self.image.at((image * lines.size + corner) * (columns.size * spec.channels))
        begin, end = columns.inside
        full = begin + (end - begin) // spec.columns * spec.columns
        pixel = line * columns.count
        for column in (*range(begin), *range(end, columns.count)):
            self._tile(top, first, last, pixel, k.index(column), 1, self._taps_inside(column))
        with k.loop(begin, full, spec.columns) as column:
            self._tile(top, first, last, pixel, column, spec.columns, range(columns.kernel))
        if end > full:
            self._tile(top, first, last, pixel, k.index(full), end - full, range(columns.kernel))

    def _inner_lines(self, corner: Val) -> tuple[Val, Val]:
        """Which lines of the window [first, last) lie in the image."""
        k, lines = self.kernel, self.spec.windows[0]
        step = lines.dilation
        if lines.inside == (0, lines.count):
            return k.index(0), k.index(lines.kernel)
        first = (k.ops.max(k.index(0) - corner, 0) + (step - 1)) // step
        after = (k.ops.max(k.index(lines.size) - corner, 0) + (step - 1)) // step
        return first, k.ops.min(after, lines.kernel)

    def _taps_inside(self, column: int) -> Sequence[int]:
        """Which columns of the window around a given column lie in the image."""
        window = self.spec.windows[1]
        corner = column * window.stride - window.before
        return [tap for tap in range(window.kernel) if 0 <= corner + tap * window.dilation < window.size]

    def _tile(
        self, top: Pointer, first: Val, last: Val, pixel: Val, column: Val, count: int, taps: Sequence[int]
    ) -> None:
        """`count` neighbouring results, for all channels."""
        k, spec = self.kernel, self.spec
        window = spec.windows[1]
        left = top.at((column * window.stride - window.before) * spec.channels)
        offsets = [offsets_of(k, spec.finish.pixels, pixel + column + c) for c in range(count)]

        def channels(at: Val, mask: Val | None) -> None:
            sums = self._sums(left.at(at), self.weights.at(at), first, last, count, taps, mask)
            self.results.at_column(at).store([[value] for value in sums], offsets, mask)

        k.strip(spec.channels, channels, lanes=spec.lanes)

    def _sums(
        self, left: Pointer, weights: Pointer, first: Val, last: Val, count: int, taps: Sequence[int], mask: Val | None
    ) -> list[Val]:
        """The results of one vector of channels, line of the window by line."""
        k, spec = self.kernel, self.spec
        window, channels, lanes = spec.windows[1], spec.channels, spec.lanes
        with k.fold(first, last, [k.zeros(F32, lanes)] * count) as fold:
            step = fold.index
            line = left.at(step * (spec.windows[0].dilation * window.size * channels))
            kernel = weights.at(step * (window.kernel * channels))
            factors = {tap: kernel.load(tap * channels, lanes, mask) for tap in taps}
            sums, seen = list(fold.values), dict[int, Val]()
            for c in range(count):
                for tap in taps:
                    at = c * window.stride + tap * window.dilation
                    if at not in seen:
                        seen[at] = line.load(at * channels, lanes, mask)
                    sums[c] = k.ops.fma(seen[at], factors[tap], sums[c])
            fold.values = sums
        return fold.values
