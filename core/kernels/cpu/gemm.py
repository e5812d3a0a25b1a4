"""Matrix products: panels of B outermost, tiles of rows inside, so that a panel is read from memory once."""

from __future__ import annotations

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.dim import product
from core.ir.types import DType
from core.kernels.catalog.gemm import GemmSpec
from core.kernels.catalog.panels import stage_bytes, stays_cached, tiles_ahead
from core.kernels.catalog.words import WORD_BYTES, stored_dtype, total_dtype, word_dtype
from core.kernels.cpu.microkernel import Ahead, accumulate, ahead_of, each_panel, each_tile, zeros
from core.kernels.cpu.nest import offsets_of
from core.kernels.cpu.repack import gather_pairs, gather_panel, widened
from core.kernels.cpu.results import Results
from core.kernels.target import Target

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
        self.operands[:2] = [pointer.computing(F32) if stored is F16 else pointer for pointer in self.operands[:2]]
        index = len(dtypes)
        if spec.repacks:
            self.scratch = k.scratch(index, spec.depth * spec.tile.columns * WORD_BYTES, word)
        index += spec.repacks
        if spec.widened_words:
            self.rows = k.scratch(index, spec.widened_words * WORD_BYTES, F32)
        index += spec.widened_words > 0
        self.stage = k.scratch(index, stage_bytes(spec.tile), total_dtype(spec.element)) if spec.staged else None
        k.read_numbers(index + spec.staged, (*spec.nest.dims, spec.any_depth))
        self.depth = spec.depth or k.dim(spec.any_depth)
        self.batch = spec.nest.take(range(spec.nest.rank - 1))
        self.moves = [k.dim(stride) for stride in spec.nest.loop(spec.nest.rank - 1)]
        entries = k.dim(product(self.batch.extents))
        in_blocks = spec.packed and (stays_cached(target, spec.depth, spec.columns) if spec.depth else spec.in_blocks)
        self.ahead = tiles_ahead(spec.rows, spec.tile, in_blocks) if spec.packed else 0
        each_panel(k, entries, spec.columns, spec.rows, spec.tile, self._panel, in_blocks)

    def _panel(self, entry: Val, panel: Val, columns: int, start: Val, stop: Val, new: Val | None) -> None:
        """Rows `start` to `stop` of one panel of one product."""
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
        results = Results(k, spec.epilogue, tuple(rest), steps, spec.deferred, self.stage).at_column(first)

        def tile(row: Val, height: int) -> None:
            ahead, number = None, (row - start) // spec.tile.rows
            if self.ahead and height == spec.tile.rows:
                ahead = ahead_of(b, columns * self.depth, columns, spec.tile, number, self.ahead, self.depth, new)
            self._tile(a, b, results, row, height, columns, ahead)

        each_tile(k, start, stop, spec.rows, spec.tile.rows, tile)
        results.finish(start, stop, columns, self.lanes, self._offsets)

    def _offsets(self, row: Val) -> list[Val]:
        """Where the extras and Y are in a row."""
        return [row * move for move in self.moves[2:]]

    def _tile(
        self, a: Pointer, b: Pointer, results: Results, row: Val, height: int, columns: int, ahead: Ahead | None
    ) -> None:
        k, spec, lanes = self.kernel, self.spec, self.lanes
        vectors, tail = -(-columns // lanes), columns % lanes
        mask = k.lane_mask(tail, lanes) if tail else None
        sources = [a.at((row + r) * self.moves[0]) for r in range(height)]
        if spec.widened_words:
            sources = widened(k, sources, self.rows, spec.depth, lanes)
        results.fetch([self._offsets(row + r) for r in range(height)], columns)
        grid = zeros(k, height, vectors, lanes, total_dtype(spec.element))
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
