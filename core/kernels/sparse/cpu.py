"""Products with weights of many zeros: rows of A are transposed, then each weight multiplies vectors of them."""

from __future__ import annotations

from math import prod

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import Grid
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.register_shuffles import transpose_rows
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.shared.panels import LINE
from lathe.core.kernels.sparse.spec import COLUMNS, GROUP, SparseSpec, table_places
from lathe.core.kernels.target import Target

F32, I32 = DType.FLOAT32, DType.INT32
_TASKS_PER_THREAD = 4


def generate(spec: SparseSpec, target: Target) -> Kernel:
    return _Sparse(spec, target).kernel


class _Sparse:
    """Writes the kernel of one spec."""

    def __init__(self, spec: SparseSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        finish = spec.finish
        self.a, table = k.operand(0, F32), k.operand(1, I32)
        self.starts, self.places, self.entries = (table.at(at) for at in table_places(spec.columns))
        results = (*finish.extra_dtypes, finish.dtype)
        operands = tuple(k.operand(2 + i, dtype) for i, dtype in enumerate(results))
        self.unrolls = not (finish.deferred or finish.staged)  # whether a short epilogue is written for each row
        self.results = ResultWriter(k, finish.epilogue, operands, (*finish.extra_steps, 1))
        block, sums, _ = spec.scratch_words
        self.block = k.scratch(2 + len(results), sum(spec.scratch_words) * F32.itemsize, F32)
        self.sums = self.block.at(block)
        self.lines = self.sums.at(sums)
        self.rows = k.dim(spec.rows)
        self._share_tasks()

    def _share_tasks(self) -> None:
        """Split the product into tasks: a block of rows, and all blocks of columns, or some if there are few rows."""
        k, spec = self.kernel, self.spec
        height = spec.block_rows
        count = (self.rows + (height - 1)) // height
        least = k.ops.select(k.threads.equals(1), 1, k.threads * _TASKS_PER_THREAD)
        some = k.ops.max(count, 1)
        groups = k.ops.min((least + some - 1) // some, spec.blocks)
        width = (groups + (spec.blocks - 1)) // groups
        with k.parallel(count, groups) as (part, group):
            start, first = part * height, group * width
            size = k.ops.min(self.rows - start, height)
            last = k.ops.min(first + width, spec.blocks)
            for i, (vectors, lanes) in enumerate(spec.variants):
                fewer = prod(spec.variants[i + 1]) if i + 1 < len(spec.variants) else 0
                with k.when((size > fewer) & (size <= vectors * lanes)):
                    self._rows(start, size, first, last, vectors, lanes)

    def _rows(self, start: Val, size: Val, first: Val, last: Val, vectors: int, lanes: int) -> None:
        """Compute `size` rows, at most `vectors` * `lanes`, of the blocks of columns `first` to `last`."""
        k, spec = self.kernel, self.spec
        with k.loop(0, vectors) as vector:
            self._transpose(start + vector * lanes, vector * lanes, vectors * lanes, lanes)
        for v in range(vectors):
            self.block.store(k.zeros(F32, lanes), spec.depth * vectors * lanes + v * lanes)
        with k.loop(first, last) as block:
            self._prefetch_results(start, size, block)
            self._prefetch_rows(start + vectors * lanes, block, vectors * lanes)
            with k.loop(0, COLUMNS // GROUP) as bank:
                self._multiply(block * (COLUMNS // GROUP) + bank, vectors, lanes)
            self._finish(start, size, block, vectors, lanes)

    def _prefetch_results(self, start: Val, size: Val, block: Val) -> None:
        """Prefetch the places of a block of results: lines are read before they are written."""
        y = self.results.operands[-1].at(block * COLUMNS)
        with self.kernel.loop(start, start + size) as row:
            y.at(self._offsets(row)[-1]).prefetch()

    def _prefetch_rows(self, start: Val, block: Val, rows: int) -> None:
        """Prefetch this block's share of the `rows` rows of A from `start` on, which are transposed next.

        Memory is idle while sums add up.
        """
        k, spec = self.kernel, self.spec
        share = -(-rows // spec.blocks)
        first = start + block * share
        with k.loop(first, k.ops.min(first + share, k.ops.min(start + rows, self.rows))) as row:
            line = self.a.at(offsets_of(k, spec.source, row)[0])
            with k.loop(0, spec.depth, LINE) as column:
                line.prefetch(column)

    def _transpose(self, row: Val, place: Val, pitch: int, lanes: int) -> None:
        """Copy `lanes` rows of A from `row` on to column `place` of the transposed block, [depth, pitch].

        Rows after the last one are copies of it: their results are not stored.
        """
        k, depth = self.kernel, self.spec.depth
        at = [k.ops.min(row + i, self.rows - 1) for i in range(lanes)]
        sources = [self.a.at(offsets_of(k, self.spec.source, each)[0]) for each in at]
        target = self.block.at(place)
        whole = depth // lanes * lanes

        def square(i: Val, valid: int) -> None:
            mask = k.lane_mask(valid, lanes) if valid < lanes else None
            lines = transpose_rows(k, [source.load(i, lanes, mask) for source in sources])
            for step, line in enumerate(lines[:valid]):
                target.store(line, (i + step) * pitch)

        with k.loop(0, whole, lanes) as i:
            square(i, lanes)
        if depth > whole:
            square(k.index(whole), depth - whole)

    def _multiply(self, group: Val, vectors: int, lanes: int) -> None:
        """Write the sums of a group of columns to their places in `sums`, [column, row]."""
        k, pitch = self.kernel, vectors * lanes
        begin, end = (self.starts.load(group + i).cast(DType.INT64) for i in range(2))
        with k.fold(begin, end, [k.zeros(F32, lanes) for _ in range(GROUP * vectors)]) as fold:
            values = list(fold.values)
            entry = self.entries.at(fold.index * (2 * GROUP))
            for j in range(GROUP):
                line = self.block.at(entry.load(j).cast(DType.INT64) * pitch)
                weight = entry.view(F32).load(GROUP + j).splat(lanes)
                for v in range(vectors):
                    at = j * vectors + v
                    values[at] = k.ops.fma(weight, line.load(v * lanes, lanes), values[at])
            fold.values = values
        for j in range(GROUP):
            place = self.sums.at(self.places.load(group * GROUP + j).cast(DType.INT64) * pitch)
            for v in range(vectors):
                place.store(fold.values[j * vectors + v], v * lanes)

    def _finish(self, start: Val, size: Val, block: Val, vectors: int, lanes: int) -> None:
        """Transpose the sums of a block of columns back, run the epilogue on them, and store them."""
        k, pitch, (whole, rest) = self.kernel, vectors * lanes, divmod(self.spec.columns, COLUMNS)
        full = size // lanes * lanes if self.unrolls else k.index(0)
        for columns in filter(None, (COLUMNS if whole else 0, rest)):
            squares = -(-columns // lanes)
            with k.when(block < whole if columns == COLUMNS else block.equals(whole)):
                if self.unrolls:
                    with k.loop(0, full, lanes) as row:
                        grid = self._rows_of_sums(row, squares, pitch, lanes)
                        self._store_tile(grid, start + row, block, columns)
                with k.loop(full, size, lanes) as row:
                    grid = self._rows_of_sums(row, squares, pitch, lanes)
                    self._store_lines(grid, start + row, k.ops.min(size - row, lanes), block, columns)

    def _rows_of_sums(self, row: Val, squares: int, pitch: int, lanes: int) -> Grid:
        """The sums of `lanes` rows from `row` on, by transposition of `squares` squares."""
        k = self.kernel
        grid: Grid = [[] for _ in range(lanes)]
        for square in range(squares):
            lines = [self.sums.at((square * lanes + i) * pitch).load(row, lanes) for i in range(lanes)]
            for values, line in zip(grid, transpose_rows(k, lines), strict=True):
                values.append(line)
        return grid

    def _store_tile(self, grid: Grid, row: Val, block: Val, columns: int) -> None:
        """Finish the first `columns` sums of whole rows, and store the results."""
        k, lanes = self.kernel, grid[0][0].lanes
        mask = k.lane_mask(columns % lanes, lanes) if columns % lanes else None
        self.results.at_column(block * COLUMNS).store_tile(grid, row, self._offsets, mask)

    def _store_lines(self, grid: Grid, row: Val, count: Val, block: Val, columns: int) -> None:
        """The same for the first `count` rows of the grid."""
        k, lanes, width = self.kernel, grid[0][0].lanes, len(grid[0])
        for i, values in enumerate(grid):
            for v, value in enumerate(values):
                self.lines.store(value, (i * width + v) * lanes)
        mask = k.lane_mask(columns % lanes, lanes) if columns % lanes else None
        results = self.results.at_column(block * COLUMNS)
        with k.loop(0, count) as line:
            results.finish_line(self.lines.at(line * (width * lanes)), self._offsets(row + line), width, lanes, mask)

    def _offsets(self, row: Val) -> list[Val]:
        """The offsets of the extras and of Y in row `row`."""
        return offsets_of(self.kernel, self.spec.finish.pixels, row)
