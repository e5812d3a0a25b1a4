"""Winograd's convolution: transform tiles of the image, a matrix product for each of their places, transform back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.dim import symbol
from core.ir.types import DType
from core.kernels.catalog.panels import packed_size
from core.kernels.catalog.winograd import TABLE_LANES, WinogradSpec
from core.kernels.catalog.words import WORD_BYTES, word_dtype
from core.kernels.cpu.microkernel import accumulate, ahead_of, each_tile, zeros
from core.kernels.cpu.nest import offsets_of
from core.kernels.cpu.results import Results
from core.kernels.target import Target

F32, I64 = DType.FLOAT32, DType.INT64


def generate(spec: WinogradSpec, target: Target) -> Kernel:
    return _Winograd(spec, target).kernel


class _Winograd:
    """Writes the kernel of one spec."""

    def __init__(self, spec: WinogradSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        self.lanes = spec.tile.lanes
        finish = spec.finish
        self.word = word_dtype(spec.element)
        dtypes = (spec.element, self.word, *finish.extra_dtypes, finish.dtype)
        operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
        self.image, self.weights = operands[0].computing(F32), operands[1]
        self.results = Results(k, finish.epilogue, tuple(operands[2:]), (*finish.extra_steps, 1))
        self.inputs = k.scratch(len(operands), spec.scratch_words * WORD_BYTES, self.word)
        self.outputs = self.inputs.at(spec.form.products * spec.input_step).view(F32)
        self.table = self.outputs.at(spec.form.products * spec.output_step).view(I64)
        self.zeros = self.table.at(spec.form.input * TABLE_LANES).view(spec.element).computing(F32)
        with k.loop(0, spec.channels, self.lanes) as i:
            self.zeros.store(k.zeros(F32, self.lanes), i)
        self._tasks()

    def _tasks(self) -> None:
        """A task is a block of tiles, a smaller one when there are too few for all threads."""
        k, spec = self.kernel, self.spec
        tiles = k.dim(spec.tiles)
        share = (tiles + k.threads - 1) // k.threads
        height = spec.tile.rows
        block = k.ops.max(k.ops.min((share + (height - 1)) // height * height, spec.block), 1)
        with k.tasks((tiles + block - 1) // block) as task:
            start = task * block
            count = k.ops.min(block, tiles - start)
            with k.loop(0, count) as t:
                self._transform_image(start + t, t)
            self._multiply(count)
            with k.loop(0, count) as t:
                self._transform_results(start + t, t)

    def _corner(self, tile: Val) -> tuple[Val, Val, Val]:
        """The image of a tile, and the line and column of its first result."""
        k = self.kernel
        image, line, column = k.unravel(tile, [0, *self.spec.grid])
        return image, line * self.spec.form.output, column * self.spec.form.output

    def _transform_image(self, tile: Val, t: Val) -> None:
        """A vector per vector of channels and place, each into a matrix of its own."""
        k, spec, places = self.kernel, self.spec, range(self.spec.form.input)
        self._fill_table(tile)
        with k.loop(0, spec.channels, self.lanes) as c:
            grid = [[self._place(i, j).load(c, self.lanes) for j in places] for i in places]
            target = self.inputs.view(spec.element).computing(F32).at(t * spec.channels + c)
            step = spec.input_step * (spec.channels // spec.depth)
            for p, value in enumerate(_two_sided(self._image_line, grid)):
                target.store(value, p * step)

    def _place(self, i: int, j: int) -> Pointer:
        """The channels at one of the places of the tile at hand."""
        return self.image.at(self.table.load(i * TABLE_LANES + j))

    def _fill_table(self, tile: Val) -> None:
        """The offsets of the channels at the places of a tile; those of zeros outside the image."""
        k, spec = self.kernel, self.spec
        lines, columns = spec.windows
        image, line, column = self._corner(tile)
        x = (k.lane_numbers(TABLE_LANES) + (column - columns.before)).cast(DType.INT32)
        within = (x >= 0) & (x < columns.size)
        outside = self.zeros.distance_from(self.image)
        for i in range(spec.form.input):
            y = line - lines.before + i
            inside = within & ((y >= 0) & (y < lines.size)).splat(TABLE_LANES)
            offset = (x.cast(I64) + (image * lines.size + y) * columns.size) * spec.channels
            self.table.store(k.ops.select(inside, offset, outside), i * TABLE_LANES)

    def _multiply(self, count: Val) -> None:
        """[count, channels] by [channels, columns], once per place, panel by panel."""
        k, spec = self.kernel, self.spec
        full, rest = divmod(spec.columns, spec.tile.columns)
        with k.loop(0, spec.form.products) as p:
            with k.loop(0, full * spec.tile.columns, spec.tile.columns) as first:
                self._panel(p, first, spec.tile.columns, count)
            if rest:
                self._panel(p, k.index(full * spec.tile.columns), rest, count)

    def _panel(self, p: Val, first: Val, columns: int, count: Val) -> None:
        """Product number `p`, for the columns from `first` on."""
        k, spec = self.kernel, self.spec
        source = self.inputs.at(p * spec.input_step)
        target = self.outputs.at(p * spec.output_step + first)
        panel = self.weights.at(p * packed_size(spec.depth, spec.columns, spec.tile) + first * spec.depth)
        vectors = columns // self.lanes

        def tile(row: Val, height: int) -> None:
            sources = [source.at((row + r) * spec.depth) for r in range(height)]
            grid = zeros(k, height, vectors, self.lanes)
            next_panel, number = panel.at(columns * spec.depth), row // spec.tile.rows
            ahead = ahead_of(next_panel, number, spec.depth) if height == spec.tile.rows else None
            grid = accumulate(k, grid, sources, 1, panel, columns, spec.depth, element=spec.element, ahead=ahead)
            for r, values in enumerate(grid):
                for v, value in enumerate(values):
                    target.store(value, (row + r) * spec.columns + v * self.lanes)

        each_tile(k, k.index(0), count, symbol("n"), spec.tile.rows, tile)

    def _transform_results(self, tile: Val, t: Val) -> None:
        """The results of a tile per vector of channels, as far as they lie in the result."""
        k, spec, form = self.kernel, self.spec, self.spec.form
        lines, columns = spec.windows
        image, line, column = self._corner(tile)
        pixel = (image * lines.count + line) * columns.count + column
        offsets = [
            [offsets_of(k, spec.finish.pixels, pixel + (i * columns.count + j)) for j in range(form.output)]
            for i in range(form.output)
        ]
        places, step = range(form.input), spec.output_step
        with k.loop(0, spec.columns, self.lanes) as c:
            source = self.outputs.at(t * spec.columns + c)
            sums = [[source.load((i * form.input + j) * step, self.lanes) for j in places] for i in places]
            values = _two_sided(self._result_line, sums)
            results = self.results.at_column(c)
            for i in range(form.output):
                with k.when(line + i < lines.count):
                    for j in range(form.output):
                        with k.when(column + j < columns.count):
                            results.store([[values[i * form.output + j]]], [offsets[i][j]], None)

    def _image_line(self, line: Sequence[Val]) -> list[Val]:
        """`form.image` times a vector. The rows of p and -p are even + p * odd and even - p * odd."""
        k, (first, *pairs, last) = self.kernel, self.spec.form.image
        rows = [_combined(k, first, line)]
        for point, row in zip(self.spec.form.points[1::2], pairs[::2], strict=True):
            parity = len(_trimmed(row)) % 2  # of the powers with the sign of the highest one
            even, odd = (_combined(k, [c if (j + parity) % 2 == part else 0 for j, c in enumerate(row)], line, scale)
                         for part, scale in ((1, 1.0), (0, point)))  # fmt: skip
            rows += [k.ops.fma(odd, point, even), k.ops.fma(odd, -point, even)]
        return [*rows, _combined(k, last, line)]

    def _result_line(self, line: Sequence[Val]) -> list[Val]:
        """`form.result` times a vector, by the sums and differences of what belongs to p and -p."""
        k, (first, *pairs, last), points = self.kernel, line, self.spec.form.points[1::2]
        plus, minus = pairs[::2], pairs[1::2]
        sums = [a + b for a, b in zip(plus, minus, strict=True)], [a - b for a, b in zip(plus, minus, strict=True)]
        rows = []
        for power in range(self.spec.form.output):
            ends = {0: [(1.0, first)], self.spec.form.output - 1: [(1.0, last)]}.get(power, [])
            terms = [*ends, *((point**power, value) for point, value in zip(points, sums[power % 2], strict=True))]
            rows.append(_combined(k, [factor for factor, _ in terms], [value for _, value in terms]))
        return rows


def _two_sided(transform: Callable[[Sequence[Val]], list[Val]], grid: Sequence[Sequence[Val]]) -> list[Val]:
    """The transform of the columns of a grid, then of its rows, in reading order."""
    columns = [transform(column) for column in zip(*grid, strict=True)]
    return [value for row in zip(*columns, strict=True) for value in transform(row)]


def _trimmed(row: Sequence[float]) -> Sequence[float]:
    """Without the zeros at its end."""
    return row[: max(j for j, factor in enumerate(row) if factor) + 1]


def _combined(k: Kernel, factors: Sequence[float], values: Sequence[Val], scale: float = 1.0) -> Val:
    """The sum of values times small numbers, divided by `scale`."""
    pairs = sorted(((f / scale, v) for f, v in zip(factors, values, strict=True) if f), key=lambda pair: pair[0] != 1)
    first, value = pairs[0]
    total = value if first == 1 else value * first
    for factor, value in pairs[1:]:
        if factor in (1, -1):
            total = total + value if factor == 1 else total - value
        else:
            total = k.ops.fma(value, factor, total)
    return total
