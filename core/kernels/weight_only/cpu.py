"""Products with weights of few bits: codes become float32 in registers, or in memory if many rows read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.lookup import Lookup
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import Grid, accumulate, for_each_panel, for_each_tile, zeros
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.target import Target
from lathe.core.kernels.weight_only.product_cpu import Panel, Product, fold_blocks
from lathe.core.kernels.weight_only.spec import STAGED_ROWS, WeightOnlySpec, shift_of

F32 = DType.FLOAT32
_MOST_ROWS = 4  # rows whose sums stay in registers while codes are read
_UNIT = 8  # rows of int8 codes in the body of a loop
_CHAINS = 2  # partial sums per vector for one row: additions must not wait for each other


def generate(spec: WeightOnlySpec, target: Target) -> Kernel:
    return _WeightOnly(spec, target).kernel


class _WeightOnly(Product):
    """Writes the kernel of one spec."""

    def __init__(self, spec: WeightOnlySpec, target: Target) -> None:
        super().__init__(spec, target, DType.INT8 if spec.per_word == 1 else DType.INT32)
        self.spec, k = spec, self.kernel
        nbytes = [scratch.nbytes for scratch in spec.scratch]
        scratch = [k.scratch(self.first_scratch + i, size, F32) for i, size in enumerate(nbytes)]
        self.dense = None if spec.is_never_staged else scratch[0]
        self.sums = scratch[-1] if spec.has_offsets and not spec.is_always_staged else None
        self.lookup = Lookup(k, spec.numbers, self.lanes) if spec.numbers else None
        # A task begins at a multiple of the rows of the tiles that it uses.
        tile = replace(spec.tile, rows=self._few) if spec.is_never_staged else spec.tile
        for_each_panel(k, self.entries, spec.columns, spec.rows, tile, self._panel)

    def _panel(self, entry: Val, panel: Val, columns: int, start: Val, stop: Val, new: Val | None) -> None:
        """Compute rows `start` to `stop` of one panel of `columns` columns; `entry` is the number of the product."""
        k, spec = self.kernel, self.spec
        first = panel * spec.tile.columns
        a, *places = offsets_of(k, self.batch, entry)
        results = self.results_at(places, first)
        weights = _Panel(self, first, columns)
        rows = self.a.at(a)

        def few() -> None:
            self._few_rows(rows, weights, results, start, stop)

        def many() -> None:
            self._many_rows(rows, weights, results, start, stop)

        if spec.is_never_staged:
            few()
        elif spec.is_always_staged:
            many()
        else:
            with k.when(stop - start < STAGED_ROWS):
                few()
            with k.when(stop - start >= STAGED_ROWS):
                many()

    @property
    def _few(self) -> int:
        """The rows of a tile that reads codes."""
        rows = self.spec.rows
        return min(_MOST_ROWS, rows) if isinstance(rows, int) else _MOST_ROWS

    def _few_rows(self, a: Pointer, weights: _Panel, results: ResultWriter, start: Val, stop: Val) -> None:
        k, spec = self.kernel, self.spec

        def tile(row: Val, count: int) -> None:
            sources = [a.at((row + r) * self.moves[0]) for r in range(count)]
            results.fetch([self.offsets_of_row(row + r) for r in range(count)], weights.columns)
            grid = [weights.times_row(sources[0])] if count == 1 else weights.times_rows(sources)
            results.store_tile(grid, row, self.offsets_of_row, weights.mask)

        for_each_tile(k, start, stop, spec.rows, self._few, tile)

    def _many_rows(self, a: Pointer, weights: _Panel, results: ResultWriter, start: Val, stop: Val) -> None:
        k, spec, lanes = self.kernel, self.spec, self.lanes
        dense, width = self.dense, weights.width
        assert dense is not None
        weights.write(dense)

        def tile(row: Val, count: int) -> None:
            sources = [a.at((row + r) * self.moves[0]) for r in range(count)]
            results.fetch([self.offsets_of_row(row + r) for r in range(count)], weights.columns)
            grid = accumulate(
                k, zeros(k, count, width, lanes), sources, 1, dense, width * lanes, spec.depth,
                panel_vectors=spec.tile.vectors,
            )  # fmt: skip
            results.store_tile(grid, row, self.offsets_of_row, weights.mask)

        for_each_tile(k, start, stop, spec.rows, spec.tile.rows, tile)


class _Panel(Panel):
    """The weights of one panel, and loops over its rows."""

    def __init__(self, of: _WeightOnly, first: Val, columns: int) -> None:
        super().__init__(of, of.spec, first, columns)
        self.of, self.spec = of, of.spec

    def times_row(self, a: Pointer) -> list[Val]:
        """The product of one row of A and the panel, a vector for each `lanes` columns.

        Numbers add up within a block before they are scaled. So a weight takes a lookup and a multiply-add.
        """
        k, width, lanes = self.kernel, self.width, self.lanes
        sums = self._write_sums_of(a) if self.offsets is not None else None

        def block(number: Val, rows: int, totals: list[Val]) -> list[Val]:
            start = number * self.spec.block

            def row(at: Val, i: int, vectors: list[Val], values: list[Val]) -> list[Val]:
                factor = a.load(at + i).splat(lanes)
                chain = i % _CHAINS * width
                for v, vector in enumerate(vectors):
                    values[chain + v] = k.ops.fma(factor, vector, values[chain + v])
                return values

            parts = self._fold_rows(start, rows, [k.zeros(F32, lanes) for _ in range(_CHAINS * width)], row)
            found = []
            for v, total in enumerate(totals):
                at = (number * width + v) * lanes
                total = k.ops.fma(parts[v] + parts[width + v], self.scales.load(at, lanes), total)
                if self.offsets is not None and sums is not None:
                    total = k.ops.fma(sums.load(number).splat(lanes), self.offsets.load(at, lanes), total)
                found.append(total)
            return found

        return self._fold_blocks(zeros(k, 1, width, lanes)[0], block)

    def times_rows(self, sources: Sequence[Pointer]) -> Grid:
        """The product of some rows of A and the panel: each code becomes a weight once for all rows."""
        k, lanes = self.kernel, self.lanes
        step = 2 if len(sources) > 2 else 4  # vectors at a time, so that all sums stay in registers
        grid: Grid = [[] for _ in sources]
        for begin in range(0, self.width, step):
            part = range(begin, min(begin + step, self.width))

            def block(number: Val, rows: int, totals: list[Val], part: range = part) -> list[Val]:
                scales, offsets = self._scales_of(number, part)

                def row(at: Val, i: int, vectors: list[Val], values: list[Val]) -> list[Val]:
                    weights = self._scaled(vectors, scales, offsets)
                    for r, source in enumerate(sources):
                        factor = source.load(at + i).splat(lanes)
                        for v, weight in enumerate(weights):
                            place = r * len(part) + v
                            values[place] = k.ops.fma(factor, weight, values[place])
                    return values

                return self._fold_rows(number * self.spec.block, rows, totals, row, part)

            init = [k.zeros(F32, lanes) for _ in range(len(sources) * len(part))]
            totals = self._fold_blocks(init, block)
            for r in range(len(sources)):
                grid[r] += totals[r * len(part) : (r + 1) * len(part)]
        return grid

    def write(self, target: Pointer) -> None:
        """Write all weights of the panel to memory, [depth, width * lanes]."""

        def block(number: Val, rows: int, totals: list[Val]) -> list[Val]:
            scales, offsets = self._scales_of(number, range(self.width))

            def row(at: Val, i: int, vectors: list[Val], values: list[Val]) -> list[Val]:
                line = target.at((at + i) * (self.width * self.lanes))
                for v, weight in enumerate(self._scaled(vectors, scales, offsets)):
                    line.store(weight, v * self.lanes)
                return values

            return self._fold_rows(number * self.spec.block, rows, totals, row)

        self._fold_blocks([], block)

    def _scales_of(self, number: Val, part: range) -> tuple[list[Val], list[Val]]:
        """The scales and the offsets (none if the spec has none) of block `number`, in the vectors `part`."""
        places = [(number * self.width + v) * self.lanes for v in part]
        offsets = [] if self.offsets is None else [self.offsets.load(at, self.lanes) for at in places]
        return [self.scales.load(at, self.lanes) for at in places], offsets

    def _scaled(self, numbers: Sequence[Val], scales: Sequence[Val], offsets: Sequence[Val]) -> list[Val]:
        k = self.kernel
        if not offsets:
            return [number * scale for number, scale in zip(numbers, scales, strict=True)]
        return [k.ops.fma(*each) for each in zip(numbers, scales, offsets, strict=True)]

    def _fold_blocks(self, init: list[Val], block: Callable[[Val, int, list[Val]], list[Val]]) -> list[Val]:
        """Carry values through all blocks of rows: `block(number, rows in it, values)` returns the next values."""
        return fold_blocks(self.kernel, self.spec.depth, self.spec.block, init, block)

    def _fold_rows(
        self,
        start: Val,
        rows: int,
        init: list[Val],
        row: Callable[[Val, int, list[Val], list[Val]], list[Val]],
        part: range | None = None,
    ) -> list[Val]:
        """Carry values through the `rows` rows from row `start` on.

        `row(at, i, numbers, values)` is called for row at + i, whose numbers in the vectors `part` (None: all) are
        given, and returns the next values. `start` is a multiple of the rows in a word.
        """
        k, unit = self.kernel, self.spec.per_word if self.spec.per_word > 1 else _UNIT
        chosen = part or range(self.width)

        def some(at: Val, count: int, values: list[Val]) -> list[Val]:
            for i, numbers in enumerate(self._numbers(at, count, chosen)):
                values = row(at, i, numbers, values)
            return values

        whole = rows // unit * unit
        with k.fold(0, whole, init, unit) as fold:
            fold.values = some(start + fold.index, unit, list(fold.values))
        return some(start + whole, rows - whole, list(fold.values)) if rows > whole else list(fold.values)

    def _numbers(self, at: Val, count: int, part: range) -> Iterator[list[Val]]:
        """The numbers of the codes of `count` rows from row `at` on: for each row a vector for each of `part`."""
        k, spec, lanes = self.kernel, self.spec, self.lanes
        if self.of.lookup is None:
            for i in range(count):
                line = self.codes.at((at + i) * (self.width * lanes))
                yield [line.load(v * lanes, lanes).cast(F32) for v in part]
            return
        line = self.codes.at(at // spec.per_word * (self.width * lanes))
        words = [line.load(v * lanes, lanes) for v in part]
        for i in range(count):
            shift = shift_of(i, spec.bits)
            yield [self.of.lookup.at(k.ops.shift_right(word, shift) if shift else word) for word in words]

    def _write_sums_of(self, a: Pointer) -> Pointer:
        """Write the sum of a row of A in each block to scratch; returns its address."""
        k, spec, lanes = self.kernel, self.spec, self.lanes
        sums = self.of.sums
        assert sums is not None

        def write(number: Val, rows: int, values: list[Val]) -> list[Val]:
            part = a.at(number * spec.block)
            totals = k.strip(rows, lambda i, mask, total: [total + part.load(i, lanes, mask)], [k.zeros(F32, lanes)])
            sums.store(k.ops.sum(totals[0]), number)
            return values

        self._fold_blocks([], write)
        return sums
