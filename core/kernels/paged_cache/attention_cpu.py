"""Attention over the pages of a cache, with the softmax of one pass (Milakov and Gimelshein, 2018).

A task goes through the pages that its tokens see, one page at a time: scores, powers, and their products with the
values. Each row keeps the maximum of its scores and the sum of its powers so far. When a page raises the maximum,
earlier sums are multiplied by exp(old - new). A row's arithmetic depends on the row alone, so its results have the same
bits whatever else a run holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.codegen.vmath import exp_of_nonpositive
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Status
from lathe.core.kernels.cpu.microkernel import accumulate, zeros
from lathe.core.kernels.cpu.reduction import fast_max, parts_of, reduce_pairwise
from lathe.core.kernels.paged_cache.attention_spec import CachedAttentionSpec
from lathe.core.kernels.target import Target

F32, I64 = DType.FLOAT32, DType.INT64
_LOWEST = -3.0e38  # a maximum that is finite, so that exp(-inf - maximum) is zero and not NaN
_ONE_CHAIN = 8  # vectors of a panel for which `accumulate` adds up in order of the depth, whatever the tile


def generate(spec: CachedAttentionSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    scaled = spec.dtype is DType.INT8
    types = (F32, spec.dtype, spec.dtype, I64, I64, I64, *((F32, F32) if scaled else ()), F32)
    q, keys, values, positions, sequences, tables, *scales, y = (k.operand(i, dtype) for i, dtype in enumerate(types))
    scratch = k.scratch(len(types), 4 * sum(spec.scratch_parts), F32)
    tokens = k.dim(spec.tokens)
    with k.parallel(tokens, spec.kv_heads) as (token, head):
        sequence = sequences.load(token)
        before = sequences.load(k.ops.max(token - 1, 0))
        # A block begins at each multiple of `block`, and where a sequence begins.
        begins = (token % spec.block).equals(0) | ~before.equals(sequence)
        with k.when(begins):
            until = k.ops.min((token // spec.block + 1) * spec.block, tokens)
            with k.fold(token, until, [k.index(0)]) as fold:
                same = sequences.load(fold.index).equals(sequence)
                fold.values = [fold.values[0] + k.ops.select(same, k.index(1), 0)]
            count = fold.values[0]
            first, last = positions.load(token), positions.load(token + (count - 1))
            known = (sequence >= 0) & (sequence < tokens) & (first >= 0) & (last >= first)
            known = known & (last < k.dim(spec.most) * spec.page)
            with k.when(~known):
                k.refuse(Status.INDEX_OUT_OF_RANGE)
            with k.when(known):
                table = tables.at(sequence * k.dim(spec.most))
                pointers = q.at(_row(spec, token, head)), y.at(_row(spec, token, head))
                places = positions.at(token)
                _Task(k, spec, *pointers, keys, values, scales, places, table, scratch, head, count, last).emit()
    return k


def _row(spec: CachedAttentionSpec, token: Val, head: Val) -> Val:
    """The offset of the first query of `token` that reads the keys of `head`."""
    return (token * spec.kv_heads + head) * (spec.group * spec.size)


@dataclass(frozen=True)
class _Task:
    """Generates the code for `count` tokens of one sequence and one head of keys; `last` is the last position.

    `scales` are those of keys and of values, if the cache has any.
    """

    kernel: Kernel
    spec: CachedAttentionSpec
    queries: Pointer
    results: Pointer
    keys: Pointer
    values: Pointer
    scales: Sequence[Pointer]
    positions: Pointer
    table: Pointer
    scratch: Pointer
    head: Val
    count: Val
    last: Val

    @property
    def rows(self) -> Val:
        return self.count * self.spec.group

    def _part(self, number: int, offset: Val | int = 0) -> Pointer:
        """Part `number` of the scratch memory, `offset` elements further on."""
        return self.scratch.at(sum(self.spec.scratch_parts[:number])).at(offset)

    def _sums(self, row: Val) -> Pointer:
        return self._part(0, row * self.spec.padded)

    def _powers(self, row: Val) -> Pointer:
        return self._part(1, row * self.spec.page)

    def _maximum(self, row: Val) -> Pointer:
        return self._part(2, row)

    def _factor(self, row: Val) -> Pointer:
        return self._part(3, row)

    def _total(self, row: Val) -> Pointer:
        return self._part(4, row * 16)

    def emit(self) -> None:
        k, spec = self.kernel, self.spec
        with k.loop(0, self.rows) as row:
            self._clear(row)
        begin = k.index(0)
        if spec.window:
            begin = k.ops.max(self.positions.load() - (spec.window - 1), 0) // spec.page
        with k.loop(begin, self.last // spec.page + 1) as index:
            number = self.table.load(index)
            inside = (number >= 0) & (number < spec.count)
            with k.when(~inside):
                k.refuse(Status.INDEX_OUT_OF_RANGE)
            with k.when(inside):
                self._page(index * spec.page, (number * spec.kv_heads + self.head) * spec.page)
        with k.loop(0, self.rows) as row:
            self._finish(row)

    def _clear(self, row: Val) -> None:
        k, spec = self.kernel, self.spec
        for start in range(0, spec.padded, k.lanes):
            self._sums(row).store(k.zeros(F32, k.lanes), start)
        self._maximum(row).store(k.constant(_LOWEST, F32))
        self._total(row).store(k.zeros(F32, spec.lanes))

    def _page(self, start: Val, place: Val) -> None:
        """Add the page whose first key has position `start`; `place` is the number of this key in the cache."""
        k, spec = self.kernel, self.spec
        keys = self.keys.at(place * spec.size).converting(F32)
        scales = [each.at(place) for each in self.scales]
        self._for_each_tile(spec.score_rows, lambda row, height: self._scores(row, height, keys, scales, start))
        values = self.values.at(place * spec.size).converting(F32)
        # Keys after the last token of the block have no values yet.
        depth = k.ops.min(self.last + 1 - start, spec.page)
        lanes = k.lanes
        width = spec.value_vectors * lanes
        full, rest = divmod(spec.size, width)

        def panel(row: Val, height: int) -> None:
            with k.loop(0, full) as number:
                self._weigh(row, height, values, number * width, width, depth)
            if rest:
                self._weigh(row, height, values, k.index(full * width), rest, depth)

        self._for_each_tile(spec.value_rows, panel)

    def _for_each_tile(self, heights: Sequence[int], emit: Callable[[Val, int], None]) -> None:
        """Cover all rows by tiles, as many of the first of `heights` as possible, then of the next."""
        k, start = self.kernel, self.kernel.index(0)
        for height in heights:
            stop = start + (self.rows - start) // height * height
            with k.loop(start, stop, height) as row:
                emit(row, height)
            start = stop

    def _scores(self, row: Val, height: int, keys: Pointer, scales: Sequence[Pointer], start: Val) -> None:
        """Store the powers of `height` rows, and their new maxima, sums and factors of earlier sums.

        With scales, powers are stored times the scales of the values by which they will be multiplied.
        """
        k, spec = self.kernel, self.spec
        vectors = spec.page // spec.lanes
        sources = [self._query(row + r) for r in range(height)]
        grid = zeros(k, height, vectors, spec.lanes)
        grid = accumulate(k, grid, sources, 1, keys, spec.page, spec.size, panel_vectors=_ONE_CHAIN)
        for r, scores in enumerate(grid):
            position = self.positions.load((row + r) // spec.group)
            if scales:
                scores = [score * scales[0].load(v * spec.lanes, spec.lanes) for v, score in enumerate(scores)]
            visible = [self._visible(score, position, start, v) for v, score in enumerate(scores)]
            self._soften(row + r, visible, scales[1] if scales else None)

    def _query(self, row: Val) -> Pointer:
        spec = self.spec
        token, head = row // spec.group, row % spec.group
        return self.queries.at(token * (spec.kv_heads * spec.group * spec.size) + head * spec.size)

    def _visible(self, score: Val, position: Val, start: Val, v: int) -> Val:
        """The scaled scores of vector number `v`; minus infinity for keys that a token at `position` does not see."""
        k, spec = self.kernel, self.spec
        low = start + v * spec.lanes
        mask = k.lane_mask(position + 1 - low, spec.lanes)
        if spec.window:
            mask = mask & ~k.lane_mask(position + 1 - spec.window - low, spec.lanes)
        return k.ops.select(mask, score * spec.scale, k.constant(-math.inf, F32, spec.lanes))

    def _soften(self, row: Val, scores: list[Val], value_scales: Pointer | None) -> None:
        k, lanes = self.kernel, self.spec.lanes
        place = self._maximum(row)
        old = place.load()
        highest = reduce_pairwise(scores, lambda a, b: fast_max(k, a, b))
        new = fast_max(k, k.ops.reduce(highest, lambda a, b: fast_max(k, a, b)), old)
        place.store(new)
        factor = exp_of_nonpositive(k.ops, (old - new).splat(lanes))
        self._factor(row).store(factor.lane(0))
        powers = [exp_of_nonpositive(k.ops, score - new.splat(lanes)) for score in scores]
        for v, power in enumerate(powers):
            stored = power if value_scales is None else power * value_scales.load(v * lanes, lanes)
            self._powers(row).store(stored, v * lanes)
        total = self._total(row)
        total.store(k.ops.fma(total.load(0, lanes), factor, reduce_pairwise(powers, k.ops.add)))

    def _weigh(self, row: Val, height: int, values: Pointer, column: Val, columns: int, depth: Val) -> None:
        """Multiply sums of earlier pages by their factors, and add powers times values."""
        k, spec = self.kernel, self.spec
        parts = parts_of(k, columns)
        grid = []
        for r in range(height):
            factor = self._factor(row + r).load().splat(k.lanes)
            sums = self._sums(row + r).at(column)
            grid.append([sums.load(part.start, k.lanes) * factor for part in parts])
        sources = [self._powers(row + r) for r in range(height)]
        panel = values.at(column)
        grid = accumulate(k, grid, sources, 1, panel, spec.size, depth, parts[-1].mask, panel_vectors=_ONE_CHAIN)
        for r, line in enumerate(grid):
            sums = self._sums(row + r).at(column)
            for part, value in zip(parts, line, strict=True):
                sums.store(value, part.start)

    def _finish(self, row: Val) -> None:
        """Store the result of a row: its sums divided by the sum of its powers."""
        k, spec = self.kernel, self.spec
        total = k.ops.reduce(self._total(row).load(0, spec.lanes), k.ops.add)
        factor = (1.0 / total).splat(k.lanes)
        token, head = row // spec.group, row % spec.group
        place = self.results.at(token * (spec.kv_heads * spec.group * spec.size) + head * spec.size)
        for part in parts_of(k, spec.size):
            place.store(self._sums(row).load(part.start, k.lanes) * factor, part.start, part.mask)
