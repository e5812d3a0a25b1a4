"""Attention with a row of scores for each key: a task is a block of queries of one head, and its scores wait in
scratch, [keys][queries].

With a query per lane the greatest score and the sum of a softmax need no step across lanes, keys and values are read
where they lie, and only the block of queries is packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.codegen.vmath import exp_of_nonpositive
from core.ir.dim import product
from core.ir.types import Dim, DType
from core.kernels.catalog.attention import AttentionSpec
from core.kernels.catalog.words import computed_dtype, per_word, word_dtype
from core.kernels.cpu.lanes import larger
from core.kernels.cpu.microkernel import accumulate, zeros
from core.kernels.cpu.nest import offsets_of
from core.kernels.cpu.repack import gather_panel, widened
from core.kernels.target import Target
from core.ops.fused import scalar_body

F32 = DType.FLOAT32


def generate(spec: AttentionSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    operands, scratch = operands_of(k, spec)
    width = spec.scores.columns
    full, rest = divmod(spec.known_queries, width)
    with k.parallel(k.dim(product(spec.batch.extents)), full + bool(rest)) as (entry, block):
        offsets = offsets_of(k, spec.batch, entry)
        places = [pointer.at(offset) for pointer, offset in zip(operands, offsets, strict=True)]
        for count, wanted in ((width, block < full), (rest, block.equals(full))):
            if count and (count < width or full):
                with k.when(wanted):
                    _Block(k, spec, tuple(places), scratch, block * width, count).emit()
    return k


def operands_of(k: Kernel, spec: AttentionSpec) -> tuple[list[Pointer], Pointer]:
    """Q, K, V, extras and Y, of elements as the kernel computes with them, and the scratch of this thread."""
    dtypes = (spec.dtype, spec.dtype, spec.dtype, *spec.extra_dtypes, spec.dtype)
    operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
    operands = [pointer.computing(computed_dtype(pointer.dtype)) for pointer in operands]
    return operands, k.scratch(len(dtypes), sum(spec.scratch_parts) * F32.itemsize, F32)


@dataclass(frozen=True)
class _Block:
    """Writes the code for `count` queries from `first` on, of one head."""

    kernel: Kernel
    spec: AttentionSpec
    operands: tuple[Pointer, ...]  # Q, K, V, extras, Y
    scratch: Pointer
    first: Val
    count: int

    @property
    def lanes(self) -> int:
        return self.spec.scores.lanes

    @property
    def vectors(self) -> int:
        return -(-self.count // self.lanes)

    @property
    def width(self) -> int:
        """Columns of the packed queries and of the scores: the queries, padded to whole vectors."""
        return self.vectors * self.lanes

    @property
    def scores(self) -> Pointer:
        return self.scratch.at(self.spec.scratch_parts[0])

    def emit(self) -> None:
        k, spec = self.kernel, self.spec
        across, down = spec.q_steps
        queries, size = self._words(self.operands[0].at(self.first * across)), per_word(spec.element)
        packed = self.scratch.view(word_dtype(spec.element))
        gather_panel(k, queries, packed, (spec.depth // size, self.count), (down, across // size), self.lanes)
        totals = self._softmax(self._product())
        factors = self.scores.at(k.dim(spec.scratch_parts[1]))
        for v, total in enumerate(totals):
            factors.store(1.0 / total, v * self.lanes)
        values, results = self.operands[2], self.operands[-1].at(self.first * spec.y_step)
        Weighing(k, spec, self.scores.at, self.width, factors, values, results, self.count).emit()

    def _product(self) -> list[Val]:
        """Scores of all keys; the answer is the greatest for each query."""
        k, keys, height = self.kernel, self.spec.known_keys, self.spec.scores.rows
        lowest = [k.constant(-math.inf, F32, self.lanes)] * self.vectors
        whole = keys // height * height
        with k.fold(0, whole, lowest, height) as fold:
            fold.values = self._score_tile(fold.index, height, fold.values)
        return self._score_tile(k.index(whole), keys - whole, fold.values) if keys > whole else fold.values

    def _score_tile(self, key: Val, height: int, most: list[Val]) -> list[Val]:
        """Scores of `height` keys."""
        k, spec = self.kernel, self.spec
        across, down = spec.k_steps
        sources = [self._words(self.operands[1].at((key + r) * across)) for r in range(height)]
        if spec.widens:
            sources = widened(k, sources, self.scratch.at(k.dim(sum(spec.scratch_parts[:-1]))), spec.depth, self.lanes)
        grid = zeros(k, height, self.vectors, self.lanes)
        queries, depth = self.scratch.view(word_dtype(spec.element)), spec.depth // per_word(spec.element)
        grid = accumulate(k, grid, sources, down, queries, self.width, depth, element=spec.element)
        place = self.scores.at(key * self.width)
        for r, row in enumerate(grid):
            finished = [self._finished(value, key + r, v) for v, value in enumerate(row)]
            for v, value in enumerate(finished):
                place.store(value, r * self.width + v * self.lanes)
            most = [larger(k, value, before) for value, before in zip(finished, most, strict=True)]
        return most

    def _words(self, place: Pointer) -> Pointer:
        """The same address, of what the first product multiplies."""
        return place if self.spec.element is F32 else place.view(word_dtype(self.spec.element))

    def _finished(self, score: Val, key: Val, v: int) -> Val:
        """A vector of scores after the epilogue."""
        k, spec = self.kernel, self.spec
        if spec.epilogue is None:
            return score
        pairs = zip(self.operands[3:-1], spec.extra_steps, strict=True)
        extras = [self._extra(place.at(key * steps[1]), steps[0], v) for place, steps in pairs]
        return k.ops.splat(scalar_body(k.ops, spec.epilogue, [score, *extras])[0], self.lanes)

    def _extra(self, place: Pointer, step: Dim, v: int) -> Val:
        """What an extra holds for vector `v` of the queries; `step` goes from one query to the next."""
        k, lanes = self.kernel, self.lanes
        if step == 0:
            return place.load().splat(lanes)
        at, left = v * lanes, self.count - v * lanes
        mask = k.lane_mask(left, lanes) if left < lanes else None
        if step == 1:
            return place.load(self.first + at, lanes, mask)
        return place.at((self.first + at) * k.dim(step)).gather(k.lane_numbers(lanes) * k.dim(step), mask)

    def _softmax(self, most: list[Val]) -> list[Val]:
        """Scores to powers, in place; the answer is their sum for each query."""
        k, lanes = self.kernel, self.lanes
        with k.fold(0, self.spec.known_keys, [k.zeros(F32, lanes)] * self.vectors) as fold:
            row = self.scores.at(fold.index * self.width)
            powers = [exp_of_nonpositive(k.ops, row.load(v * lanes, lanes) - most[v]) for v in range(self.vectors)]
            for v, power in enumerate(powers):
                row.store(power, v * lanes)
            fold.values = [total + power for total, power in zip(fold.values, powers, strict=True)]
        return fold.values


@dataclass(frozen=True)
class Weighing:
    """Writes the sums of the values of `count` queries by the powers of their scores, times one factor per query.

    `powers` says where those of a query lie, `step` is the way from key to key there. `values` and `results` are V and
    Y of this head, Y from the first of these queries on.
    """

    kernel: Kernel
    spec: AttentionSpec
    powers: Callable[[Val], Pointer]
    step: int
    factors: Pointer
    values: Pointer
    results: Pointer
    count: int

    def emit(self) -> None:
        k, spec = self.kernel, self.spec
        width = spec.values.columns
        full, rest = divmod(spec.columns, width)
        with k.loop(0, full) as panel:
            self._panel(panel * width, width)
        if rest:
            self._panel(k.index(full * width), rest)

    def _panel(self, column: Val, columns: int) -> None:
        """`columns` columns of the values, a register tile of queries at a time."""
        height = self.spec.values.rows
        whole = self.count // height * height
        with self.kernel.loop(0, whole, height) as query:
            self._tile(query, height, column, columns)
        if self.count > whole:
            self._tile(self.kernel.index(whole), self.count - whole, column, columns)

    def _tile(self, query: Val, height: int, column: Val, columns: int) -> None:
        k, spec, lanes = self.kernel, self.spec, self.spec.values.lanes
        vectors, tail = -(-columns // lanes), columns % lanes
        mask = k.lane_mask(tail, lanes) if tail else None
        sources = [self.powers(query + r) for r in range(height)]
        grid = zeros(k, height, vectors, lanes)
        values, target = self.values.at(column), self.results.at(column)
        keys = spec.keys if isinstance(spec.keys, int) else k.dim(spec.keys)
        grid = accumulate(k, grid, sources, self.step, values, spec.v_step, keys, mask)
        for r, row in enumerate(grid):
            factor = self.factors.load(query + r).splat(lanes)
            place = target.at((query + r) * spec.y_step)
            for v, value in enumerate(row):
                place.store(self._weighed(value, factor), v * lanes, mask if v == vectors - 1 else None)

    def _weighed(self, total: Val, factor: Val) -> Val:
        """A result; zero where the weights are no numbers, if that is asked for: then their sum is none."""
        k = self.kernel
        if not self.spec.guarded:
            return total * factor
        return k.ops.select(k.ops.is_nan(factor), k.zeros(F32, total.lanes), total * factor)
