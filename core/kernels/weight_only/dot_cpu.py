"""Products of bytes and codes: see `lathe.core.kernels.weight_only.dot_spec`."""

from __future__ import annotations

from lathe.core.codegen.dot import multiply_add, multiply_add_small
from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import Grid, for_each_panel, for_each_tile
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.shared.words import WORD_BYTES
from lathe.core.kernels.target import Target
from lathe.core.kernels.weight_only.dot_spec import PIECES, WeightOnlyDotSpec
from lathe.core.kernels.weight_only.product_cpu import Panel, Product, fold_blocks

F32, I32, I8 = DType.FLOAT32, DType.INT32, DType.INT8
_PIECE = 8  # bits
_LARGEST = (127 << _PIECE) + 127  # two bytes of -128 to 127 hold this integer and its negative


def generate(spec: WeightOnlyDotSpec, target: Target) -> Kernel:
    return _Dot(spec, target).kernel


class _Dot(Product):
    """Writes the kernel of one spec."""

    def __init__(self, spec: WeightOnlyDotSpec, target: Target) -> None:
        super().__init__(spec, target, I32)
        self.spec, k = spec, self.kernel
        kinds = (I8, F32, I32, F32)
        self.bytes, self.units, self.starts, *sums = (
            k.scratch(self.first_scratch + i, scratch.nbytes, kind)
            for i, (scratch, kind) in enumerate(zip(spec.scratch, kinds, strict=False))
        )
        self.sums = sums[0] if sums else None
        for_each_panel(
            k, self.entries, spec.columns, spec.rows, spec.tile, self._panel, in_blocks=True, prepare=self._round_rows
        )

    # Rows of A

    def _round_rows(self, entry: Val, start: Val, stop: Val) -> None:
        """Write rows `start` to `stop` of A to scratch as integers, with the scale (unit) of each step."""
        k, spec = self.kernel, self.spec
        rows = self.a.at(offsets_of(k, self.batch, entry)[0])
        with k.loop(start, stop) as row:
            source, number = rows.at(row * self.moves[0]), row - start
            target = self.bytes.at(number * (PIECES * spec.padded_depth))
            self._round_row(source, target, number)
            for piece in range(PIECES):
                for at in range(spec.depth, spec.padded_depth):
                    target.store(k.constant(0, I8), piece * spec.padded_depth + at)

    def _round_row(self, source: Pointer, target: Pointer, row: Val) -> None:
        def step(number: Val, count: int, values: list[Val]) -> list[Val]:
            self._round(source, target, row, number, count)
            return values

        fold_blocks(self.kernel, self.spec.depth, self.spec.step, [], step)

    def _round(self, source: Pointer, target: Pointer, row: Val, step: Val, count: int) -> None:
        """Round the `count` elements of one step of a row."""
        k, spec, lanes = self.kernel, self.spec, self.lanes
        first = step * spec.step
        source, target = source.at(first), target.at(first)

        def larger(i: Val, mask: Val | None, found: Val) -> list[Val]:
            return [k.ops.max(found, k.ops.abs(source.load(i, lanes, mask)))]

        largest = k.ops.reduce(k.strip(count, larger, [k.zeros(F32, lanes)])[0], k.ops.max)
        factor = k.ops.select(largest > 0.0, k.constant(float(_LARGEST), F32) / largest, 0.0).splat(lanes)

        def write(i: Val, mask: Val | None, total: Val) -> list[Val]:
            whole = k.ops.rint(source.load(i, lanes, mask) * factor).cast(I32)
            upper = k.ops.shift_right(whole + (1 << (_PIECE - 1)), _PIECE)
            target.store(upper.cast(I8), i, mask)
            lower = whole - k.ops.shift_left(upper, _PIECE)
            target.store(lower.cast(I8), i + spec.padded_depth, mask)
            return [total + whole]

        total = k.ops.sum(k.strip(count, write, [k.zeros(I32, lanes)])[0])
        place, unit = row * spec.steps + step, largest * (1.0 / _LARGEST)
        self.units.store(unit, place)
        self.starts.store(total * -spec.zero, place)
        if self.sums is not None:
            self.sums.store(total.cast(F32) * unit, place)

    # Products

    def _panel(self, entry: Val, panel: Val, columns: int, start: Val, stop: Val, new: Val | None) -> None:
        """Compute rows `start` to `stop` of one panel of `columns` columns; `entry` is the number of the product."""
        k, spec = self.kernel, self.spec
        first = panel * spec.tile.columns
        results = self.results_at(offsets_of(k, self.batch, entry)[1:], first)
        weights = _Panel(self, first, columns)
        height = min(spec.tile.rows, spec.rows) if isinstance(spec.rows, int) else spec.tile.rows

        def tile(row: Val, count: int) -> None:
            results.fetch([self.offsets_of_row(row + r) for r in range(count)], columns)
            results.store_tile(weights.times(row - start, count), row, self.offsets_of_row, weights.mask)

        for_each_tile(k, start, stop, spec.rows, height, tile)


