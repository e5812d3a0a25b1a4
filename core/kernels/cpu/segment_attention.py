"""Attention within sequences: a task is one head of one sequence, a block of queries at a time.

As in attention.py there is a query per lane, and the scores of a block wait in scratch, [keys][queries]. Lengths are
data: a block takes as many vectors as it has queries for, and the lanes beyond them compute its last query again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.codegen.vmath import exp_of_nonpositive
from core.ir.dim import product, symbol
from core.ir.types import Dim, DType
from core.kernels.catalog.panels import Tile
from core.kernels.catalog.segment_attention import SegmentAttentionSpec
from core.kernels.cpu.lanes import larger
from core.kernels.cpu.microkernel import accumulate, each_tile, zeros
from core.kernels.cpu.nest import offsets_of
from core.kernels.cpu.segments import segment_count
from core.kernels.cpu.tile import transpose_rows
from core.kernels.target import Target
from core.ops.fused import scalar_body

F32 = DType.FLOAT32
_OFFSETS = 3  # the operand


def generate(spec: SegmentAttentionSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    dtypes = (F32, F32, F32, DType.INT64, *spec.extra_dtypes, F32)
    operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
    scratch = k.scratch(len(dtypes), sum(spec.scratch_parts) * F32.itemsize, F32)
    offsets = operands.pop(_OFFSETS)
    with k.parallel(segment_count(k, offsets), k.dim(product(spec.batch.extents))) as (segment, entry):
        start = offsets.load(segment)
        length = offsets.load(segment + 1) - start
        q, kv, v, *extras, y = (
            pointer.at(offset) for pointer, offset in zip(operands, offsets_of(k, spec.batch, entry), strict=True)
        )
        rows = [p.at(start * step) for p, step in ((q, spec.q_step), (kv, spec.k_step), (v, spec.v_step))]
        steps = [(k.dim(along_q), k.dim(along_k)) for along_q, along_k in spec.extra_steps]
        moved = [extra.at(start * (along_q + along_k)) for extra, (along_q, along_k) in zip(extras, steps, strict=True)]
        places = (*rows, *moved, y.at(start * spec.y_step))
        with k.loop(0, length, spec.block) as first:
            count = k.ops.min(length - first, spec.block)
            _Block(k, spec, places, steps, scratch, first, count, length).emit()
    return k


@dataclass(frozen=True)
class _Block:
    """Writes the code for `count` queries from `first` on of a sequence with `length` tokens.

    Only the first product has code for every number of vectors; what follows takes one after the other.
    """

    kernel: Kernel
    spec: SegmentAttentionSpec
    operands: tuple[Pointer, ...]  # Q, K, V, extras, Y: where the sequence begins
    steps: list[tuple[Val, Val]]  # of each extra along queries and keys
    scratch: Pointer
    first: Val
    count: Val
    length: Val

    @property
    def lanes(self) -> int:
        return self.spec.scores[0].lanes

    @property
    def width(self) -> int:
        """Columns of the packed queries and of the scores, whether a block fills them or not."""
        return self.spec.block

    @property
    def factors(self) -> Pointer:
        """One number per query: its greatest score, later what its sums are multiplied by."""
        return self.scratch.at(self.spec.depth * self.width)

    @property
    def scores(self) -> Pointer:
        return self.scratch.at((self.spec.depth + 1) * self.width)

    def emit(self) -> None:
        k, lanes = self.kernel, self.lanes
        vectors = (self.count + (lanes - 1)) // lanes
        with k.loop(0, vectors) as v:
            self._pack(v * lanes)
        for tile in self.spec.scores:
            with k.when(vectors.equals(tile.vectors)):
                for i, most in enumerate(self._product(tile)):
                    self.factors.store(most, i * lanes)
        with k.loop(0, vectors) as v:
            self._softmax(v * lanes)
        self._weigh()

    def _pack(self, query: Val) -> None:
        """A vector of queries, transposed by squares: [depth][width]."""
        k, spec, lanes = self.kernel, self.spec, self.lanes
        last = self.count - 1
        rows = [self.operands[0].at((self.first + k.ops.min(last, query + j)) * spec.q_step) for j in range(lanes)]
        panel = self.scratch.at(query)
        whole = spec.depth // lanes * lanes

        def square(at: Val, valid: int) -> None:
            mask = k.lane_mask(valid, lanes) if valid < lanes else None
            for step, line in enumerate(transpose_rows(k, [row.load(at, lanes, mask) for row in rows])[:valid]):
                panel.store(line, (at + step) * self.width)

        with k.loop(0, whole, lanes) as at:
            square(at, lanes)
        if spec.depth > whole:
            square(k.index(whole), spec.depth - whole)

    def _product(self, tile: Tile) -> list[Val]:
        """Scores of all keys; the answer is the greatest for each query."""
        k, height = self.kernel, tile.rows
        lowest = [k.constant(-math.inf, F32, self.lanes)] * tile.vectors
        at = self.length // height * height
        with k.fold(0, at, lowest, height) as fold:
            fold.values = self._score_tile(fold.index, height, fold.values)
        most, rest = fold.values, self.length - at
        for size in (8, 4, 2, 1):
            if size < height:
                part = k.ops.bit_and(rest, size)
                tail = partial(self._score_tile, at, size, most)
                most = k.choose(part.equals(size), tail, partial(list, most))
                at = at + part
        return most

    def _score_tile(self, key: Val, height: int, most: list[Val]) -> list[Val]:
        """Scores of `height` keys."""
        k, spec = self.kernel, self.spec
        sources = [self.operands[1].at((key + r) * spec.k_step) for r in range(height)]
        grid = zeros(k, height, len(most), self.lanes)
        grid = accumulate(k, grid, sources, 1, self.scratch, self.width, spec.depth)
        place = self.scores.at(key * self.width)
        for r, row in enumerate(grid):
            finished = [self._finished(value, key + r, v) for v, value in enumerate(row)]
            for v, value in enumerate(finished):
                place.store(value, r * self.width + v * self.lanes)
            most = [larger(k, value, before) for value, before in zip(finished, most, strict=True)]
        return most

    def _finished(self, score: Val, key: Val, v: int) -> Val:
        """A vector of scores after the epilogue."""
        k, spec = self.kernel, self.spec
        if spec.epilogue is None:
            return score
        triples = zip(self.operands[3:-1], self.steps, spec.extra_steps, strict=True)
        extras = [self._extra(place.at(key * steps[1]), steps[0], dim, v) for place, steps, (dim, _) in triples]
        return k.ops.splat(scalar_body(k.ops, spec.epilogue, [score, *extras])[0], self.lanes)

    def _extra(self, place: Pointer, step: Val, dim: Dim, v: int) -> Val:
        """What an extra holds for vector `v` of the queries; `step` goes from one query to the next."""
        k, lanes = self.kernel, self.lanes
        if dim == 0:
            return place.load().splat(lanes)
        at = self.first + v * lanes
        mask = k.lane_mask(self.count - v * lanes, lanes)
        if dim == 1:
            return place.load(at, lanes, mask)
        return place.at(at * step).gather(k.lane_numbers(lanes) * step, mask)

    def _softmax(self, query: Val) -> None:
        """Scores of a vector of queries to powers, in place, and the inverse of their sums."""
        k, lanes = self.kernel, self.lanes
        factors, column = self.factors.at(query), self.scores.at(query)
        most = factors.load(0, lanes)
        with k.fold(0, self.length, [k.zeros(F32, lanes)]) as fold:
            at = fold.index * self.width
            power = exp_of_nonpositive(k.ops, column.load(at, lanes) - most)
            column.store(power, at)
            fold.values = [fold.values[0] + power]
        factors.store(1.0 / fold.values[0])

    def _weigh(self) -> None:
        """The sums of values by these powers, times one factor per query: a panel of columns at a time."""
        k, spec = self.kernel, self.spec
        width = spec.values.columns
        full, rest = divmod(spec.columns, width)
        with k.loop(0, full) as i:
            self._weigh_panel(i * width, width)
        if rest:
            self._weigh_panel(k.index(full * width), rest)

    def _weigh_panel(self, column: Val, columns: int) -> None:
        def tile(query: Val, height: int) -> None:
            self._value_tile(query, height, column, columns)

        each_tile(self.kernel, self.kernel.index(0), self.count, symbol("n"), self.spec.values.rows, tile)

    def _value_tile(self, query: Val, height: int, column: Val, columns: int) -> None:
        k, spec, lanes = self.kernel, self.spec, self.spec.values.lanes
        vectors, tail = -(-columns // lanes), columns % lanes
        mask = k.lane_mask(tail, lanes) if tail else None
        sources = [self.scores.at(query + r) for r in range(height)]
        values, target = self.operands[2].at(column), self.operands[-1].at(column)
        grid = zeros(k, height, vectors, lanes)
        grid = accumulate(k, grid, sources, self.width, values, spec.v_step, self.length, mask)
        for r, row in enumerate(grid):
            factor = self.factors.load(query + r).splat(lanes)
            row = [self._weighed(value, factor) for value in row]
            place = target.at((self.first + query + r) * spec.y_step)
            for v, value in enumerate(row):
                place.store(value, v * lanes, mask if v == vectors - 1 else None)

    def _weighed(self, total: Val, factor: Val) -> Val:
        """A result; zero where the weights are no numbers, if that is asked for."""
        k = self.kernel
        if not self.spec.guarded:
            return total * factor
        return k.ops.select(k.ops.is_nan(factor), k.zeros(F32, total.lanes), total * factor)
