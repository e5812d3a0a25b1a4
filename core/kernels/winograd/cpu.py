"""Winograd's convolution: transform tiles of the image, multiply matrices for each pair of points, transform back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TypeAlias

from lathe.core.codegen.lang import Index, Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.dim import symbol
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import accumulate, for_each_tile, prefetch_of, zeros
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.shared.panels import packed_size
from lathe.core.kernels.shared.words import WORD_BYTES, word_dtype
from lathe.core.kernels.target import Target
from lathe.core.kernels.winograd.spec import WinogradSpec
from lathe.core.kernels.winograd.transforms_cpu import image_line, result_line

F32, I64 = DType.FLOAT32, DType.INT64
_Offsets: TypeAlias = Callable[[Index, Index], list[Val]]  # the offset of each operand at a place of a tile
Rows: TypeAlias = dict[tuple[bool, bool], Val]  # numbers of tiles, see `_Winograd._rows`


def generate(spec: WinogradSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    few = spec.small_batch_spec
    if few is None:
        _Winograd(k, spec)
    else:
        small = k.dim(spec.batch) < spec.many
        with k.when(small):
            _Winograd(k, few)
        with k.when(~small):
            _Winograd(k, spec)
    return k


@dataclass(frozen=True)
class _Tile:
    """The image of a tile, the line and column of its first result, and for each axis whether the tile is short."""

    image: Val
    corner: tuple[Val, Val]
    short: tuple[Val, Val]


@dataclass(frozen=True)
class _Matrix:
    """The matrix product [rows, depth] by [depth, columns] for a pair of points: its operands' addresses and sizes."""

    inputs: Pointer
    weights: Pointer
    outputs: Pointer
    rows: Val
    depth: int | Val


@dataclass(frozen=True)
class _Columns:
    """The output channels from `start` to `stop`, whole panels, that a task computes."""

    start: Val
    stop: Val


