"""Attention with a row of scores for each query: a task is a block of queries of one head.

A vector holds scores of adjacent keys, so no lane is empty however few queries there are, and extras for each pair of
query and key are contiguous. All queries of a block are multiplied by a few keys while these keys are in the
first-level cache, so each block reads the keys from memory once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.codegen.vmath import exp_of_nonpositive
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.attention.cpu import operands_of
from lathe.core.kernels.attention.spec import QueryRowsSpec
from lathe.core.kernels.attention.weighted_values_cpu import WeightedValues
from lathe.core.kernels.cpu.microkernel import accumulate, zeros
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.reduction import ParallelAccumulators, fast_max, parts_of
from lathe.core.kernels.cpu.register_shuffles import row_sums
from lathe.core.kernels.cpu.repack import gather_panel
from lathe.core.kernels.target import Target
from lathe.core.ops.nn.fused import scalar_body

F32 = DType.FLOAT32
_CHUNK = 8  # queries at a time, in the last block of a dynamic number of queries


def generate(spec: QueryRowsSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    operands, scratch = operands_of(k, spec)
    width, queries = spec.block, k.dim(spec.queries)
    steps = (spec.q_steps[0], 0, 0, *(across for across, _ in spec.extra_steps), spec.y_step)
    full, rest = queries // width, queries % width
    some = k.ops.min(rest, 1)
    with k.parallel(k.dim(product(spec.batch.extents)), full + some) as (entry, block):
        offsets = offsets_of(k, spec.batch, entry)

        def queries_from(first: Val, count: int) -> None:
            moves = zip(operands, offsets, steps, strict=True)
            places = tuple(pointer.at(offset + first * k.dim(step)) for pointer, offset, step in moves)
            _Block(k, spec, places, scratch, count).emit()

        if full.constant != 0:
            with k.when(block < full):
                queries_from(block * width, width)
        if rest.constant != 0:
            with k.when(block.equals(full)):
                _remaining_queries(k, full * width, rest, width, queries_from)
    return k


def _remaining_queries(k: Kernel, first: Val, rest: Val, width: int, queries_from: Callable[[Val, int], None]) -> None:
    """Compute the last `rest` queries from `first` on, fewer than `width`: `queries_from(first, count)` generates code.

    If `rest` is known at run time only, it is made up of chunks of 8, 4, 2 and 1 queries.
    """
    if rest.constant is not None:
        queries_from(first, int(rest.constant))
        return
    if width > _CHUNK:
        whole = rest // _CHUNK * _CHUNK
        with k.loop(0, whole, _CHUNK) as place:
            queries_from(first + place, _CHUNK)
        first, rest = first + whole, rest - whole
    for count in (4, 2, 1):
        if count < width:
            with k.when((rest % (2 * count)) >= count):
                queries_from(first + rest // (2 * count) * (2 * count), count)


@dataclass(frozen=True)
class _Block:
    """Generates the code for `count` queries of one head."""

    kernel: Kernel
    spec: QueryRowsSpec
    operands: tuple[Pointer, ...]  # Q, K, V, extras, Y; all but K and V from the first of these queries on
    scratch: Pointer
    count: int

    @property
    def lanes(self) -> int:
        return self.spec.scores.lanes

    def emit(self) -> None:
        k, spec = self.kernel, self.spec
        if spec.copies:
            with k.loop(0, self.count) as query:
                self._copy(query)
        if spec.adds_across or (not isinstance(spec.queries, int) and spec.reads_keys_in_place(self.count)):
            self._product_across(k.index(0))
        else:
            self._product()
        factors = self.scratch.at(k.dim(sum(spec.scratch_parts[:3])))
        with k.loop(0, self.count) as query:
            factors.store(1.0 / self._softmax(self._scores(query)), query)
        keys = spec.keys if isinstance(spec.keys, int) else k.dim(spec.keys)
        values, results = self.operands[2], self.operands[-1]
        WeightedValues(k, spec, keys, self._scores, 1, factors, values, results, self.count).emit()

    def _query(self, query: Val) -> Pointer:
        source = self.scratch if self.spec.copies else self.operands[0]
        return source.at(query * self.spec.query_pitch)

    def _scores(self, query: Val) -> Pointer:
        return self.scratch.at(self.spec.scratch_parts[0]).at(query * self.kernel.dim(self.spec.key_pitch))

    def _copy(self, query: Val) -> None:
        k, spec = self.kernel, self.spec
        across, along = spec.q_steps
        source, target = self.operands[0].at(query * across), self._query(query)
        for part in parts_of(k, spec.depth, self.lanes):
            if along == 1:
                value = source.load(part.start, part.lanes, part.mask)
            else:
                value = source.at(part.start * along).gather(k.lane_numbers(part.lanes) * along, part.mask)
            target.store(value, part.start, part.mask)

    @property
    def keys(self) -> Val:
        return self.kernel.dim(self.spec.keys)

    def _product_across(self, first: Val) -> None:
        """Compute the scores from key `first` on, with keys read in place.

        Each key has a vector of partial sums; their lanes are added up for `lanes` keys at once.
        """
        k, lanes, count = self.kernel, self.lanes, self.keys - first
        until = first + count // lanes * lanes
        with k.loop(first, until, lanes) as key:
            self._score_keys_in_place(key, k.index(lanes))
        rest = self.keys - until
        if rest.constant is None:
            with k.when(rest > 0):
                self._score_keys_in_place(until, rest)
        elif rest.constant:
            self._score_keys_in_place(until, rest)

    def _score_keys_in_place(self, key: Val, left: Val) -> None:
        """Compute the scores of the `left` keys from `key` on, at most a vector of them.

        If the number is dynamic, the last key stands in for the missing keys.
        """
        k, spec, lanes = self.kernel, self.spec, self.lanes
        count = lanes if left.constant is None else int(left.constant)
        places = [key + r if left.constant is not None else key + k.ops.min(left - 1, r) for r in range(count)]
        rows = [self.operands[1].at(place * spec.k_steps[0]) for place in places]
        with k.loop(0, self.count) as query:
            source, whole = self._query(query), spec.depth // lanes * lanes
            with k.fold(0, whole, [k.zeros(F32, lanes)] * count, lanes) as fold:
                factor = source.load(fold.index, lanes)
                loaded = [row.load(fold.index, lanes) for row in rows]
                fold.values = [k.ops.fma(x, factor, total) for x, total in zip(loaded, fold.values, strict=True)]
            sums = fold.values
            if spec.depth > whole:
                mask = k.lane_mask(spec.depth - whole, lanes)
                factor, *loaded = [row.load(whole, lanes, mask) for row in (source, *rows)]
                sums = [k.ops.fma(x, factor, total) for x, total in zip(loaded, sums, strict=True)]
            self._store_scores(row_sums(k, [*sums, *[k.zeros(F32, lanes)] * (lanes - count)]), query, key, left)

    def _product(self) -> None:
        """Compute the scores by panels of keys, which are transposed unless keys are contiguous already."""
        k, spec = self.kernel, self.spec
        height, width = spec.scores.rows, spec.scores.columns
        rows, columns = self.count // height * height, self.keys // width * width

        def panel(key: Val, count: int) -> None:
            keys, step = self.operands[1].at(key * spec.k_steps[0]), spec.k_steps[1]
            if spec.repacks:
                packed = self.scratch.at(k.dim(spec.scratch_parts[0] + spec.scratch_parts[1]))
                gather_panel(k, keys, packed, (spec.depth, count), (step, spec.k_steps[0]), self.lanes)
                keys, step = packed, -(-count // self.lanes) * self.lanes
            with k.loop(0, rows, height) as query:
                self._score_tile(query, height, key, count, keys, step)
            if self.count > rows:
                self._score_tile(k.index(rows), self.count - rows, key, count, keys, step)

        with k.loop(0, columns, width) as key:
            panel(key, width)
        rest = (self.keys - columns).constant
        if rest is None:
            self._product_across(columns)
        elif rest:
            panel(columns, int(rest))

    def _score_tile(self, query: Val, height: int, key: Val, count: int, panel: Pointer, step: int) -> None:
        """Compute and store the scores of `height` queries from `query` on and `count` keys from `key` on.

        The keys lie in `panel` as [depth][keys], whose rows are `step` elements apart.
        """
        k, spec, lanes = self.kernel, self.spec, self.lanes
        starts = range(0, count, lanes)
        mask = k.lane_mask(count % lanes, lanes) if count % lanes and not spec.repacks else None
        sources = [self._query(query + r) for r in range(height)]
        grid = zeros(k, height, len(starts), lanes)
        grid = accumulate(k, grid, sources, 1, panel, step, spec.depth, mask)
        for r, row in enumerate(grid):
            for start, score in zip(starts, row, strict=True):
                self._store_scores(score, query + r, key + start, k.index(min(count - start, lanes)))

    def _store_scores(self, score: Val, query: Val, key: Val, count: Val) -> None:
        """Run the epilogue on a vector of scores and store it, with minus infinity beyond the last key."""
        k, lanes = self.kernel, self.lanes
        mask = k.lane_mask(count, lanes) if count.constant != lanes else None
        score = self._apply_epilogue(score, query, key, mask)
        if mask is not None:
            score = k.ops.select(mask, score, k.constant(-math.inf, F32, lanes))
        self._scores(query).store(score, key)

    def _apply_epilogue(self, score: Val, query: Val, key: Val, mask: Val | None) -> Val:
        k, spec = self.kernel, self.spec
        if spec.epilogue is None:
            return score
        extras = list(self._extras(query, key, mask))
        return k.ops.splat(scalar_body(k.ops, spec.epilogue, [score, *extras])[0], self.lanes)

    def _extras(self, query: Val, key: Val, mask: Val | None) -> Iterator[Val]:
        k, lanes = self.kernel, self.lanes
        for pointer, (across, along) in zip(self.operands[3:-1], self.spec.extra_steps, strict=True):
            place = pointer.at(query * k.dim(across) + key * along)
            if along == 0:
                yield place.load().splat(lanes)
            elif along == 1:
                yield place.load(0, lanes, mask)
            else:
                yield place.gather(k.lane_numbers(lanes) * along, mask)

    def _softmax(self, scores: Pointer) -> Val:
        """Replace the scores of one query by exp(score - maximum); returns the sum of these powers."""
        k, lanes = self.kernel, self.lanes
        padded = (self.keys + (lanes - 1)) // lanes * lanes
        greatest = ParallelAccumulators(k, F32, -math.inf, partial(fast_max, k))
        most = greatest.over(padded, lambda best, i, n, mask: fast_max(k, scores.load(i, n), best))

        def add(total: Val, i: Val, lanes: int, mask: Val | None) -> Val:
            power = exp_of_nonpositive(k.ops, scores.load(i, lanes) - most.splat(lanes))
            scores.store(power, i)
            return total + power

        return ParallelAccumulators(k, F32, 0.0, k.ops.add).over(padded, add)
