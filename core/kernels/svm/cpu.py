"""Support vector machines: distances or products in vectors of float32, weighted sums of kernel values in float64.

A task has as many rows as a vector has lanes of float64. Decisions are computed row by row, with the support vectors in
lanes. Labels and probabilities are then computed for all rows at once, with a row in each lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks, grain
from lathe.core.kernels.svm.spec import SvmSpec
from lathe.core.kernels.target import Target
from lathe.core.ops.ml.svm import LEAST, ROUNDS, TOLERANCE

_F32, _F64, _I64 = DType.FLOAT32, DType.FLOAT64, DType.INT64
_BLOCKS = 4  # blocks of support vectors at a time, as independent chains of additions
_VECTORS, _WEIGHTS, _SPANS, _RHO, _A, _B, _LABELS, _FIRST_OUTPUT = range(1, 9)


def generate(spec: SvmSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    machine = _Machine(k, spec)
    rows, steps = k.dim(spec.rows), grain(4 * spec.features, spec.blocks * spec.lanes * (spec.features + 20))
    tasks = (rows + (spec.together - 1)) // spec.together
    with even_chunks(k, tasks, k.index(steps)) as (start, stop), k.loop(start, stop) as task:
        first = task * spec.together
        have = k.ops.min(rows - first, spec.together)
        with k.loop(0, have) as lane:
            machine.decide(first + lane, lane)
        machine.finish(first, have)
    return k


class _Machine:
    """The operands of the kernel, and the code of its steps."""

    def __init__(self, k: Kernel, spec: SvmSpec) -> None:
        self.k, self.spec, self.wide = k, spec, spec.together
        self.x, self.vectors = k.operand(0, _F32), k.operand(_VECTORS, _F32)
        self.weights, self.rho, self.a, self.b = (k.operand(i, _F64) for i in (_WEIGHTS, _RHO, _A, _B))
        self.spans, self.labels = k.operand(_SPANS, _I64), k.operand(_LABELS, _I64)
        outputs = 2 if spec.classes else 1
        self.scores = k.operand(_FIRST_OUTPUT + outputs - 1, _F32)
        self.label = k.operand(_FIRST_OUTPUT, _I64)
        sizes = [each.nbytes for each in spec.scratch]
        found = [k.scratch(_FIRST_OUTPUT + outputs + i, size, _F64) for i, size in enumerate(sizes)]
        self.kernels, self.shares, self.decisions, self.classes, self.square, self.row = found
        self.kernels = self.kernels.view(_F32)

    # One row

    def decide(self, row: Val, lane: Val) -> None:
        """Compute the decisions of batch row `row`, which is number `lane` of the task's rows."""
        spec, k = self.spec, self.k
        x, full = self.x.at(row * spec.features), spec.blocks // _BLOCKS * _BLOCKS
        with k.loop(0, full, _BLOCKS) as block:
            self._compute_kernels(x, block, _BLOCKS)
        if spec.blocks > full:
            self._compute_kernels(x, k.index(full), spec.blocks - full)
        if spec.direct:
            with k.loop(0, spec.decisions) as place:
                self._store_decision(place, lane, self.kernels.load(place).cast(_F64))
            return
        with k.loop(0, max(spec.classes, 1)) as column, k.loop(0, max(spec.classes - 1, 1)) as weights:
            self._weighted_sum(weights, column)
        if not spec.classes:
            self._store_decision(k.index(0), lane, self.shares.load())
            return
        with self._pairs() as (i, j, place):
            both = self.shares.load((j - 1) * spec.classes + i) + self.shares.load(i * spec.classes + j)
            self._store_decision(place, lane, both)

    def _compute_kernels(self, x: Pointer, block: Val, count: int) -> None:
        """Compute the kernel values of the row at `x` with the support vectors of `count` blocks from `block` on."""
        k, spec = self.k, self.spec
        lanes, size = spec.lanes, spec.features * spec.lanes
        parts = [self.vectors.at((block + part) * size) for part in range(count)]
        with k.fold(0, spec.features, [k.zeros(_F32, lanes)] * count) as fold:
            feature = x.load(fold.index).splat(lanes)
            others = [part.load(fold.index * lanes, lanes) for part in parts]
            factors = [(feature - v,) * 2 if spec.kernel == "RBF" else (feature, v) for v in others]
            fold.values = [k.ops.fma(*pair, total) for pair, total in zip(factors, fold.values, strict=True)]
        for part, total in enumerate(fold.values):
            self.kernels.store(self._kernel(total), (block + part) * lanes)

    def _kernel(self, total: Val) -> Val:
        """The kernel values (RBF, POLY, SIGMOID or LINEAR), given dot products, or squared distances for RBF."""
        ops, spec = self.k.ops, self.spec
        match spec.kernel:
            case "RBF":
                return ops.exp(total * -spec.gamma)
            case "POLY":
                return ops.pow(total * spec.gamma + spec.coef0, spec.degree)
            case "SIGMOID":
                return ops.tanh(total * spec.gamma + spec.coef0)
        return total

    def _weighted_sum(self, weights: Val, column: Val) -> None:
        """Compute the sum of the kernel values with the vectors of class `column`, by row `weights` of the weights."""
        k, lanes, blocks = self.k, self.spec.lanes, self.spec.blocks
        start, stop = self.spans.load(column), self.spans.load(column + 1)
        with k.fold(start, stop, [k.zeros(_F64, lanes)]) as fold:
            kernels = self.kernels.load(fold.index * lanes, lanes).cast(_F64)
            weight = self.weights.load((weights * blocks + fold.index) * lanes, lanes)
            fold.values = [k.ops.fma(kernels, weight, fold.values[0])]
        self.shares.store(k.ops.sum(fold.values[0]), weights * max(self.spec.classes, 1) + column)

    def _store_decision(self, place: Val, lane: Val, value: Val) -> None:
        self.decisions.store(value + self.rho.load(place), place * self.wide + lane)

    @contextmanager
    def _pairs(self) -> Iterator[tuple[Val, Val, Val]]:
        """Code written inside runs for each pair of classes i < j: yields i, j and the index of their decision."""
        classes = self.spec.classes
        with self.k.loop(0, classes) as i, self.k.loop(i + 1, classes) as j:
            yield i, j, i * (i * -1 + (2 * classes - 1)) // 2 + j - i - 1

    # Several rows

    def finish(self, first: Val, have: Val) -> None:
        """Write the labels and scores of `have` rows from `first` on, whose decisions are computed."""
        k, spec = self.k, self.spec
        if not spec.classes:
            with k.loop(0, have) as lane:
                self.scores.store(self._regression(self.decisions.load(lane)).cast(_F32), first + lane)
            return
        self._elect()
        with k.loop(0, have) as lane:
            self.label.store(self.labels.load(self.row.load(lane).cast(_I64)), first + lane)
        if spec.probable:
            self._couple(k.lane_mask(have, self.wide))
        with k.loop(0, have) as lane:
            self._score(self.scores.at((first + lane) * spec.columns), lane)

    def _regression(self, decision: Val) -> Val:
        return self.k.ops.select(decision > 0, 1.0, self.k.constant(-1, _F64)) if self.spec.one_class else decision

    def _score(self, scores: Pointer, lane: Val) -> None:
        """Write the scores of row `lane` of the task to `scores`: probabilities if there are any, or decisions.

        A single decision gives the scores of both classes.
        """
        spec, found = self.spec, self.classes if self.spec.probable else self.decisions
        if spec.decisions == 1 and not spec.probable:
            scores.store((-found.load(lane)).cast(_F32))
            scores.store(found.load(lane).cast(_F32), 1)
            return
        with self.k.loop(0, spec.columns) as column:
            scores.store(found.load(column * self.wide + lane).cast(_F32), column)

    def _elect(self) -> None:
        """Store in `self.row` the index of the class that wins most pairs of each row; of equal ones the first."""
        k, classes = self.k, self.spec.classes
        with k.loop(0, classes) as c:
            self._set(self.classes, c, k.zeros(_F64, self.wide))
        with self._pairs() as (i, j, place):
            won = k.ops.select(self._get(self.decisions, place) > 0, 1.0, k.zeros(_F64, self.wide))
            self._set(self.classes, i, self._get(self.classes, i) + won)
            self._set(self.classes, j, self._get(self.classes, j) + (1.0 - won))
        with k.fold(0, classes, [k.constant(-1, _F64, self.wide), k.zeros(_F64, self.wide)]) as fold:
            most, place = fold.values
            votes = self._get(self.classes, fold.index)
            better, number = votes > most, fold.index.cast(_F64).splat(self.wide)
            fold.values = [k.ops.select(better, votes, most), k.ops.select(better, number, place)]
        self.row.store(fold.values[1])

    def _couple(self, present: Val) -> None:
        """Compute the class probabilities that agree best with those of the pairs, as in `lathe.core.ops.ml.svm`.

        `present` is a mask of the lanes that hold rows.
        """
        k, classes = self.k, self.spec.classes
        with k.loop(0, classes) as c:
            self._set(self.classes, c, k.constant(1 / classes, _F64, self.wide))
            self._set(self.square, c * (classes + 1), k.zeros(_F64, self.wide))
        with self._pairs() as (i, j, place):
            self._weigh(i, j, self._probability(place, present))
        self.row.store(k.constant(1, _F64))
        with k.loop(0, max(ROUNDS, classes)), k.when(self.row.load() > 0):
            self._round(present)

    def _probability(self, place: Val, present: Val) -> Val:
        """The probability of the first class of a pair for each row: Platt's sigmoid of decision number `place`."""
        k, wide = self.k, self.wide
        decision = k.ops.select(present, self._get(self.decisions, place), 0.0)
        power = k.ops.exp(k.ops.fma(self.a.load(place).splat(wide), decision, self.b.load(place).splat(wide)))
        return k.ops.min(k.ops.max(1.0 / (power + 1.0), LEAST), 1 - LEAST)

    def _weigh(self, i: Val, j: Val, r: Val) -> None:
        """Add the terms of `r`, the probability of class i in the pair of classes i and j, to the matrix Q."""
        classes, s = self.spec.classes, 1.0 - r
        for place in (i * classes + j, j * classes + i):
            self._set(self.square, place, -(r * s))
        for diagonal, part in ((j, r), (i, s)):
            place = diagonal * (classes + 1)
            self._set(self.square, place, self._get(self.square, place) + part * part)

    def _round(self, present: Val) -> None:
        """One iteration over all classes for rows that have not converged; the flag is cleared if there are none."""
        k, classes, ops = self.k, self.spec.classes, self.k.ops
        zero = k.zeros(_F64, self.wide)
        with k.fold(0, classes, [zero]) as outer:
            t = outer.index
            with k.fold(0, classes, [zero]) as inner:
                q, p = self._get(self.square, t * classes + inner.index), self._get(self.classes, inner.index)
                inner.values = [ops.fma(q, p, inner.values[0])]
            self._set(self._product, t, inner.values[0])
            outer.values = [ops.fma(self._get(self.classes, t), inner.values[0], outer.values[0])]
        total = outer.values[0]
        with k.fold(0, classes, [zero]) as fold:
            apart = ops.abs(self._get(self._product, fold.index) - total)
            fold.values = [ops.max(apart, fold.values[0])]
        is_unconverged = (fold.values[0] >= TOLERANCE / classes) & present
        some = ops.any(is_unconverged)
        self.row.store(ops.select(some, 1.0, k.constant(0, _F64)))
        with k.when(some), k.fold(0, classes, [total]) as rest:
            rest.values = [self._improve(rest.index, rest.values[0], is_unconverged)]

    def _improve(self, t: Val, total: Val, is_unconverged: Val) -> Val:
        """Improve the probability of class `t`, given the others, in rows that have not converged; returns new p Q p.

        `total` is p Q p before.
        """
        k, classes, ops = self.k, self.spec.classes, self.k.ops
        own, product, p = (
            self._get(self.square, t * (classes + 1)), self._get(self._product, t), self._get(self.classes, t)
        )  # fmt: skip
        step = (total - product) / own
        grown = step + 1.0
        self._set(self.classes, t, ops.select(is_unconverged, p + step, p))
        with k.loop(0, classes) as j:
            old, was = self._get(self._product, j), self._get(self.classes, j)
            self._set(self._product, j, ops.fma(step, self._get(self.square, t * classes + j), old) / grown)
            self._set(self.classes, j, ops.select(is_unconverged, was / grown, was))
        return (total + step * (step * own + product * 2.0)) / (grown * grown)

    @property
    def _product(self) -> Pointer:
        """The address of the vector Q p, which follows the matrix Q in memory."""
        return self.square.at(self.spec.classes**2 * self.wide)

    def _get(self, values: Pointer, place: Val) -> Val:
        return values.load(place * self.wide, self.wide)

    def _set(self, values: Pointer, place: Val, value: Val) -> None:
        values.store(value, place * self.wide)
