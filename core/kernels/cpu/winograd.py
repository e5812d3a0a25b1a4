"""Winograd's convolution: transform tiles of the image, 36 matrix products, transform back."""

from __future__ import annotations

from collections.abc import Sequence

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.dim import symbol
from core.ir.types import DType
from core.kernels.catalog.panels import packed_size
from core.kernels.catalog.winograd import IMAGE, INPUT, OUTPUT, PRODUCTS, RESULT, TABLE_LANES, WinogradSpec
from core.kernels.catalog.words import WORD_BYTES, word_dtype
from core.kernels.cpu.microkernel import accumulate, each_tile, zeros
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
        self.outputs = self.inputs.at(PRODUCTS * spec.block * spec.depth).view(F32)
        self.table = self.outputs.at(PRODUCTS * spec.block * spec.columns).view(I64)
        self.zeros = self.table.at(INPUT * TABLE_LANES).view(spec.element).computing(F32)
        with k.loop(0, spec.channels, self.lanes) as i:
            self.zeros.store(k.zeros(F32, self.lanes), i)
        self._tasks()

    def _tasks(self) -> None:
        """A task is a block of tiles, a smaller one when there are too few for all threads."""
        k, spec = self.kernel, self.spec
        tiles = k.dim(spec.tiles)
        share = (tiles + k.threads - 1) // k.threads
        height = spec.tile.rows
        block = k.ops.min((share + (height - 1)) // height * height, spec.block)
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
        return image, line * OUTPUT, column * OUTPUT

    def _transform_image(self, tile: Val, t: Val) -> None:
        """36 vectors per vector of channels, each into a matrix of its own."""
        k, spec = self.kernel, self.spec
        self._fill_table(tile)
        size = spec.block * spec.channels
        with k.loop(0, spec.channels, self.lanes) as c:
            places = [[self._place(i, j).load(c, self.lanes) for j in range(INPUT)] for i in range(INPUT)]
            target = self.inputs.view(spec.element).computing(F32).at(t * spec.channels + c)
            for p, value in enumerate(self._two_sided(IMAGE, places)):
                target.store(value, p * size)

    def _place(self, i: int, j: int) -> Pointer:
        """The channels at one of the 6x6 places of the tile at hand."""
        return self.image.at(self.table.load(i * TABLE_LANES + j))

    def _fill_table(self, tile: Val) -> None:
        """The offsets of the channels at the 6x6 places of a tile; those of zeros outside the image."""
        k, spec = self.kernel, self.spec
        lines, columns = spec.windows
        image, line, column = self._corner(tile)
        x = (k.lane_numbers(TABLE_LANES) + (column - columns.before)).cast(DType.INT32)
        within = (x >= 0) & (x < columns.size)
        outside = self.zeros.distance_from(self.image)
        for i in range(INPUT):
            y = line - lines.before + i
            inside = within & ((y >= 0) & (y < lines.size)).splat(TABLE_LANES)
            offset = (x.cast(I64) + (image * lines.size + y) * columns.size) * spec.channels
            self.table.store(k.ops.select(inside, offset, outside), i * TABLE_LANES)

    def _multiply(self, count: Val) -> None:
        """[count, channels] by [channels, columns], 36 times, panel by panel."""
        k, spec = self.kernel, self.spec
        full, rest = divmod(spec.columns, spec.tile.columns)
        with k.loop(0, PRODUCTS) as p:
            with k.loop(0, full * spec.tile.columns, spec.tile.columns) as first:
                self._panel(p, first, spec.tile.columns, count)
            if rest:
                self._panel(p, k.index(full * spec.tile.columns), rest, count)

    def _panel(self, p: Val, first: Val, columns: int, count: Val) -> None:
        """Product number `p`, for the columns from `first` on."""
        k, spec = self.kernel, self.spec
        source = self.inputs.at(p * (spec.block * spec.depth))
        target = self.outputs.at(p * (spec.block * spec.columns) + first)
        panel = self.weights.at(p * packed_size(spec.depth, spec.columns, spec.tile) + first * spec.depth)
        vectors = columns // self.lanes

        def tile(row: Val, height: int) -> None:
            sources = [source.at((row + r) * spec.depth) for r in range(height)]
            grid = zeros(k, height, vectors, self.lanes)
            grid = accumulate(k, grid, sources, 1, panel, columns, spec.depth, element=spec.element)
            for r, values in enumerate(grid):
                for v, value in enumerate(values):
                    target.store(value, (row + r) * spec.columns + v * self.lanes)

        each_tile(k, k.index(0), count, symbol("n"), spec.tile.rows, tile)

    def _transform_results(self, tile: Val, t: Val) -> None:
        """4x4 results per vector of channels, as far as they lie in the result."""
        k, spec = self.kernel, self.spec
        lines, columns = spec.windows
        image, line, column = self._corner(tile)
        pixel = (image * lines.count + line) * columns.count + column
        offsets = [
            [offsets_of(k, spec.finish.pixels, pixel + (i * columns.count + j)) for j in range(OUTPUT)]
            for i in range(OUTPUT)
        ]
        size = spec.block * spec.columns
        with k.loop(0, spec.columns, self.lanes) as c:
            source = self.outputs.at(t * spec.columns + c)
            sums = [[source.load((i * INPUT + j) * size, self.lanes) for j in range(INPUT)] for i in range(INPUT)]
            values = self._two_sided(RESULT, sums)
            results = self.results.at_column(c)
            for i in range(OUTPUT):
                with k.when(line + i < lines.count):
                    for j in range(OUTPUT):
                        with k.when(column + j < columns.count):
                            results.store([[values[i * OUTPUT + j]]], [offsets[i][j]], None)

    def _two_sided(self, matrix: Sequence[Sequence[float]], grid: Sequence[Sequence[Val]]) -> list[Val]:
        """`matrix` times `grid` times the transpose of `matrix`, in reading order."""
        half = [[self._combine(row, column) for column in zip(*grid, strict=True)] for row in matrix]
        return [self._combine(row, line) for line in half for row in matrix]

    def _combine(self, factors: Sequence[float], values: Sequence[Val]) -> Val:
        """The sum of values times small numbers."""
        k = self.kernel
        pairs = sorted(((f, v) for f, v in zip(factors, values, strict=True) if f), key=lambda pair: pair[0] != 1)
        first, value = pairs[0]
        total = value if first == 1 else value * float(first)
        for factor, value in pairs[1:]:
            if factor in (1, -1):
                total = total + value if factor == 1 else total - value
            else:
                total = k.ops.fma(value, float(factor), total)
        return total
