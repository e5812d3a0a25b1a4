"""Strassen's algorithm in Winograd's form: per pair of register tiles, seven products of half the depth.

With A and B in quarters (rows and depth of A, depth and columns of B):

    S1 = A21 + A22   S2 = S1 - A11   S3 = A11 - A21   S4 = A12 - S2
    T1 = B12 - B11   T2 = B22 - T1   T3 = B22 - B12   T4 = B21 - T2
    U1 = A11 B11     C11 = U1 + A12 B21
    U2 = U1 + S2 T2  U3 = U2 + S3 T3  C21 = U3 + A22 T4
                     C22 = U3 + S1 T1  C12 = U2 + S1 T1 + S4 B22

The products follow each other in this order in one loop, so that their code exists once. The accumulators go from one
product to the next.
"""

from __future__ import annotations

from typing import NamedTuple

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import Grid, accumulate, prefetch_of, zeros
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.strassen.spec import PRODUCTS, StrassenSpec
from lathe.core.kernels.target import Target

F32 = DType.FLOAT32

_TASKS_PER_THREAD = 4
_S3, _S1 = 3, 5
_FROM_SAVED = (2, _S1)  # products that are added to the saved U1 or U3
_SAVING = (0, 2, _S3)  # products after which U1, U2 (in the place of U1), and U3 are saved
_FINISHING = (1, 4, _S1, 6)  # products after which a quarter of the result is complete:
_LOWER, _RIGHT = (4, _S1), (_S1, 6)  # the quarter is in the lower, or in the right half


class _Factors(NamedTuple):
    """The factors of one product: its index (0 to 6), and the indices of a tile of the task and of a pair of panels."""

    product: Val
    tile: Val
    pair: Val


def generate(spec: StrassenSpec, target: Target) -> Kernel:
    return _Strassen(spec, target).kernel


