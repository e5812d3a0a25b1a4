"""Matrix products: a task multiplies rows of A, tile by tile, by panels of B (`for_each_panel` defines the order)."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import Prefetch, accumulate, for_each_panel, for_each_tile, prefetch_of, zeros
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.repack import gather_pairs, gather_panel, widen_rows
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.gemm.spec import GemmSpec
from lathe.core.kernels.shared.panels import fits_l2, prefetch_tiles, stage_bytes
from lathe.core.kernels.shared.words import WORD_BYTES, accumulator_dtype, stored_dtype, word_dtype
from lathe.core.kernels.target import Target

F32, F16 = DType.FLOAT32, DType.FLOAT16


def generate(spec: GemmSpec, target: Target) -> Kernel:
    return _Gemm(spec, target).kernel


class _Gemm:
    """Writes the kernel of one spec."""

    def __init__(self, spec: GemmSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        self.lanes = spec.tile.lanes
        word, stored = word_dtype(spec.element), stored_dtype(spec.element)
        dtypes = (stored, stored if spec.packed else F32, *spec.extra_dtypes, spec.dtype)
        self.operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
        self.operands[:2] = [pointer.converting(F32) if stored is F16 else pointer for pointer in self.operands[:2]]
        index = len(dtypes)
        if spec.repacks:
            self.scratch = k.scratch(index, spec.depth * spec.tile.columns * WORD_BYTES, word)
        index += spec.repacks
        if spec.widened_words:
            self.rows = k.scratch(index, spec.widened_words * WORD_BYTES, F32)
        index += spec.widened_words > 0
        self.stage = k.scratch(index, stage_bytes(spec.tile), accumulator_dtype(spec.element)) if spec.staged else None
        k.read_numbers(index + spec.staged, (*spec.nest.dims, spec.depth_dim))
        self.depth = spec.depth or k.dim(spec.depth_dim)
        self.batch = spec.nest.take(range(spec.nest.rank - 1))
        self.moves = [k.dim(stride) for stride in spec.nest.loop(spec.nest.rank - 1)]
        entries = k.dim(product(self.batch.extents))
        in_blocks = spec.packed and (fits_l2(target, spec.depth, spec.columns) if spec.depth else spec.in_blocks)
        self.ahead = prefetch_tiles(spec.rows, spec.tile, in_blocks) if spec.packed else 0
        for_each_panel(k, entries, spec.columns, spec.rows, spec.tile, self._panel, in_blocks)

    def _panel(self, entry: Val, panel: Val, columns: int, start: Val, stop: Val, new: Val | None) -> None:
        """Compute rows `start` to `stop` of one panel of `columns` columns; `entry` is the number of the product.

        `new` is true where a thread reads this panel for the first time (None: always).
        """
        k, spec = self.kernel, self.spec
        first = panel * spec.tile.columns
        offsets = offsets_of(k, self.batch, entry)
        a, b, *rest = (pointer.at(offset) for pointer, offset in zip(self.operands, offsets, strict=True))
        b = b.at(first * (self.depth if spec.packed else spec.b_steps[1]))
        if spec.repacks:
            if spec.element is DType.BFLOAT16:
                gather_pairs(k, b, self.scratch, (spec.depth, columns), spec.b_steps, self.lanes)
            else:
                narrow = F16 if spec.element is F16 else None
                gather_panel(k, b, self.scratch, (spec.depth, columns), spec.b_steps, self.lanes, narrow)
            b = self.scratch
        steps = (*spec.extra_steps, spec.y_step)
        results = ResultWriter(k, spec.epilogue, tuple(rest), steps, spec.deferred, self.stage).at_column(first)

        def tile(row: Val, height: int) -> None:
            ahead, number = None, (row - start) // spec.tile.rows
            if self.ahead and height == spec.tile.rows:
                ahead = prefetch_of(b, columns * self.depth, columns, spec.tile, number, self.ahead, self.depth, new)
            self._tile(a, b, results, row, height, columns, ahead)

        for_each_tile(k, start, stop, spec.rows, spec.tile.rows, tile)
        results.finish(start, stop, columns, self.lanes, self._offsets)

    def _offsets(self, row: Val) -> list[Val]:
        """The offsets of the extras and of Y, in elements, in row `row` over all loops of the nest."""
        return [row * move for move in self.moves[2:]]

    def _tile(
        self, a: Pointer, b: Pointer, results: ResultWriter, row: Val, height: int, columns: int, ahead: Prefetch | None
    ) -> None:
        k, spec, lanes = self.kernel, self.spec, self.lanes
        vectors, tail = -(-columns // lanes), columns % lanes
        mask = k.lane_mask(tail, lanes) if tail else None
        sources = [a.at((row + r) * self.moves[0]) for r in range(height)]
        if spec.widened_words:
            sources = widen_rows(k, sources, self.rows, spec.depth, lanes)
        results.fetch([self._offsets(row + r) for r in range(height)], columns)
        grid = zeros(k, height, vectors, lanes, accumulator_dtype(spec.element))
        if spec.packed or spec.repacks:
            step = vectors * lanes
            grid = accumulate(
                k, grid, sources, spec.a_step, b, step, self.depth,
                element=spec.element, ahead=ahead, panel_vectors=spec.tile.vectors,
            )  # fmt: skip
        else:
            grid = accumulate(
                k, grid, sources, spec.a_step, b, spec.b_steps[0], spec.depth, mask, panel_vectors=spec.tile.vectors
            )
        results.store_tile(grid, row, self._offsets, mask)
