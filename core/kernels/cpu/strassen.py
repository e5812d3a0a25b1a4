"""Strassen's algorithm in Winograd's form: per pair of register tiles, seven products of half the depth.

With A and B in quarters (rows and depth of A, depth and columns of B):

    S1 = A21 + A22   S2 = S1 - A11   S3 = A11 - A21   S4 = A12 - S2
    T1 = B12 - B11   T2 = B22 - T1   T3 = B22 - B12   T4 = B21 - T2
    U1 = A11 B11     C11 = U1 + A12 B21
    U2 = U1 + S2 T2  U3 = U2 + S3 T3  C21 = U3 + A22 T4
                     C22 = U3 + S1 T1  C12 = U2 + S1 T1 + S4 B22

The products follow each other in this order in one loop, so that their code is there once; the accumulators go from one
to the next.
"""

from __future__ import annotations

from typing import NamedTuple

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.types import DType
from core.kernels.catalog.strassen import PRODUCTS, StrassenSpec
from core.kernels.cpu.microkernel import Grid, accumulate, ahead_of, zeros
from core.kernels.cpu.nest import offsets_of
from core.kernels.cpu.results import Results
from core.kernels.target import Target

F32 = DType.FLOAT32

_TASKS_PER_THREAD = 4
_S3, _S1 = 3, 5
_FROM_KEPT = (2, _S1)  # products that are added to U1 or to U3
_KEEPING = (0, 2, _S3)  # those behind which U1, U2 in its place, and U3 are kept
_FINISHING = (1, 4, _S1, 6)  # those behind which a quarter of the result is done:
_LOWER, _RIGHT = (4, _S1), (_S1, 6)


