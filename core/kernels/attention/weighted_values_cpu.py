"""The second product of attention: weights times values, for a block of queries of one head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.dim import symbol
from lathe.core.ir.types import DType
from lathe.core.kernels.attention.segment_spec import SegmentAttentionSpec
from lathe.core.kernels.attention.spec import AttentionSpec
from lathe.core.kernels.cpu.microkernel import accumulate, for_each_tile, zeros


@dataclass(frozen=True)
class WeightedValues:
    """Generates code for `count` queries: the sums of powers times values over `keys`, times a factor per query.

    A power is exp(score - maximum). `powers(query)` is the address of a query's powers, `step` their stride between
    keys. `factors` holds one number per query, the inverse of the sum of its powers. `values` and `results` are V and Y
    of this head, Y from the first of these queries on.
    """

    kernel: Kernel
    spec: AttentionSpec | SegmentAttentionSpec
    keys: int | Val
    powers: Callable[[Val], Pointer]
    step: int
    factors: Pointer
    values: Pointer
    results: Pointer
    count: int | Val

    def emit(self) -> None:
        k, spec = self.kernel, self.spec
        width = spec.values.columns
        full, rest = divmod(spec.columns, width)
        with k.loop(0, full) as panel:
            self._panel(panel * width, width)
        if rest:
            self._panel(k.index(full * width), rest)

    def _panel(self, column: Val, columns: int) -> None:
        """Compute `columns` columns of Y from `column` on, a register tile of queries at a time."""
        k = self.kernel

        def tile(query: Val, height: int) -> None:
            self._tile(query, height, column, columns)

        if isinstance(self.count, int):
            for_each_tile(k, k.index(0), k.index(self.count), self.count, self.spec.values.rows, tile)
        else:
            for_each_tile(k, k.index(0), self.count, symbol("n"), self.spec.values.rows, tile)

    def _tile(self, query: Val, height: int, column: Val, columns: int) -> None:
        k, spec, lanes = self.kernel, self.spec, self.spec.values.lanes
        vectors, tail = -(-columns // lanes), columns % lanes
        mask = k.lane_mask(tail, lanes) if tail else None
        sources = [self.powers(query + r) for r in range(height)]
        grid = zeros(k, height, vectors, lanes)
        values, target = self.values.at(column), self.results.at(column)
        grid = accumulate(k, grid, sources, self.step, values, spec.v_step, self.keys, mask)
        for r, row in enumerate(grid):
            factor = self.factors.load(query + r).splat(lanes)
            place = target.at((query + r) * spec.y_step)
            for v, value in enumerate(row):
                place.store(self._scale_result(value, factor), v * lanes, mask if v == vectors - 1 else None)

    def _scale_result(self, total: Val, factor: Val) -> Val:
        """A result: `total` times `factor`; zero if the spec is `guarded` and the factor is NaN."""
        k = self.kernel
        if not self.spec.guarded:
            return total * factor
        return k.ops.select(k.ops.is_nan(factor), k.zeros(DType.FLOAT32, total.lanes), total * factor)