class _Winograd:
    """Generates the code for one form."""

    def __init__(self, k: Kernel, spec: WinogradSpec) -> None:
        self.spec = spec
        self.kernel = k
        self.lanes = spec.tile.lanes
        finish = spec.finish
        self.word = word_dtype(spec.element)
        dtypes = (spec.element, self.word, *finish.extra_dtypes, finish.dtype)
        operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
        self.image, self.weights = operands[0].converting(F32), operands[1]
        self.results = ResultWriter(k, finish.epilogue, tuple(operands[2:]), (*finish.extra_steps, 1))
        self.inputs = k.scratch(len(operands), spec.scratch_words * WORD_BYTES, self.word)
        groups = spec.block // spec.group
        self.outputs = self.inputs.at(groups * spec.matrices * spec.input_step).view(F32)
        self.stage = self.outputs.at(groups * spec.matrices * spec.output_step)
        self.table = self.stage.at(spec.stage_words).view(I64)
        self.zeros = self.table.at(spec.form.input * spec.table_lanes).view(spec.element).converting(F32)
        with k.loop(0, spec.channels, self.lanes) as i:
            self.zeros.store(k.zeros(F32, self.lanes), i)
        self._tasks()

    def _tasks(self) -> None:
        """A task is a block of tiles with all panels of the weights, if there are enough blocks for all threads.

        Otherwise the threads share the panels too: each reads its part of the weights and transforms the image again,
        which takes less time than reading all weights.
        """
        k, spec, width = self.kernel, self.spec, self.spec.tile.columns
        tiles, panels = k.dim(spec.tiles), -(-spec.columns // width)
        blocks = (tiles + (spec.block - 1)) // spec.block
        groups = k.ops.select(blocks < k.threads, k.ops.min(k.threads, panels), 1)
        share, height = k.ops.select(groups > 1, tiles, (tiles + k.threads - 1) // k.threads), spec.tile.rows
        block = k.ops.max(k.ops.min((share + (height - 1)) // height * height, spec.block), 1)
        each = (groups + (panels - 1)) // groups
        columns = each * width
        with k.parallel((tiles + block - 1) // block, (each + (panels - 1)) // each) as (number, group):
            start, first = number * block, group * columns
            stop = k.ops.min(start + block, tiles)
            span = _Columns(first, k.ops.min(first + columns, spec.columns))
            with self._loop(start, stop) as tile:
                self._transform_image(self._tile(tile), self._rows(start, tile))
            self._multiply(self._rows(start, stop), span)
            with self._loop(start, stop) as tile:
                self._transform_results(self._tile(tile), self._rows(start, tile), span)

    @contextmanager
    def _loop(self, start: Index, stop: Index, step: Index = 1) -> Iterator[Val]:
        """A loop over `range(start, stop, step)`; LLVM cannot trace its index (`Kernel.hidden`).

        The body has dozens of addresses that depend on the index, which LLVM would take long to optimize.
        """
        with self.kernel.loop(start, stop, step) as index:
            yield self.kernel.hidden(index)

    # Tiles

    def _coordinates(self, tile: Val) -> tuple[Val, ...]:
        """The image of a tile, and the tile's line and column in it."""
        return self.kernel.unravel(tile, [0, *(axis.tiles for axis in self.spec.covers)])

    def _tile(self, number: Val) -> _Tile:
        k, covers = self.kernel, self.spec.covers
        image, *places = self._coordinates(number)
        line, column = (
            at * axis.output - k.ops.max(at - (axis.whole - 1), 0) if axis.short else at * axis.output
            for at, axis in zip(places, covers, strict=True)
        )
        low, left = (at >= axis.whole for at, axis in zip(places, covers, strict=True))
        return _Tile(image, (line, column), (low, left))

    def _rows(self, start: Val, stop: Val) -> Rows:
        """The numbers of tiles from `start` to `stop` (exclusive), by a key of two flags: for lines and for columns.

        Where a flag is true, only tiles with a value at the point 0 along that axis count, so that short tiles are left
        out.
        """
        before, after = self._preceding(start), self._preceding(stop)
        return {zeros: after[zeros] - before[zeros] for zeros in before}

    def _preceding(self, tile: Val) -> Rows:
        """The numbers of tiles before `tile` in the whole batch, with the keys of `_rows` and their meaning."""
        k, covers = self.kernel, self.spec.covers
        image, line, column = self._coordinates(tile)
        found: Rows = {}
        for upper, left in product((False, True), repeat=2):
            height = covers[0].whole if upper else covers[0].tiles
            width = covers[1].whole if left else covers[1].tiles
            if (height, width) == (covers[0].tiles, covers[1].tiles):
                found[upper, left] = tile
            else:
                rest = k.ops.select(line < height, k.ops.min(column, width), 0)
                found[upper, left] = image * (height * width) + k.ops.min(line, height) * width + rest
        return found

    # The image

    def _transform_image(self, tile: _Tile, rows: Rows) -> None:
        """Transform a tile of the image: store the value of each channel at each pair of points in scratch.

        `rows` are the tile's row numbers in the matrices, as `_rows` counts the tiles before it.
        """
        k, form = self.kernel, self.spec.form
        self._fill_table(tile)
        parts = [range(part, form.input, form.stride) for part in range(form.stride)]
        with self._loop(0, self.spec.channels, self.lanes) as c:
            for (upper, lines), (left, columns) in product(enumerate(parts), repeat=2):
                grid = [[self._place(i, j).load(c, self.lanes) for j in columns] for i in lines]
                values = _transform_2d(partial(image_line, k, form), grid)
                for point, value in zip(product(range(len(lines)), range(len(columns))), values, strict=True):
                    self._store_value(value, c, point, (upper, left), rows)

    def _place(self, i: int, j: int) -> Pointer:
        """The address of the channels at place (i, j) of the tile for which the table is filled."""
        return self.image.at(self.table.load(i * self.spec.table_lanes + j))

    def _store_value(self, value: Val, channel: Val, point: tuple[int, int], part: tuple[int, int], rows: Rows) -> None:
        """Store a vector of values of a part of the image at a pair of points, for channels from `channel` on.

        `part` is the pair of remainders of the part's places by the stride; `rows` as in `_transform_image`.
        """
        spec, form = self.spec, self.spec.form
        (i, j), (upper, left) = point, part
        scale = spec.channels // spec.depth  # elements per word
        stored = F32 if self.word is F32 else spec.element
        inputs, row = self.inputs.view(stored).converting(F32), rows[i == 0, j == 0]
        matrix = (i * form.evaluations + j) * spec.input_step * scale
        place = inputs.at(self._row(row, spec.input_step, spec.row_words) * scale + channel)
        place.store(value, matrix + (upper * form.parts(j) + left) * spec.channels)

    def _row(self, number: Val, step: int, words: int) -> Val:
        """The offset in words of row `number` of the first matrix of a task's intermediates.

        Rows have `words` words; the matrices of a group of tiles are `step` words apart.
        """
        group = self.spec.group
        return number // group * (self.spec.matrices * step) + number % group * words

    def _fill_table(self, tile: _Tile) -> None:
        """Fill the table with the image offsets of all places of a tile; places outside the image point at zeros."""
        k, spec, lanes = self.kernel, self.spec, self.spec.table_lanes
        lines, columns = spec.windows
        line, column = tile.corner
        x = (k.lane_numbers(lanes) + (column * columns.stride - columns.before)).cast(DType.INT32)
        within = (x >= 0) & (x < columns.size)
        outside = self.zeros.distance_from(self.image)
        for i in range(spec.form.input):
            y = line * lines.stride - lines.before + i
            inside = within & ((y >= 0) & (y < lines.size)).splat(lanes)
            offset = (x.cast(I64) + (tile.image * lines.size + y) * columns.size) * spec.channels
            self.table.store(k.ops.select(inside, offset, outside), i * lanes)

    # Products

    def _multiply(self, rows: Rows, span: _Columns) -> None:
        """Multiply [tiles, depth] by [depth, columns] for each pair of points, panel by panel of the channels `span`.

        `rows` are the numbers of tiles, as `_rows` counts them.
        """
        k, spec = self.kernel, self.spec
        rest = spec.columns % spec.tile.columns
        full = spec.columns - rest
        with self._loop(0, spec.matrices) as number:
            matrix = self._matrix(number, rows)
            with self._loop(span.start, k.ops.min(span.stop, full), spec.tile.columns) as first:
                self._panel(matrix, first, spec.tile.columns, span)
            if rest:
                with k.when(span.stop > full):
                    self._panel(matrix, k.index(full), rest, span)

    def _matrix(self, number: Val, rows: Rows) -> _Matrix:
        k, spec, form = self.kernel, self.spec, self.spec.form
        i, j = k.unravel(number, [0, form.evaluations])
        height, width = (k.ops.select(at < len(form.points), k.index(form.stride), 1) for at in (i, j))
        before = self._matrices_before(i, j, height)
        upper, lower = (k.ops.select(j.equals(0), rows[zero, True], rows[zero, False]) for zero in (True, False))
        return _Matrix(
            self.inputs.at(number * spec.input_step),
            self.weights.at(before * packed_size(spec.depth, spec.columns, spec.tile)),
            self.outputs.at(number * spec.output_step),
            k.ops.select(i.equals(0), upper, lower),
            spec.depth if form.stride == 1 else height * width * spec.depth,
        )

    def _matrices_before(self, i: Val, j: Val, height: Val) -> Val:
        """The number of packed weight matrices, one per part of the image, before those of the points i and j.

        `height` is the number of parts along the lines at point i.
        """
        k, form = self.kernel, self.spec.form
        if form.whole is None:
            return (i * form.line_products + height * j) * form.stride
        line, column = (k.ops.select(at < len(form.points), at, form.infinity) for at in (i, j))
        return line * form.whole.line_products + column

    def _panel(self, matrix: _Matrix, first: Val, columns: int, span: _Columns) -> None:
        """Compute `columns` columns of a product from `first` on. Rows that pad the last tile hold arbitrary numbers.

        Meanwhile the next panel of the span is prefetched; after the last panel, the first panel of the next product.
        """
        k, spec = self.kernel, self.spec
        target, depth = matrix.outputs.at(first), matrix.depth
        panel = matrix.weights.at(first * depth)
        around = packed_size(1, spec.columns, spec.tile) - first + span.start
        further = k.ops.select(first + columns < span.stop, k.index(columns), around) * depth

        def tile(at: Val, height: int) -> None:
            row = k.hidden(at)
            grid = zeros(k, height, columns // self.lanes, self.lanes)
            first = matrix.inputs.at(self._row(row, spec.input_step, spec.row_words))
            sources = [first.at(r * spec.row_words) for r in range(height)]
            ahead, number = None, row // spec.tile.rows
            if height == spec.tile.rows:
                ahead = prefetch_of(panel, further, columns, spec.tile, number, spec.tiles_ahead, depth)
            grid = accumulate(
                k, grid, sources, 1, panel, columns, depth,
                element=spec.element, ahead=ahead, panel_vectors=spec.tile.vectors,
            )  # fmt: skip
            results = target.at(self._row(row, spec.output_step, spec.columns))
            for r, values in enumerate(grid):
                for v, value in enumerate(values):
                    results.store(value, r * spec.columns + v * self.lanes)

        step = spec.tile.rows // 2 if spec.tile.rows % 2 == 0 else 1  # so that two tile heights suffice
        rows = (matrix.rows + (step - 1)) // step * step
        for_each_tile(k, k.index(0), rows, symbol("n") * step, spec.tile.rows, tile)

    # Results

    def _transform_results(self, tile: _Tile, rows: Rows, span: _Columns) -> None:
        """Transform a tile's products back and store its results for the channels `span`, as far as they exist.

        `rows` as in `_transform_image`.
        """
        k, spec, form = self.kernel, self.spec, self.spec.form
        lines, columns = spec.windows
        line, column = tile.corner
        pixel = (tile.image * lines.count + line) * columns.count + column

        def offsets(i: Index, j: Index) -> list[Val]:
            return offsets_of(k, spec.finish.pixels, pixel + i * columns.count + j)

        places = list(product(range(form.output), repeat=2))
        known = [offsets(i, j) for i, j in places] if not spec.stage_words else []
        with self._loop(span.start, span.stop, self.lanes) as c:
            sums = [[self._product(c, i, j, rows) for j in range(form.evaluations)] for i in range(form.evaluations)]
            values = _transform_2d(partial(result_line, k, form), sums)
            if spec.stage_words:
                self._finish_staged(tile, values, self.results.at_column(c), offsets)
            else:
                self._finish(tile, values, self.results.at_column(c), known)

    def _finish(
        self, tile: _Tile, values: Sequence[Val], results: ResultWriter, offsets: Sequence[Sequence[Val]]
    ) -> None:
        """Run the epilogue on a vector of sums for each place of a tile, and store those that exist.

        `values` and `offsets` (of the extras and Y) are in row-major order of the places.
        """
        places = range(self.spec.form.output)
        for i in places:
            with self._when_inside(tile, 0, i):
                for j in places:
                    with self._when_inside(tile, 1, j):
                        number = i * len(places) + j
                        results.store([[values[number]]], [offsets[number]], None)

    def _finish_staged(self, tile: _Tile, values: Sequence[Val], results: ResultWriter, offsets: _Offsets) -> None:
        """Like `_finish`, with the epilogue in a loop over the places, since its code is too long to be repeated.

        `offsets(i, j)` gives the offsets of the extras and Y at place (i, j).
        """
        k = self.kernel
        for place, value in enumerate(values):
            self.stage.store(value, place * self.lanes)
        with k.loop(0, len(values)) as number:
            i, j = k.unravel(number, [0, self.spec.form.output])
            with k.when(self._is_inside(tile, 0, i) & self._is_inside(tile, 1, j)):
                results.finish_line(self.stage.at(number * self.lanes), offsets(i, j), 1, self.lanes, None)

    def _is_inside(self, tile: _Tile, axis: int, number: Val) -> Val:
        """Whether result `number` of a tile along an axis exists and the tile computes it (not 0 in a short tile)."""
        inside = tile.corner[axis] + number < self.spec.windows[axis].count
        return inside & ~(tile.short[axis] & number.equals(0)) if self.spec.covers[axis].short else inside

    def _product(self, column: Val, i: int, j: int, rows: Rows) -> Val:
        """A vector of a tile's products at the pair of points (i, j), for channels from `column` on."""
        spec = self.spec
        number = i * spec.form.evaluations + j
        row = self.outputs.at(self._row(rows[i == 0, j == 0], spec.output_step, spec.columns) + column)
        return row.load(number * spec.output_step, self.lanes)

    @contextmanager
    def _when_inside(self, tile: _Tile, axis: int, number: int) -> Iterator[None]:
        """Code written inside runs if result `number` of a tile along an axis exists and the tile computes it."""
        k, count = self.kernel, self.spec.windows[axis].count
        with ExitStack() as stack:
            if self.spec.covers[axis].short and number == 0:
                stack.enter_context(k.when(~tile.short[axis]))
            stack.enter_context(k.when(tile.corner[axis] + number < count))
            yield


def _transform_2d(transform: Callable[[Sequence[Val]], list[Val]], grid: Sequence[Sequence[Val]]) -> list[Val]:
    """The transform applied to the columns of a grid, then to its rows; values in row-major order."""
    columns = [transform(column) for column in zip(*grid, strict=True)]
    return [value for row in zip(*columns, strict=True) for value in transform(row)]