class _Factors(NamedTuple):
    """Which of the seven products, of which of the task's tiles and of which pair of panels."""

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
        self.results = Results(k, finish.epilogue, tuple(rest), (*finish.extra_steps, 1), finish.deferred)
        self.factors = k.scratch(len(dtypes), spec.scratch_bytes, F32)
        self.kept = self.factors.at(spec.block * spec.factor_words)
        self._tasks()

    def _tasks(self) -> None:
        """Blocks of tiles; a team that has too few of them also shares the columns."""
        k, spec = self.kernel, self.spec
        tiles = k.dim(spec.samples * spec.tiles)
        blocks = (tiles + (spec.block - 1)) // spec.block
        some = k.ops.max(blocks, 1)  # an empty batch has none
        height = (tiles + some - 1) // some
        wanted = k.ops.select(k.threads.equals(1), 1, k.threads * _TASKS_PER_THREAD)
        parts = k.ops.min((wanted + some - 1) // some, spec.pairs)
        width = (parts + (spec.pairs - 1)) // parts
        with k.parallel(blocks, parts) as (block, part):
            start, first = block * height, part * width
            count = k.ops.min(height, tiles - start)
            self._task(start, count, first, k.ops.min(first + width, spec.pairs))

    def _task(self, start: Val, count: Val, first: Val, stop: Val) -> None:
        """`count` tiles (none where it is negative) for the pairs of panels from `first` to `stop`."""
        k = self.kernel
        with k.loop(0, count) as number:
            self._factors(start + number, number)
        with k.loop(first, stop) as pair:
            if self.spec.in_turn:
                self._in_turn(start, count, pair)
            else:
                self._at_once(start, count, pair)

    def _place(self, tile: Val) -> tuple[Val, Val]:
        """The first row of a tile's upper half: in the batch, and in its sample."""
        sample, number = self.kernel.unravel(tile, [0, self.spec.tiles])
        row = number * self.tile.rows
        return sample * self.spec.rows + row, row

    # Left factors

    def _factors(self, tile: Val, number: Val) -> None:
        """Those of the seven products, each [rows][pitch]. What is missing at the end repeats the sample's last row."""
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

    def _at_once(self, start: Val, count: Val, pair: Val) -> None:
        """Tile by tile, all seven products; the accumulators stay in registers."""
        k = self.kernel
        with k.loop(0, count) as number:
            with k.fold(0, PRODUCTS, self._zeros()) as fold:
                factors = _Factors(fold.index, number, pair)
                fold.values = self._product(factors, start + number, fold.values, self.kept)
            if self.spec.finish.deferred:
                self._finish(start + number, pair)

    def _in_turn(self, start: Val, count: Val, pair: Val) -> None:
        """Product by product, all tiles; the accumulators wait in scratch."""
        k = self.kernel
        with k.loop(0, PRODUCTS) as p, k.loop(0, count) as number:
            kept = self.kept.at(number * (3 * self.size))
            wait = kept.at(2 * self.size)
            sums = k.choose(p.equals(0), self._zeros, lambda: self._load(wait))
            self._keep(self._product(_Factors(p, number, pair), start + number, sums, kept), wait)
        if self.spec.finish.deferred:
            with k.loop(0, count) as number:
                self._finish(start + number, pair)

    def _product(self, factors: _Factors, tile: Val, sums: list[Val], kept: Pointer) -> list[Val]:
        """The accumulators before a product to those before the next one; `kept` has room for U2 and U3."""
        k, spec, width = self.kernel, self.spec, self.tile.columns
        p, number, pair = factors.product, factors.tile, factors.pair
        left = self.factors.at(number * spec.factor_words + p * (self.tile.rows * spec.pitch))
        panel = spec.half * width
        right = self.b.at((pair * PRODUCTS + p) * panel)
        u = kept.at(self._if(p, (_S1,)) * self.size)
        begin = k.choose(_is_any(p, _FROM_KEPT), lambda: self._load(u), lambda: sums)
        rows = [left.at(r * spec.pitch) for r in range(self.tile.rows)]
        further = panel if spec.in_turn else PRODUCTS * panel
        ahead = ahead_of(right, further, width, self.tile, number, min(spec.block, spec.tiles), spec.half)
        lower, column = self._if(p, _LOWER), (pair * 2 + self._if(p, _RIGHT)) * width
        with k.when(_is_any(p, _FINISHING)):
            self._fetch(tile, lower, column)
        grid = accumulate(k, self._grid(begin), rows, 1, right, width, spec.half, ahead=ahead)
        with k.when(_is_any(p, _KEEPING)):
            self._keep(_flat(grid), kept.at(self._if(p, (_S3,)) * self.size))
        with k.when(_is_any(p, _FINISHING)):
            self._emit(grid, tile, lower, column)
        return k.choose(p.equals(_S1), lambda: self._with_u2(_flat(grid), kept), lambda: _flat(grid))

    def _with_u2(self, sums: list[Val], kept: Pointer) -> list[Val]:
        """U3 + S1 T1 as U2 + S1 T1."""
        u2, u3 = self._load(kept), self._load(kept.at(self.size))
        return [value - old + new for value, old, new in zip(sums, u3, u2, strict=True)]

    def _if(self, p: Val, numbers: tuple[int, ...]) -> Val:
        """1 for these products, 0 for others."""
        return self.kernel.ops.select(_is_any(p, numbers), self.kernel.index(1), 0)

    def _zeros(self) -> list[Val]:
        return _flat(zeros(self.kernel, self.tile.rows, self.tile.vectors, self.lanes))

    def _keep(self, sums: list[Val], place: Pointer) -> None:
        for i, value in enumerate(sums):
            place.store(value, i * self.lanes)

    def _load(self, place: Pointer) -> list[Val]:
        return [place.load(i, self.lanes) for i in range(0, self.size, self.lanes)]

    def _grid(self, values: list[Val]) -> Grid:
        return [values[i : i + self.tile.vectors] for i in range(0, len(values), self.tile.vectors)]

    # Results

    def _fetch(self, tile: Val, lower: Val, column: Val) -> None:
        """Ask for what the results of a tile are added to. Rows that are missing at the end do no harm."""
        first = self._place(tile)[0] + lower * self.spec.first_rows
        rows = [self._offsets(first + r) for r in range(self.tile.rows)]
        self.results.at_column(column).fetch(rows, self.tile.columns)

    def _emit(self, grid: Grid, tile: Val, lower: Val, column: Val) -> None:
        """A tile of results, on its way to the output."""
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
        """How many rows one half of a tile has, whose first one is `row` of the half sample."""
        spec = self.spec
        return self.kernel.ops.min(self.kernel.index(spec.first_rows) - lower * (spec.rows % 2) - row, self.tile.rows)

    def _finish(self, tile: Val, pair: Val) -> None:
        """The deferred epilogue of both halves of a tile, for both panels."""
        k, width = self.kernel, self.tile.columns
        first, row = self._place(tile)
        with k.loop(0, 2) as lower, k.loop(pair * (2 * width), (pair + 1) * (2 * width), width) as column:
            start, count = first + lower * self.spec.first_rows, self._rows(lower, row)
            self.results.at_column(column).finish(start, start + count, width, self.lanes, self._offsets)

    def _offsets(self, row: Val) -> list[Val]:
        """Where the extras and Y are in a row."""
        return offsets_of(self.kernel, self.spec.finish.pixels, row)


def _is_any(value: Val, numbers: tuple[int, ...]) -> Val:
    first, *rest = (value.equals(number) for number in numbers)
    for condition in rest:
        first = first | condition
    return first


def _flat(grid: Grid) -> list[Val]:
    return [value for row in grid for value in row]