class _Panel(Panel):
    """The codes of one panel, and their products with rounded rows."""

    def __init__(self, of: _Dot, first: Val, columns: int) -> None:
        super().__init__(of, of.spec, first, columns)
        self.of, self.spec = of, of.spec

    def times(self, first: Val, count: int) -> Grid:
        """The product of `count` rounded rows from number `first` on and the panel."""
        most = 2 if count > 2 else self.width  # vectors at a time, so that all sums stay in registers
        grid: Grid = [[] for _ in range(count)]
        for begin in range(0, self.width, most):
            part = range(begin, min(begin + most, self.width))
            totals = self._times_part(first, count, part)
            for r in range(count):
                grid[r] += totals[r * len(part) : (r + 1) * len(part)]
        return grid

    def _times_part(self, first: Val, count: int, part: range) -> list[Val]:
        k, spec, lanes = self.kernel, self.spec, self.lanes
        pitch = PIECES * spec.padded_depth // WORD_BYTES
        rows = [self.of.bytes.view(I32).at((first + r) * pitch) for r in range(count)]
        places = [(first + r) * spec.steps for r in range(count)]

        def step(number: Val, elements: int, totals: list[Val]) -> list[Val]:
            begins = [self.of.starts.load(place + number).splat(lanes) for place in places]
            lower = [begin for begin in begins for _ in part]
            upper = [k.zeros(I32, lanes)] * len(lower)
            sums = self._integer_sums(rows, number, elements, part, [*lower, *upper])
            found = []
            at = self._block_of(number) * (self.width * lanes)
            scales = [self.scales.load(at + v * lanes, lanes) for v in part]
            for r, place in enumerate(places):
                unit = self.of.units.load(place + number).splat(lanes)
                for i, scale in enumerate(scales):
                    j = r * len(part) + i
                    whole = sums[j] + k.ops.shift_left(sums[len(lower) + j], _PIECE)
                    total = k.ops.fma(whole.cast(F32) * unit, scale, totals[j])
                    if self.offsets is not None and self.of.sums is not None:
                        offset = self.offsets.load(at + part[i] * lanes, lanes)
                        total = k.ops.fma(self.of.sums.load(place + number).splat(lanes), offset, total)
                    found.append(total)
            return found

        init = [k.zeros(F32, lanes) for _ in range(count * len(part))]
        return fold_blocks(k, spec.depth, spec.step, init, step)

    def _block_of(self, step: Val) -> Val:
        """The block of weights in which a step of A lies."""
        spec = self.spec
        return self.kernel.index(0) if spec.blocks == 1 else step // (spec.block // spec.step)

    def _integer_sums(self, rows: list[Pointer], step: Val, elements: int, part: range, init: list[Val]) -> list[Val]:
        """`init` plus the products of the elements of one step: of lower bytes, then of upper bytes.

        Each of both has a vector for each row and each of `part`.
        """
        k, spec, lanes = self.kernel, self.spec, self.lanes
        quads = spec.per_word // WORD_BYTES
        first = step * (spec.step // spec.per_word)
        pieces = (spec.padded_depth // WORD_BYTES, 0)  # in scratch, lower bytes follow upper ones
        with k.fold(0, -(-elements // spec.per_word), init) as fold:
            word, values = first + fold.index, list(fold.values)
            line = self.codes.at(word * (self.width * lanes))
            codes = [line.load(v * lanes, lanes) for v in part]
            for quad in range(quads):
                factors = [self._bytes_of(each, quad) for each in codes]
                for p, piece in enumerate(pieces):
                    for r, row in enumerate(rows):
                        numbers = row.load(word * quads + (quad + piece)).splat(lanes)
                        for i, factor in enumerate(factors):
                            j = (p * len(rows) + r) * len(part) + i
                            values[j] = self._dot(factor, numbers, values[j])
            fold.values = values
        return list(fold.values)

    def _bytes_of(self, word: Val, quad: int) -> Val:
        """Codes 4 * `quad` to 4 * `quad` + 3 of each word, a byte each."""
        k, bits = self.kernel, self.spec.bits
        if bits == _PIECE:
            return word
        mask = int.from_bytes(bytes([(1 << bits) - 1] * WORD_BYTES), "little")
        return k.ops.bit_and(k.ops.shift_right(word, quad * bits) if quad else word, mask)

    def _dot(self, codes: Val, numbers: Val, total: Val) -> Val:
        if self.spec.bits < _PIECE:
            return multiply_add_small(self.kernel, codes, numbers, total)
        return multiply_add(self.kernel, DType.UINT8, codes, numbers, total)