class _Strassen:
    """Writes the kernel of one spec."""

    def __init__(self, spec: StrassenSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        self.tile, self.lanes, finish = spec.tile, spec.tile.lanes, spec.finish
        self.size = spec.tile.rows * spec.tile.columns
        dtypes = (F32, F32, *finish.extra_dtypes, finish.dtype)
        self.a, self.b, *rest = (k.operand(i, dtype) for i, dtype in enumerate(dtypes))
        self.results = ResultWriter(k, finish.epilogue, tuple(rest), (*finish.extra_steps, 1), finish.deferred)
        self.factors = k.scratch(len(dtypes), spec.scratch_bytes, F32)
        self.kept = self.factors.at(spec.block * spec.factor_words)
        self._tasks()

    def _tasks(self) -> None:
        """Generate the loop over tasks. A task is a block of tiles with all pairs of panels.

        If there are too few blocks for the threads, the pairs of panels of a block are divided among several tasks.
        """
        k, spec = self.kernel, self.spec
        tiles = k.dim(spec.samples * spec.tiles)
        blocks = (tiles + (spec.block - 1)) // spec.block
        blocks_or_one = k.ops.max(blocks, 1)  # an empty batch has none
        height = (tiles + blocks_or_one - 1) // blocks_or_one
        wanted = k.ops.select(k.threads.equals(1), 1, k.threads * _TASKS_PER_THREAD)
        parts = k.ops.min((wanted + blocks_or_one - 1) // blocks_or_one, spec.pairs)
        width = (parts + (spec.pairs - 1)) // parts
        with k.parallel(blocks, parts) as (block, part):
            start, first = block * height, part * width
            count = k.ops.min(height, tiles - start)
            self._task(start, count, first, k.ops.min(first + width, spec.pairs))

    def _task(self, start: Val, count: Val, first: Val, stop: Val) -> None:
        """Compute `count` tiles (none if it is negative) for the pairs of panels from `first` to `stop`."""
        k = self.kernel
        with k.loop(0, count) as number:
            self._factors(start + number, number)
        with k.loop(first, stop) as pair:
            if self.spec.in_turn:
                self._compute_in_turn(start, count, pair)
            else:
                self._compute_at_once(start, count, pair)

    def _place(self, tile: Val) -> tuple[Val, Val]:
        """The number of the first row of a tile's upper half: counted in the whole batch, and in its sample."""
        sample, number = self.kernel.unravel(tile, [0, self.spec.tiles])
        row = number * self.tile.rows
        return sample * self.spec.rows + row, row

    # Left factors

    def _factors(self, tile: Val, number: Val) -> None:
        """Compute the left factors of the seven products of a tile, each [rows][pitch], in scratch.

        `number` is the tile's index in the task. Rows beyond the sample's last one repeat it.
        """
        k, spec = self.kernel, self.spec
        first, row = self._place(tile)
        target = self.factors.at(number * spec.factor_words)
        with k.loop(0, self.tile.rows) as r:
            rows = [first + r, first + r + spec.first_rows]
            if not spec.is_even:
                rows = [k.ops.min(at, first - row + (spec.rows - 1)) for at in rows]
            upper, lower = (self.a.at(offsets_of(k, spec.source, at)[0]) for at in rows)
            with k.loop(0, spec.half, self.lanes) as i:
                a11, a12, a21, a22 = (p.load(i + at, self.lanes) for p in (upper, lower) for at in (0, spec.half))
                s1 = a21 + a22
                s2 = s1 - a11
                for p, value in enumerate((a11, a12, s2, a11 - a21, a22, s1, a12 - s2)):
                    target.store(value, (r + p * self.tile.rows) * spec.pitch + i)

    # Products

    def _compute_at_once(self, start: Val, count: Val, pair: Val) -> None:
        """Compute all seven products of a pair of panels tile by tile; the accumulators stay in registers."""
        k = self.kernel
        with k.loop(0, count) as number:
            with k.fold(0, PRODUCTS, self._zeros()) as fold:
                factors = _Factors(fold.index, number, pair)
                fold.values = self._product(factors, start + number, fold.values, self.kept)
            if self.spec.finish.deferred:
                self._finish(start + number, pair)

    def _compute_in_turn(self, start: Val, count: Val, pair: Val) -> None:
        """Compute a pair of panels product by product, each for all tiles; meanwhile accumulators lie in scratch."""
        k = self.kernel
        with k.loop(0, PRODUCTS) as p, k.loop(0, count) as number:
            kept = self.kept.at(number * (3 * self.size))
            saved_sums = kept.at(2 * self.size)
            sums = k.choose(p.equals(0), self._zeros, lambda: self._load(saved_sums))
            self._save(self._product(_Factors(p, number, pair), start + number, sums, kept), saved_sums)
        if self.spec.finish.deferred:
            with k.loop(0, count) as number:
                self._finish(start + number, pair)

    def _product(self, factors: _Factors, tile: Val, sums: list[Val], kept: Pointer) -> list[Val]:
        """Compute one product of a tile, and store the results that it completes.

        `sums` are the accumulators before it; returns those before the next product. `kept` is memory for U2 and U3.
        """
        k, spec, width = self.kernel, self.spec, self.tile.columns
        p, number, pair = factors.product, factors.tile, factors.pair
        left = self.factors.at(number * spec.factor_words + p * (self.tile.rows * spec.pitch))
        panel = spec.half * width
        right = self.b.at((pair * PRODUCTS + p) * panel)
        u = kept.at(self._if(p, (_S1,)) * self.size)
        begin = k.choose(_is_any(p, _FROM_SAVED), lambda: self._load(u), lambda: sums)
        rows = [left.at(r * spec.pitch) for r in range(self.tile.rows)]
        further = panel if spec.in_turn else PRODUCTS * panel
        ahead = prefetch_of(right, further, width, self.tile, number, min(spec.block, spec.tiles), spec.half)
        lower, column = self._if(p, _LOWER), (pair * 2 + self._if(p, _RIGHT)) * width
        with k.when(_is_any(p, _FINISHING)):
            self._fetch(tile, lower, column)
        grid = accumulate(k, self._grid(begin), rows, 1, right, width, spec.half, ahead=ahead)
        with k.when(_is_any(p, _SAVING)):
            self._save(_flat(grid), kept.at(self._if(p, (_S3,)) * self.size))
        with k.when(_is_any(p, _FINISHING)):
            self._emit(grid, tile, lower, column)
        return k.choose(p.equals(_S1), lambda: self._with_u2(_flat(grid), kept), lambda: _flat(grid))

    def _with_u2(self, sums: list[Val], kept: Pointer) -> list[Val]:
        """U2 + S1 T1, given `sums`, which are U3 + S1 T1; U2 and U3 lie at `kept`."""
        u2, u3 = self._load(kept), self._load(kept.at(self.size))
        return [value - old + new for value, old, new in zip(sums, u3, u2, strict=True)]

    def _if(self, p: Val, numbers: tuple[int, ...]) -> Val:
        """1 if `p` is one of the `numbers`, otherwise 0."""
        return self.kernel.ops.select(_is_any(p, numbers), self.kernel.index(1), 0)

    def _zeros(self) -> list[Val]:
        return _flat(zeros(self.kernel, self.tile.rows, self.tile.vectors, self.lanes))

    def _save(self, sums: list[Val], place: Pointer) -> None:
        for i, value in enumerate(sums):
            place.store(value, i * self.lanes)

    def _load(self, place: Pointer) -> list[Val]:
        return [place.load(i, self.lanes) for i in range(0, self.size, self.lanes)]

    def _grid(self, values: list[Val]) -> Grid:
        return [values[i : i + self.tile.vectors] for i in range(0, len(values), self.tile.vectors)]

    # Results

    def _fetch(self, tile: Val, lower: Val, column: Val) -> None:
        """Prefetch the extra inputs of a tile's results from `column` on: of its lower half if `lower` is 1.

        Addresses of rows beyond the last one do no harm.
        """
        first = self._place(tile)[0] + lower * self.spec.first_rows
        rows = [self._offsets(first + r) for r in range(self.tile.rows)]
        self.results.at_column(column).fetch(rows, self.tile.columns)

    def _emit(self, grid: Grid, tile: Val, lower: Val, column: Val) -> None:
        """Run the epilogue (unless deferred) on `grid`, the sums of half a tile from `column` on, and store them.

        It is the tile's lower half if `lower` is 1. Rows beyond the sample's last one are not stored.
        """
        k, spec = self.kernel, self.spec
        first, row = self._place(tile)
        results, first = self.results.at_column(column), first + lower * spec.first_rows
        if spec.is_even:
            results.store(grid, [self._offsets(first + r) for r in range(len(grid))], None)
            return
        rows = self._rows(lower, row)
        for r, values in enumerate(grid):
            with k.when(rows > r):
                results.store([values], [self._offsets(first + r)], None)

    def _rows(self, lower: Val, row: Val) -> Val:
        """The number of rows in the upper (`lower` 0) or lower (1) half of a tile.

        `row` is the tile's first row in the half sample.
        """
        spec = self.spec
        return self.kernel.ops.min(self.kernel.index(spec.first_rows) - lower * (spec.rows % 2) - row, self.tile.rows)

    def _finish(self, tile: Val, pair: Val) -> None:
        """Run the deferred epilogue over both halves of a tile, for both panels."""
        k, width = self.kernel, self.tile.columns
        first, row = self._place(tile)
        with k.loop(0, 2) as lower, k.loop(pair * (2 * width), (pair + 1) * (2 * width), width) as column:
            start, count = first + lower * self.spec.first_rows, self._rows(lower, row)
            self.results.at_column(column).finish(start, start + count, width, self.lanes, self._offsets)

    def _offsets(self, row: Val) -> list[Val]:
        """The offsets of the extras and of Y, in elements, in row `row` of the batch."""
        return offsets_of(self.kernel, self.spec.finish.pixels, row)


def _is_any(value: Val, numbers: tuple[int, ...]) -> Val:
    first, *rest = (value.equals(number) for number in numbers)
    for condition in rest:
        first = first | condition
    return first


def _flat(grid: Grid) -> list[Val]:
    return [value for row in grid for value in row]
