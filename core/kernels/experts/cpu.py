"""ExpertProduct: each thread sorts all rows by expert; a task multiplies the rows of one expert by one panel.

The sort takes a few passes over the numbers of the experts, which is little beside the products, so threads repeat it
rather than wait for each other. Weights of experts without rows are not read.
"""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.dim import symbol
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import accumulate, for_each_tile, zeros
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.repack import gather_panel
from lathe.core.kernels.experts.spec import ExpertsSpec
from lathe.core.kernels.indexing.scatter_cpu import check_index
from lathe.core.kernels.target import Target

F32, I64 = DType.FLOAT32, DType.INT64
_ANY = symbol("n")  # rows of an expert: their number says nothing about the height of the last tile


def generate(spec: ExpertsSpec, target: Target) -> Kernel:
    return _Experts(spec, target).kernel


class _Experts:
    """Writes the kernel of one spec."""

    def __init__(self, spec: ExpertsSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        self.x, self.experts, self.weights, self.y = (
            k.operand(i, d) for i, d in enumerate((F32, spec.index, F32, F32))
        )
        self.offsets, self.ends, *panel = (
            k.scratch(4 + i, scratch.nbytes, dtype)
            for i, (scratch, dtype) in enumerate(zip(spec.scratch, (I64, I64, F32), strict=False))
        )
        self.panel = panel[0] if panel else None
        self.busy = self.ends.at(spec.experts + 1)  # the numbers of the experts that have rows
        count = self._sort()
        full, rest = divmod(spec.columns, spec.tile.columns)
        with k.parallel(count, full + bool(rest)) as (place, panel_number):
            expert = self.busy.load(place)
            if full:
                with k.when(panel_number < full):
                    self._multiply(expert, panel_number, spec.tile.columns)
            if rest:
                with k.when(panel_number.equals(full)):
                    self._multiply(expert, k.index(full), rest)

    def _sort(self) -> Val:
        """Write the offsets of all rows, sorted by expert, and the end of each expert's rows: a counting sort.

        Returns the number of experts that have rows. Rows of an expert out of range are left out.
        """
        k, spec = self.kernel, self.spec
        rows, ends = k.dim(spec.rows), self.ends
        with k.loop(0, spec.experts + 1) as i:
            ends.store(k.index(0), i)
        with k.loop(0, rows) as row:
            expert, valid = self._expert_of(row)
            with k.when(valid):
                ends.store(ends.load(expert + 1) + 1, expert + 1)
        with k.fold(0, spec.experts, [k.index(0), k.index(0)]) as fold:
            busy, before = fold.values
            size = ends.load(fold.index + 1)
            self.busy.store(fold.index, busy)
            ends.store(before, fold.index + 1)
            fold.values = [busy + k.ops.select(size > 0, k.index(1), 0), before + size]
        busy = fold.values[0]
        # ends[e + 1] is now the start of expert e, and its end when all rows have their places; ends[0] stays 0.
        with k.loop(0, rows) as row:
            expert, valid = self._expert_of(row)
            with k.when(valid):
                place = ends.load(expert + 1)
                ends.store(place + 1, expert + 1)
                x, _, y = offsets_of(k, spec.nest, row)
                self.offsets.store(x, place * 2)
                self.offsets.store(y, place * 2 + 1)
        return busy

    def _expert_of(self, row: Val) -> tuple[Val, Val]:
        """The expert of a row, and whether there is such an expert."""
        number = self.experts.load(offsets_of(self.kernel, self.spec.nest, row)[1])
        return check_index(self.kernel, number.cast(I64), self.kernel.index(self.spec.experts))

    def _multiply(self, expert: Val, panel: Val, columns: int) -> None:
        """Compute `columns` columns, those of one panel, for all rows of an expert."""
        k, spec, lanes = self.kernel, self.spec, self.spec.tile.lanes
        first = panel * spec.tile.columns
        vectors, tail = -(-columns // lanes), columns % lanes
        mask = k.lane_mask(tail, lanes) if tail else None
        weights = self._panel_at(expert, first, columns)
        start, stop = self.ends.load(expert), self.ends.load(expert + 1)

        def tile(row: Val, height: int) -> None:
            places = [self.offsets.at((row + r) * 2) for r in range(height)]
            sources = [self.x.at(place.load()) for place in places]
            grid = accumulate(
                k, zeros(k, height, vectors, lanes), sources, spec.x_step, weights, vectors * lanes, spec.depth,
                panel_vectors=spec.tile.vectors,
            )  # fmt: skip
            for place, values in zip(places, grid, strict=True):
                target = self.y.at(place.load(1) + first)
                for v, value in enumerate(values):
                    target.store(value, v * lanes, mask if v == vectors - 1 else None)

        # Tiles begin at multiples of their height after `start`.
        for_each_tile(k, start, stop, _ANY, spec.tile.rows, tile)

    def _panel_at(self, expert: Val, first: Val, columns: int) -> Pointer:
        """The panel of an expert's weights from column `first` on: packed, or copied to scratch."""
        k, spec = self.kernel, self.spec
        weights = self.weights.at(expert * spec.matrix)
        if self.panel is None:
            return weights.at(first * spec.depth)
        _, down, across = spec.w_steps
        source, shape = weights.at(first * across), (spec.depth, columns)
        gather_panel(k, source, self.panel, shape, (down, across), spec.tile.lanes)
        return self.panel
