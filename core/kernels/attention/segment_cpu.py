"""Attention within packed sequences: a task is one head of one sequence, a block of queries at a time.

As in `attention/cpu.py` there is a query per lane, and scratch holds the scores of a block as [keys][queries]. Lengths
are data: a block has as many vectors as its queries need, and surplus lanes compute its last query again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.codegen.vmath import exp_of_nonpositive
from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.attention.scores_cpu import store_scores
from lathe.core.kernels.attention.segment_spec import SegmentAttentionSpec
from lathe.core.kernels.attention.weighted_values_cpu import WeightedValues
from lathe.core.kernels.cpu.microkernel import accumulate, zeros
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.register_shuffles import transpose_rows
from lathe.core.kernels.cpu.segments import segment_count
from lathe.core.kernels.shared.panels import Tile
from lathe.core.kernels.target import Target
from lathe.core.ops.nn.fused import scalar_body

F32 = DType.FLOAT32
_OFFSETS = 3  # index of the operand with the bounds of the sequences


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
    """Generates the code for `count` queries from `first` on, of a sequence with `length` tokens.

    The first product has code for each number of vectors; the other steps loop over vectors.
    """

    kernel: Kernel
    spec: SegmentAttentionSpec
    operands: tuple[Pointer, ...]  # Q, K, V, extras, Y: where the sequence begins
    steps: list[tuple[Val, Val]]  # strides of each extra along queries and keys
    scratch: Pointer
    first: Val
    count: Val
    length: Val

    @property
    def lanes(self) -> int:
        return self.spec.scores[0].lanes

    @property
    def width(self) -> int:
        """Columns of the packed queries and of the scores: those of a full block."""
        return self.spec.block

    @property
    def factors(self) -> Pointer:
        """The address in scratch of one number per query: first its maximum score, later the inverse of its sum."""
        return self.scratch.at(self.spec.depth * self.width)

    @property
    def scores(self) -> Pointer:
        return self.scratch.at((self.spec.depth + 1) * self.width)

    def emit(self) -> None:
        k, spec, lanes = self.kernel, self.spec, self.lanes
        vectors = (self.count + (lanes - 1)) // lanes
        with k.loop(0, vectors) as v:
            self._pack(v * lanes)
        for tile in spec.scores:
            with k.when(vectors.equals(tile.vectors)):
                for i, most in enumerate(self._product(tile)):
                    self.factors.store(most, i * lanes)
        with k.loop(0, vectors) as v:
            self._softmax(v * lanes)
        values, results, scores = self.operands[2], self.operands[-1].at(self.first * spec.y_step), self.scores.at
        WeightedValues(k, spec, self.length, scores, self.width, self.factors, values, results, self.count).emit()

    def _pack(self, query: Val) -> None:
        """Pack a vector of queries, transposed by squares: [depth][width]."""
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
        """Compute the scores of all keys; returns the maximum for each query."""
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
        """Compute and store the scores of `height` keys from `key` on.

        Returns the greatest score of each query (one per lane), with `most`, those over the keys before, included.
        """
        k, spec = self.kernel, self.spec
        sources = [self.operands[1].at((key + r) * spec.k_step) for r in range(height)]
        grid = zeros(k, height, len(most), self.lanes)
        grid = accumulate(k, grid, sources, 1, self.scratch, self.width, spec.depth)
        place = self.scores.at(key * self.width)
        return store_scores(
            k, grid, place, self.width, most, lambda score, r, v: self._apply_epilogue(score, key + r, v)
        )

    def _apply_epilogue(self, score: Val, key: Val, v: int) -> Val:
        """The epilogue applied to the vector `score`: vector number `v` of the queries, for one key."""
        k, spec = self.kernel, self.spec
        if spec.epilogue is None:
            return score
        triples = zip(self.operands[3:-1], self.steps, spec.extra_steps, strict=True)
        extras = [self._extra(place.at(key * steps[1]), steps[0], dim, v) for place, steps, (dim, _) in triples]
        return k.ops.splat(scalar_body(k.ops, spec.epilogue, [score, *extras])[0], self.lanes)

    def _extra(self, place: Pointer, step: Val, dim: Dim, v: int) -> Val:
        """The elements of an extra input for vector number `v` of the queries and the key that `place` points to.

        `step` is the extra's stride between queries, and `dim` the same as a dimension of the spec.
        """
        k, lanes = self.kernel, self.lanes
        if dim == 0:
            return place.load().splat(lanes)
        at = self.first + v * lanes
        mask = k.lane_mask(self.count - v * lanes, lanes)
        if dim == 1:
            return place.load(at, lanes, mask)
        return place.at(at * step).gather(k.lane_numbers(lanes) * step, mask)

    def _softmax(self, query: Val) -> None:
        """Replace the scores of a vector of queries by exp(score - maximum), and store the inverse of their sums."""
        k, lanes = self.kernel, self.lanes
        factors, column = self.factors.at(query), self.scores.at(query)
        most = factors.load(0, lanes)
        with k.fold(0, self.length, [k.zeros(F32, lanes)]) as fold:
            at = fold.index * self.width
            power = exp_of_nonpositive(k.ops, column.load(at, lanes) - most)
            column.store(power, at)
            fold.values = [fold.values[0] + power]
        factors.store(1.0 / fold.values[0])
