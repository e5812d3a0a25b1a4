"""Products of bytes and codes: see `lathe.core.kernels.weight_only.dot_spec`."""

from __future__ import annotations

import numpy as np

from lathe.core.codegen.dot import (
    add_pairs,
    multiplies_pairs,
    multiply_add,
    multiply_add_signed,
    pair_products,
)
from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import Grid, for_each_panel, for_each_tile
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.shared.panels import LINE
from lathe.core.kernels.shared.words import WORD_BYTES
from lathe.core.kernels.target import Target
from lathe.core.kernels.weight_only.dot_spec import WeightOnlyDotSpec
from lathe.core.kernels.weight_only.product_cpu import Panel, Product, fold_blocks
from lathe.core.ops.quantized.dequantized_product import LEAST_MAGNITUDE

F32, I32, I8 = DType.FLOAT32, DType.INT32, DType.INT8
_PIECE = 8  # bits
# Words of codes between a load and a prefetch, also into the next panel. With it, four rows whose weights are in memory
# take three quarters of the time on a Zen 4. One row gets none: there, the processor's own prefetches are faster.
_AHEAD = 2048
_MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 without its sign
_LEAST_BITS = int(np.float32(LEAST_MAGNITUDE).view(np.int32))
_ROUNDING = 1.5 * 2.0**23
_ROUNDING_BITS = int(np.float32(_ROUNDING).view(np.int32))
_SUMS = 3 / 4  # share of the registers for sums
_BUSY = 8  # sums that must be independent to keep two pipelines of latency 4 busy
_BODY = 128  # products in a loop body: enough to hide the loop overhead, few enough for the instruction cache


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
        # Of each step: with zero points minus the sum of the integers, with other offsets the sum of A.
        self.sums = sums[0] if sums else None
        self.has_zero_points = spec.offset_dtype is I8
        # Pieces of -127 to 127, and lower ones of -128 to 127, hold this integer and its negative.
        self.largest = sum(127 << (_PIECE * piece) for piece in range(spec.pieces))
        for_each_panel(
            k, self.entries, spec.columns, spec.rows, spec.tile, self._panel, in_blocks=True,
            prepare=self._round_rows, block_tiles=spec.block_tiles,
        )  # fmt: skip

    # Rows of A

    def _round_rows(self, entry: Val, start: Val, stop: Val) -> None:
        """Write rows `start` to `stop` of A to scratch as integers, with the scale (unit) of each step."""
        k, spec = self.kernel, self.spec
        rows = self.a.at(offsets_of(k, self.batch, entry)[0])
        with k.loop(start, stop) as row:
            source, number = rows.at(row * self.moves[0]), row - start
            target = self.bytes.at(number * spec.row_bytes)
            self._round_row(source, target, number)
            for piece in range(spec.pieces):
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
            bits = k.ops.bit_and(k.ops.bitcast(source.load(i, lanes, mask), I32), _MAGNITUDE)
            return [k.ops.max(found, bits)]  # of magnitudes as integers: the maximum of a NaN is a NaN

        bits = k.ops.reduce(k.strip(count, larger, [k.zeros(I32, lanes)])[0], k.ops.max)
        largest = k.ops.bitcast(k.ops.max(bits, _LEAST_BITS), F32)
        factor = (k.constant(float(self.largest), F32) / largest).splat(lanes)

        def write(i: Val, mask: Val | None, total: Val) -> list[Val]:
            # An addition of 1.5 * 2^23 rounds to an integer, which is then the lower bits: faster than a conversion.
            whole = k.ops.bitcast(source.load(i, lanes, mask) * factor + _ROUNDING, I32) - _ROUNDING_BITS
            if mask is not None:
                whole = k.ops.select(mask, whole, 0)
            self._store_pieces(whole, target.at(i), mask)
            return [total + whole]

        total = k.ops.sum(k.strip(count, write, [k.zeros(I32, lanes)])[0])
        place, unit = row * spec.steps + step, largest * (1.0 / self.largest)
        self.units.store(unit, place)
        self.starts.store(total * -spec.zero, place)
        if self.sums is not None:
            whole = total.cast(F32)
            self.sums.store(k.ops.neg(whole) if self.has_zero_points else whole * unit, place)

    def _store_pieces(self, whole: Val, target: Pointer, mask: Val | None) -> None:
        """Write the pieces of integers, the uppermost first; each piece of a row has `padded_depth` bytes."""
        k, spec = self.kernel, self.spec
        for piece in reversed(range(1, spec.pieces)):
            upper = k.ops.shift_right(whole + (1 << (_PIECE * piece - 1)), _PIECE * piece)
            target.store(upper.cast(I8), 0, mask)
            whole, target = whole - k.ops.shift_left(upper, _PIECE * piece), target.at(spec.padded_depth)
        target.store(whole.cast(I8), 0, mask)

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
        registers = int(self.kernel.target.registers * _SUMS)
        most = max(registers // (count * (self.spec.pieces + 1)), 1)  # vectors at a time: integer and float32 sums fit
        grid: Grid = [[] for _ in range(count)]
        for begin in range(0, self.width, most):
            part = range(begin, min(begin + most, self.width))
            totals = self._times_part(first, count, part)
            for r in range(count):
                grid[r] += totals[r * len(part) : (r + 1) * len(part)]
        return grid

    def _times_part(self, first: Val, count: int, part: range) -> list[Val]:
        k, spec, lanes = self.kernel, self.spec, self.lanes
        rows = [self.of.bytes.at((first + r) * spec.row_bytes).view(I32) for r in range(count)]
        places = [(first + r) * spec.steps for r in range(count)]

        def step(number: Val, elements: int, totals: list[Val]) -> list[Val]:
            begins = [self.of.starts.load(place + number).splat(lanes) for place in places]
            sums = self._integer_sums(rows, number, elements, part, [begin for begin in begins for _ in part])
            at = self._block_of(number) * (self.width * lanes)
            scales = [self.scales.load(at + v * lanes, lanes) for v in part]
            offsets = [] if self.offsets is None else [self.offsets.load(at + v * lanes, lanes) for v in part]
            found = []
            for r, place in enumerate(places):
                own = sums[r * len(part) : (r + 1) * len(part)]
                before = totals[r * len(part) : (r + 1) * len(part)]
                found += self._with_scales(place + number, own, scales, offsets, before)
            return found

        init = [k.zeros(F32, lanes) for _ in range(count * len(part))]
        return fold_blocks(k, spec.depth, spec.step, init, step)

    def _with_scales(
        self, place: Val, sums: list[Val], scales: list[Val], offsets: list[Val], totals: list[Val]
    ) -> list[Val]:
        """`totals` plus the products of one row and one step, from `sums` of integers; `place` is the step of the row.

        Zero points count before the scales: as float32 these integers are exact.
        """
        k, lanes = self.kernel, self.lanes
        unit = self.of.units.load(place).splat(lanes)
        wholes, extra = [each.cast(F32) for each in sums], None
        if offsets and self.of.sums is not None:
            extra = self.of.sums.load(place).splat(lanes)
        if extra is not None and self.of.has_zero_points:
            wholes = [k.ops.fma(point, extra, whole) for point, whole in zip(offsets, wholes, strict=True)]
        found = [k.ops.fma(w * unit, scale, total) for w, scale, total in zip(wholes, scales, totals, strict=True)]
        if extra is not None and not self.of.has_zero_points:
            found = [k.ops.fma(extra, offset, total) for offset, total in zip(offsets, found, strict=True)]
        return found

    def _block_of(self, step: Val) -> Val:
        """The block of weights in which a step of A lies."""
        spec = self.spec
        return self.kernel.index(0) if spec.blocks == 1 else step // (spec.block // spec.step)

    def _integer_sums(self, rows: list[Pointer], step: Val, elements: int, part: range, init: list[Val]) -> list[Val]:
        """`init` plus the products of the elements of one step: a vector for each row and each of `part`.

        Products of a piece add up in chains of their own, of which there are enough to keep the pipelines busy: several
        for few sums, but one where pairs add up, which takes a cycle.
        """
        k, spec, lanes = self.kernel, self.spec, self.lanes
        words, first = -(-elements // spec.per_word), step * (spec.step // spec.per_word)
        per_chain, products = len(init), len(init) * spec.pieces * (spec.per_word // WORD_BYTES)
        chains = 1 if has_pairs(spec, k.target) else min(words, max(1, _BUSY // (per_chain * spec.pieces)))
        unit = max(min(words, _BODY // products), chains, 1)
        empty = [k.zeros(I32, lanes)] * per_chain
        values = init + empty * (chains * spec.pieces - 1)
        whole = words // unit * unit
        with k.fold(0, whole, values, unit) as fold:
            fold.values = self._some_words(rows, first + fold.index, unit, part, list(fold.values), chains)
        values = list(fold.values)
        if words > whole:
            values = self._some_words(rows, first + whole, words - whole, part, values, chains)
        pieces = []
        for piece in range(spec.pieces):
            own = values[piece * chains * per_chain : (piece + 1) * chains * per_chain]
            while len(own) > per_chain:
                own = [a + b for a, b in zip(own[:per_chain], own[per_chain:], strict=False)] + own[2 * per_chain :]
            pieces.append([k.ops.shift_left(x, _PIECE * piece) if piece else x for x in own])
        return [sum(each[1:], each[0]) for each in zip(*pieces, strict=True)]

    def _some_words(
        self, rows: list[Pointer], first: Val, count: int, part: range, values: list[Val], chains: int
    ) -> list[Val]:
        """`values`, of each piece the sums of each chain, plus the products of `count` words of codes from `first` on.

        The lowest piece comes first. CPUs without VNNI add up pairs of products as int16, as long as they fit.
        """
        spec, lanes = self.spec, self.lanes
        quads, width = spec.per_word // WORD_BYTES, self.width * lanes
        sums = _Sums(self, values)
        line = self.codes.at(first * width)
        places = [row.at(first * quads) for row in rows]
        if len(rows) > 1:
            for word in range(0, count * width, LINE):
                line.prefetch(word + _AHEAD)
        for i in range(count):
            codes = [line.load(i * width + v * lanes, lanes) for v in part]
            for quad in range(quads):
                factors = [self._bytes_of(each, quad) for each in codes]
                for piece in range(spec.pieces):
                    at = (spec.pieces - 1 - piece) * (spec.padded_depth // WORD_BYTES) + i * quads + quad
                    chain = piece * chains + i % chains
                    for r, place in enumerate(places):
                        numbers = place.load(at).splat(lanes)
                        for c, factor in enumerate(factors):
                            sums.add((chain * len(rows) + r) * len(part) + c, factor, numbers)
        return sums.values

    def _bytes_of(self, word: Val, quad: int) -> Val:
        """Codes 4 * `quad` to 4 * `quad` + 3 of each word, a byte each."""
        k, bits = self.kernel, self.spec.bits
        if bits == _PIECE:
            return word
        mask = int.from_bytes(bytes([(1 << bits) - 1] * WORD_BYTES), "little")
        return k.ops.bit_and(k.ops.shift_right(word, quad * bits) if quad else word, mask)


def has_pairs(spec: WeightOnlyDotSpec, target: Target) -> bool:
    """Whether products of small codes add up in pairs of int16."""
    return spec.bits < _PIECE and multiplies_pairs(target, spec.tile.lanes)


class _Sums:
    """Sums of products of bytes, int32. Pairs of small products first add up as int16, as many as fit."""

    def __init__(self, of: _Panel, values: list[Val]) -> None:
        self._kernel, self._spec, self._values = of.kernel, of.spec, list(values)
        self._has_pairs = has_pairs(of.spec, of.kernel.target)
        self._most_pairs = ((1 << 15) - 1) // (2 * 128 * ((1 << of.spec.bits) - 1))
        self._pairs: dict[int, tuple[Val, int]] = {}  # sums of pairs, and their number

    @property
    def values(self) -> list[Val]:
        for at in list(self._pairs):
            self._flush(at)
        return self._values

    def add(self, at: int, codes: Val, numbers: Val) -> None:
        """Add products of four codes, and of four bytes of A, to each element of sum number `at`."""
        k = self._kernel
        if self._has_pairs:
            pairs, count = pair_products(k, codes, numbers), 1
            if at in self._pairs:
                pairs, count = self._pairs[at][0] + pairs, self._pairs[at][1] + 1
            self._pairs[at] = pairs, count
            if count == self._most_pairs:
                self._flush(at)
        elif self._spec.is_signed:
            self._values[at] = multiply_add_signed(k, codes, numbers, self._values[at])
        else:
            self._values[at] = multiply_add(k, DType.UINT8, codes, numbers, self._values[at])

    def _flush(self, at: int) -> None:
        self._values[at] = add_pairs(self._kernel, self._pairs.pop(at)[0], self._values[at])
