"""Attention with a query per lane: a task is a block of queries of one head, with scores in scratch as [keys][queries].

The maximum and the sum of a softmax need no operation across lanes. The block of queries is packed. Keys and values are
read in place, except that contiguous float16 keys are first converted to float32 in scratch, a tile at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.codegen.vmath import exp_of_nonpositive
from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.attention.scores_cpu import store_scores
from lathe.core.kernels.attention.spec import AttentionSpec
from lathe.core.kernels.attention.weighted_values_cpu import WeightedValues
from lathe.core.kernels.cpu.microkernel import accumulate, zeros
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.repack import gather_panel, widen_rows
from lathe.core.kernels.shared.words import compute_dtype, elements_per_word, word_dtype
from lathe.core.kernels.target import Target
from lathe.core.ops.nn.fused import scalar_body

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
    """The addresses of Q, K, V, the extras and Y in one list, and that of this thread's scratch as float32.

    Loads and stores of the operands convert from and to their compute types (narrow floats compute in float32).
    """
    dtypes = (spec.dtype, spec.dtype, spec.dtype, *spec.extra_dtypes, spec.dtype)
    operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
    operands = [pointer.converting(compute_dtype(pointer.dtype)) for pointer in operands]
    return operands, k.scratch(len(dtypes), sum(spec.scratch_parts) * F32.itemsize, F32)


@dataclass(frozen=True)
class _Block:
    """Generates the code for `count` queries of one head, from `first` on."""

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
        """Columns of the packed queries and of the scores: `count`, rounded up to whole vectors."""
        return self.vectors * self.lanes

    @property
    def scores(self) -> Pointer:
        return self.scratch.at(self.spec.scratch_parts[0])

    def emit(self) -> None:
        k, spec = self.kernel, self.spec
        across, down = spec.q_steps
        queries, size = self._words(self.operands[0].at(self.first * across)), elements_per_word(spec.element)
        packed = self.scratch.view(word_dtype(spec.element))
        gather_panel(k, queries, packed, (spec.depth // size, self.count), (down, across // size), self.lanes)
        totals = self._softmax(self._product())
        factors = self.scores.at(k.dim(spec.scratch_parts[1]))
        for v, total in enumerate(totals):
            factors.store(1.0 / total, v * self.lanes)
        values, results = self.operands[2], self.operands[-1].at(self.first * spec.y_step)
        scores = self.scores.at
        WeightedValues(k, spec, spec.known_keys, scores, self.width, factors, values, results, self.count).emit()

    def _product(self) -> list[Val]:
        """Compute the scores of all keys; returns the maximum for each query."""
        k, keys, height = self.kernel, self.spec.known_keys, self.spec.scores.rows
        lowest = [k.constant(-math.inf, F32, self.lanes)] * self.vectors
        whole = keys // height * height
        with k.fold(0, whole, lowest, height) as fold:
            fold.values = self._score_tile(fold.index, height, fold.values)
        return self._score_tile(k.index(whole), keys - whole, fold.values) if keys > whole else fold.values

    def _score_tile(self, key: Val, height: int, most: list[Val]) -> list[Val]:
        """Compute and store the scores of `height` keys from `key` on.

        Returns the greatest score of each query (one per lane), with `most`, those over the keys before, included.
        """
        k, spec = self.kernel, self.spec
        across, down = spec.k_steps
        sources = [self._words(self.operands[1].at((key + r) * across)) for r in range(height)]
        if spec.widens:
            sources = widen_rows(
                k, sources, self.scratch.at(k.dim(sum(spec.scratch_parts[:-1]))), spec.depth, self.lanes
            )
        grid = zeros(k, height, self.vectors, self.lanes)
        queries, depth = self.scratch.view(word_dtype(spec.element)), spec.depth // elements_per_word(spec.element)
        grid = accumulate(k, grid, sources, down, queries, self.width, depth, element=spec.element)
        place = self.scores.at(key * self.width)
        return store_scores(
            k, grid, place, self.width, most, lambda score, r, v: self._apply_epilogue(score, key + r, v)
        )

    def _words(self, place: Pointer) -> Pointer:
        """The address `place` of elements of Q or K as an address of words of the first product."""
        return place if self.spec.element is F32 else place.view(word_dtype(self.spec.element))

    def _apply_epilogue(self, score: Val, key: Val, v: int) -> Val:
        """The epilogue applied to the vector `score`: vector number `v` of the queries, for one key."""
        k, spec = self.kernel, self.spec
        if spec.epilogue is None:
            return score
        pairs = zip(self.operands[3:-1], spec.extra_steps, strict=True)
        extras = [self._extra(place.at(key * steps[1]), steps[0], v) for place, steps in pairs]
        return k.ops.splat(scalar_body(k.ops, spec.epilogue, [score, *extras])[0], self.lanes)

    def _extra(self, place: Pointer, step: Dim, v: int) -> Val:
        """The elements of an extra input for vector number `v` of the queries and the key that `place` points to.

        `step` is the extra's stride between queries.
        """
        k, lanes = self.kernel, self.lanes
        if step == 0:
            return place.load().splat(lanes)
        at, left = v * lanes, self.count - v * lanes
        mask = k.lane_mask(left, lanes) if left < lanes else None
        if step == 1:
            return place.load(self.first + at, lanes, mask)
        return place.at((self.first + at) * k.dim(step)).gather(k.lane_numbers(lanes) * k.dim(step), mask)

    def _softmax(self, most: list[Val]) -> list[Val]:
        """Replace each score by exp(score - maximum); returns the sum of these powers for each query."""
        k, lanes = self.kernel, self.lanes
        with k.fold(0, self.spec.known_keys, [k.zeros(F32, lanes)] * self.vectors) as fold:
            row = self.scores.at(fold.index * self.width)
            powers = [exp_of_nonpositive(k.ops, row.load(v * lanes, lanes) - most[v]) for v in range(self.vectors)]
            for v, power in enumerate(powers):
                row.store(power, v * lanes)
            fold.values = [total + power for total, power in zip(fold.values, powers, strict=True)]
        return fold.values
