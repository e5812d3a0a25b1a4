"""Winograd's convolution along one axis: transform image lines, convolve each along columns, transform back."""

from __future__ import annotations

from collections.abc import Sequence

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import Grid, accumulate, for_each_tile, zeros
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.shared.panels import packed_size
from lathe.core.kernels.shared.words import WORD_BYTES
from lathe.core.kernels.target import Target
from lathe.core.kernels.winograd.lines_spec import WinogradLinesSpec
from lathe.core.kernels.winograd.transforms_cpu import image_line, result_line

F32 = DType.FLOAT32


def generate(spec: WinogradLinesSpec, target: Target) -> Kernel:
    return _WinogradLines(spec, target).kernel


class _WinogradLines:
    """Writes the kernel of one spec."""

    def __init__(self, spec: WinogradLinesSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        self.lanes, finish, form = spec.tile.lanes, spec.finish, spec.form
        operands = [k.operand(i, dtype) for i, dtype in enumerate((F32, F32, *finish.extra_dtypes, finish.dtype))]
        self.image, self.weights = operands[:2]
        self.results = ResultWriter(k, finish.epilogue, tuple(operands[2:]), (*finish.extra_steps, 1))
        self.lines = k.scratch(len(operands), spec.scratch_words * WORD_BYTES, F32)
        self.products = self.lines.at(form.line_products * spec.line_words)
        self.zeros = self.products.at(form.evaluations * spec.result_words)
        self._clear(self.lines, form.line_products * spec.line_words)
        self._clear(self.zeros, spec.image_words)
        with k.parallel(k.dim(spec.batch), spec.bands) as (image, band):
            line = band * form.output
            self._transform_lines(image, line)
            self._multiply()
            self._finish(image, line)

    def _clear(self, target: Pointer, words: int) -> None:
        """Set `words` words at `target`, rounded up to whole vectors, to zero; padding of lines stays zero for good."""
        k = self.kernel
        with k.loop(0, words, self.lanes) as i:
            target.store(k.zeros(F32, self.lanes), i)

    def _transform_lines(self, image: Val, line: Val) -> None:
        """Transform the image lines for the result lines from `line` on: store the values at all points in scratch.

        With a stride of 2, even and odd lines are two parts, which are transformed separately.
        """
        k, spec, form = self.kernel, self.spec, self.spec.form
        sources = [self._line(image, line * form.stride - spec.windows[0].before + i) for i in range(form.input)]

        def words(at: Val, mask: Val | None) -> None:
            for part in range(form.stride):
                values = [source.load(at, self.lanes, mask) for source in sources[part :: form.stride]]
                for i, value in enumerate(image_line(k, form, values)):
                    self.lines.at(at).store(value, (i * form.stride + part) * spec.line_words + spec.lead, mask)

        k.strip(spec.image_words, words, lanes=self.lanes)

    def _line(self, image: Val, line: Val) -> Pointer:
        """The address of line `line` of an image; that of a line of zeros if it lies outside the image."""
        k, size = self.kernel, self.spec.windows[0].size
        offset = (image * size + line) * self.spec.image_words
        return self.image.at(k.ops.select((line >= 0) & (line < size), offset, self.zeros.distance_from(self.image)))

    def _multiply(self) -> None:
        """Convolve the transformed lines along their columns: [places, parts * depth] by [parts * depth, columns]."""
        k, spec = self.kernel, self.spec
        full, rest = divmod(spec.columns, spec.tile.columns)
        with k.loop(0, spec.form.evaluations) as point:
            with k.loop(0, full * spec.tile.columns, spec.tile.columns) as first:
                self._panel(point, first, spec.tile.columns)
            if rest:
                self._panel(point, k.index(full * spec.tile.columns), rest)

    def _panel(self, point: Val, first: Val, columns: int) -> None:
        """Compute the products at point number `point`, for `columns` output channels from `first` on."""
        k, spec, form, window = self.kernel, self.spec, self.spec.form, self.spec.windows[1]
        parts = k.ops.select(point < len(form.points), k.index(form.stride), 1)
        before = point * form.stride
        matrix = self.weights.at(before * packed_size(spec.depth, spec.columns, spec.tile))
        panel = matrix.at(first * spec.depth * parts)
        source = self.lines.at(before * spec.line_words + (spec.lead - window.before * spec.channels))
        target = self.products.at(point * spec.result_words + first)

        def tile(place: Val, height: int) -> None:
            start = source.at(place * (window.stride * spec.channels))
            grid = self._sum_tile(zeros(k, height, columns // self.lanes, self.lanes), start, panel, parts)
            for r, values in enumerate(grid):
                for v, value in enumerate(values):
                    target.store(value, (place + r) * spec.columns + v * self.lanes)

        for_each_tile(k, k.index(0), k.index(window.count), window.count, spec.tile.rows, tile)

    def _sum_tile(self, grid: Grid, start: Pointer, panel: Pointer, parts: Val) -> Grid:
        """`grid` plus the products of a tile of windows, the first of which begins at `start`, over all image parts.

        `panel` are the weights, `parts` is the number of parts.
        """
        k, spec, width = self.kernel, self.spec, len(grid[0])
        step = spec.windows[1].stride * spec.channels
        with k.fold(0, parts, [value for row in grid for value in row]) as fold:
            line = start.at(fold.index * spec.line_words)
            weights = panel.at(fold.index * (spec.depth * width * self.lanes))
            sums = accumulate(
                k, _as_grid(fold.values, width), [line.at(r * step) for r in range(len(grid))], 1, weights,
                width * self.lanes, spec.depth, panel_vectors=spec.tile.vectors,
            )  # fmt: skip
            fold.values = [value for row in sums for value in row]
        return _as_grid(fold.values, width)

    def _finish(self, image: Val, line: Val) -> None:
        """Transform the products back, run the epilogue, and store the result lines from `line` on that exist."""
        k, spec, form = self.kernel, self.spec, self.spec.form
        lines, columns = spec.windows
        with k.loop(0, columns.count) as place:
            pixel = (image * lines.count + line) * columns.count + place
            offsets = [offsets_of(k, spec.finish.pixels, pixel + i * columns.count) for i in range(form.output)]
            with k.loop(0, spec.columns, self.lanes) as c:
                source = self.products.at(place * spec.columns + c)
                sums = [source.load(i * spec.result_words, self.lanes) for i in range(form.evaluations)]
                results = self.results.at_column(c)
                for i, value in enumerate(result_line(k, form, sums)):
                    with k.when(line + i < lines.count):
                        results.store([[value]], [offsets[i]], None)


def _as_grid(values: Sequence[Val], width: int) -> Grid:
    return [list(values[i : i + width]) for i in range(0, len(values), width)]
