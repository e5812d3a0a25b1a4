"""Decision trees: eight walks at once, of eight rows down one tree or of one row down eight trees.

A step loads the node and the feature, and selects one of two links, so that there is no branch to mispredict. A walk
that has reached its leaf stays there until the deepest walk ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks
from lathe.core.kernels.target import Target
from lathe.core.kernels.trees.spec import MISSING, WALKERS, TreesSpec
from lathe.core.ops.ml import forest

_I32, _I64, _F32 = DType.INT32, DType.INT64, DType.FLOAT32
_ROWS = 128  # rows that walk down one tree before the next: features and scores stay in the first-level cache


def generate(spec: TreesSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    walk = _Walk(k, spec)
    rows = k.dim(spec.rows)
    with even_chunks(k, (rows + (_ROWS - 1)) // _ROWS, k.index(1)) as (start, stop), k.loop(start, stop) as block:
        first = block * _ROWS
        last = k.ops.min(first + _ROWS, rows)
        together = first + (last - first) // WALKERS * WALKERS
        with k.loop(first, last) as row:
            walk.begin(row)
        with k.loop(0, spec.trees) as tree, k.loop(first, together, WALKERS) as row:
            walk.rows_down(tree, row)
        with k.loop(together, last) as row:
            walk.down_all(row)
    return k


class _Walk:
    """The operands of the kernel, and the code of the walks."""

    def __init__(self, k: Kernel, spec: TreesSpec) -> None:
        self.k, self.spec = k, spec
        self.x, nodes, self.trees, self.depths = (k.operand(i, t) for i, t in enumerate((_F32, _I32, _I32, _I32)))
        self.words, self.splits = nodes, nodes.view(_F32)
        self.weights, self.base, self.y = (k.operand(i, _F32) for i in (4, 5, 6))

    def begin(self, row: Val) -> None:
        """Set the scores of batch row `row` to the base values."""
        with self.k.loop(0, self.spec.targets) as target:
            self.y.store(self.base.load(target), row * self.spec.targets + target)

    def rows_down(self, tree: Val, row: Val) -> None:
        """Walk WALKERS rows from `row` on down tree number `tree`, and add the leaves' weights to their scores."""
        root, depth = (self.trees.load(tree * 2 + i).cast(_I64) for i in (0, 1))
        rows = [row + i for i in range(WALKERS)]
        for at, each in zip(self._leaves([root] * WALKERS, rows, depth), rows, strict=True):
            self._add(at, each)

    def down_all(self, row: Val) -> None:
        """Walk one row down all trees, WALKERS at a time, and add the leaves' weights to its scores."""
        with self.k.loop(0, self.spec.trees // WALKERS) as group:
            roots = [self.trees.load((group * WALKERS + i) * 2).cast(_I64) for i in range(WALKERS)]
            depth = self.depths.load(group).cast(_I64)
            for at in self._leaves(roots, [row] * WALKERS, depth):
                self._add(at, row)

    def _leaves(self, roots: Sequence[Val], rows: Sequence[Val], depth: Val) -> list[Val]:
        features = [self.x.at(row * self.spec.features) for row in rows]
        with self.k.fold(0, depth, roots) as fold:
            fold.values = [self._step(at, x) for at, x in zip(fold.values, features, strict=True)]
        return fold.values

    def _step(self, at: Val, x: Pointer) -> Val:
        """The offset in words of the node that follows the node at word `at`, for a row whose features lie at `x`."""
        word, split = self.words.load(at), self.splits.load(at + 1)
        feature = word & (MISSING - 1) if self.spec.missing else word
        value = x.load(feature.cast(_I64))
        goes_to_yes = self._compare(value, split)
        if self.spec.missing:
            goes_to_yes = goes_to_yes | (self.k.ops.is_nan(value) & (word >= MISSING))
        return self.k.ops.select(goes_to_yes, self.words.load(at + 2), self.words.load(at + 3)).cast(_I64)

    def _compare(self, value: Val, split: Val) -> Val:
        match self.spec.comparison:
            case forest.LEQ:
                return value <= split
            case forest.LT:
                return value < split
            case forest.GTE:
                return split <= value
        return split < value

    def _add(self, at: Val, row: Val) -> None:
        """Add the weights of the leaf at word `at` to the scores of row `row`."""
        k, targets = self.k, self.spec.targets
        if targets == 1:
            self.y.store(self.y.load(row) + self.splits.load(at + 1), row)
            return
        weights, scores = self.weights.at(self.words.load(at + 1).cast(_I64)), self.y.at(row * targets)

        def add(i: Val, mask: Val | None) -> None:
            scores.store(scores.load(i, k.lanes, mask) + weights.load(i, k.lanes, mask), i, mask)

        k.strip(targets, add)
