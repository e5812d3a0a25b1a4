"""Convolutions of few channels: vectors along the lines of the image, one output channel per accumulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.register_shuffles import interleave, shuffle
from lathe.core.kernels.direct.spec import DirectSpec
from lathe.core.kernels.target import Target
from lathe.core.ops.nn.fused import scalar_body

F32 = DType.FLOAT32
Sums: TypeAlias = list[list[list[Val]]]  # [lines][output channels][vectors]


def generate(spec: DirectSpec, target: Target) -> Kernel:
    return _Direct(spec, target).kernel


class _Direct:
    """Writes the kernel of one spec."""

    def __init__(self, spec: DirectSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        dtypes = (F32, F32, *spec.finish.extra_dtypes, spec.finish.dtype)
        self.image, self.weights, *self.extras, self.y = (k.operand(i, dtype) for i, dtype in enumerate(dtypes))
        self.source = k.scratch(len(dtypes), spec.scratch_elements * F32.itemsize, F32)
        self.results = self.source.at(spec.source_elements)
        self._clear(k.index(0), k.index(spec.channels * spec.source_lines))
        bands = -(-spec.size[0] // spec.band)
        with k.parallel(k.dim(spec.batch), bands) as (image, band):
            first = band * spec.band
            self._copy(image, first, alone=bands == 1)
            with k.loop(0, k.ops.min(k.index(spec.size[0]) - first, spec.band), spec.result_lines) as line:
                self._compute(line)
                for r in range(spec.result_lines):
                    with k.when(first + line + r < spec.size[0]):
                        self._write(image, first + line + r, r)

    # The image

    def _clear(self, first: Val, last: Val) -> None:
        """Clear lines `first` to `last` of the copy of the image."""
        k, width = self.kernel, self.spec.source_width

        def zeros(at: Val, mask: Val | None) -> None:
            self.source.at(first * width).store(k.zeros(F32, self.spec.lanes), at, mask)

        k.strip((last - first) * width, zeros)

    def _copy(self, image: Val, first: Val, alone: bool) -> None:
        """Copy the lines of an image that the results from line `first` on need.

        The padding at the sides is never written and stays zero. Unless the band is `alone` in its image, lines of
        another band may lie where its upper and lower padding must be, so these are cleared.
        """
        k, spec = self.kernel, self.spec
        lines, columns = spec.windows
        top = first * (spec.step * lines.stride) - lines.before
        begin = k.ops.min(k.ops.max(k.index(0) - top, 0), spec.source_lines)
        end = k.ops.max(k.ops.min(k.index(lines.size) - top, spec.source_lines), begin)
        with k.loop(0, spec.channels) as channel:
            plane = channel * spec.source_lines
            if not alone:
                self._clear(plane, plane + begin)
                self._clear(plane + end, plane + spec.source_lines)
            with k.loop(begin, end) as line:
                source = self.image.at((image * lines.size + top + line) * (columns.size * spec.channels) + channel)
                self._copy_line(source, self.source.at((plane + line) * spec.source_width + columns.before))

    def _copy_line(self, source: Pointer, target: Pointer) -> None:
        k, spec = self.kernel, self.spec

        def piece(at: Val, mask: Val | None) -> None:
            if spec.channels == 1:
                target.store(source.load(at, spec.lanes, mask), at, mask)
            else:
                places = (k.lane_numbers(spec.lanes) + at) * spec.channels
                target.store(source.gather(places, mask), at, mask)

        k.strip(spec.windows[1].size, piece)

    # The results

    def _compute(self, line: Val) -> None:
        """Compute all columns and channels of the result lines from `line` of the band on."""
        k, spec = self.kernel, self.spec
        source = self.source.at(line * (spec.step * spec.windows[0].stride * spec.source_width))
        full, rest = divmod(spec.runs, spec.vectors)
        width = spec.vectors * spec.lanes
        with k.loop(0, full * width, width) as column:
            self._columns(source, column, spec.vectors)
        if rest:
            self._columns(source, k.index(full * width), rest)

    def _columns(self, source: Pointer, column: Val, vectors: int) -> None:
        spec = self.spec
        for first in range(0, spec.outputs, spec.together):
            outputs = range(first, min(first + spec.together, spec.outputs))
            sums = self._sums(source.at(column), outputs, vectors)
            for i, output in enumerate(outputs):
                self._store_channel(
                    [[self._finish(value, output) for value in line[i]] for line in sums], output, column
                )

    def _sums(self, source: Pointer, outputs: range, vectors: int) -> Sums:
        k, spec = self.kernel, self.spec
        window, width = spec.windows[0], spec.source_width
        count = spec.lines * len(outputs) * vectors
        with k.fold(0, spec.channels, [k.zeros(F32, spec.lanes)] * count) as planes:
            with k.fold(0, window.kernel, planes.values) as lines:
                line = planes.index * spec.source_lines + lines.index * window.dilation
                tap = (planes.index * window.kernel + lines.index) * (spec.windows[1].kernel * spec.outputs)
                place, weights = source.at(line * width), self.weights.at(tap + outputs[0])
                lines.values = self._line_of_taps(place, weights, lines.values, vectors)
            planes.values = lines.values
        values = iter(planes.values)
        return [[[next(values) for _ in range(vectors)] for _ in outputs] for _ in range(spec.lines)]

    def _line_of_taps(self, place: Pointer, weights: Pointer, sums: Sequence[Val], vectors: int) -> list[Val]:
        """The flat `sums` [lines][outputs][vectors] plus the products of one more line of the window.

        `place` is the first image element that the line reads, `weights` its weights.
        """
        k, spec = self.kernel, self.spec
        lines, columns = spec.windows
        sums, outputs = list(sums), len(sums) // (spec.lines * vectors)
        for tap in range(columns.kernel):
            factors = [weights.load(tap * spec.outputs + i).splat(spec.lanes) for i in range(outputs)]
            for line in range(spec.lines):
                start = line * lines.stride * spec.source_width + tap * columns.dilation
                for v in range(vectors):
                    value = place.load(start + v * spec.lanes, spec.lanes)
                    for i, factor in enumerate(factors):
                        at = (line * outputs + i) * vectors + v
                        sums[at] = k.ops.fma(value, factor, sums[at])
        return sums

    def _finish(self, value: Val, output: int) -> Val:
        """The vector `value` of channel `output` after the epilogue, whose extra inputs hold one value per channel."""
        finish, k = self.spec.finish, self.kernel
        if finish.epilogue is None:
            return value
        extras = [
            extra.load(output * step).splat(value.lanes)
            for extra, step in zip(self.extras, finish.extra_steps, strict=True)
        ]
        return k.ops.splat(scalar_body(k.ops, finish.epilogue, [value, *extras])[0], value.lanes)

    def _store_channel(self, lines: Sequence[Sequence[Val]], output: int, column: Val) -> None:
        """Store the results of channel `output`, from `column` on, in scratch for `_write`.

        `lines` are vectors of adjacent results of each line; if the spec has a pool, they are pooled first.
        """
        spec = self.spec
        if spec.pool:
            lines, column = [self._pool(*lines)], column // spec.step
        for r, line in enumerate(lines):
            target = self.results.at((r * spec.outputs + output) * spec.result_width).at(column)
            for v, value in enumerate(line):
                target.store(value, v * spec.lanes)

    def _pool(self, upper: Sequence[Val], lower: Sequence[Val]) -> list[Val]:
        """Two lines of one or two vectors, pooled 2x2 into one vector: a list of that vector.

        Lines of one vector give a vector of which only the first half is valid.
        """
        k, lanes, average = self.kernel, self.spec.lanes, self.spec.pool == "average"
        combine = k.ops.add if average else k.ops.max
        line = [combine(a, b) for a, b in zip(upper, lower, strict=True)]
        even, odd = (
            shuffle(k, line[0], line[-1], [(2 * lane + start) % (2 * lanes) for lane in range(lanes)])
            for start in (0, 1)
        )
        value = combine(even, odd)
        return [value * 0.25 if average else value]

    def _write(self, image: Val, line: Val, r: int) -> None:
        """Write line `line` of an image's result from line `r` of scratch, with the channels of each pixel adjacent."""
        k, spec = self.kernel, self.spec
        width, outputs, lanes = spec.size[1], spec.outputs, spec.lanes
        source = self.results.at(r * outputs * spec.result_width)
        target = self.y.at((image * spec.size[0] + line) * (width * outputs))

        def pixels(at: Val, mask: Val | None) -> None:
            planes = [source.load(at + i * spec.result_width, lanes) for i in range(outputs)]
            left = width % lanes * outputs if mask is not None else lanes * outputs
            for v, value in enumerate(interleave(k, planes)):
                if left > v * lanes:
                    part = k.lane_mask(left - v * lanes, lanes) if left < (v + 1) * lanes else None
                    target.store(value, at * outputs + v * lanes, part)

        k.strip(width, pixels)
