"""Products of dynamic sizes: a task multiplies rows of A by a panel of B, in register tiles; B may be copied first."""

from __future__ import annotations

from functools import reduce

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import accumulate, for_each_tile, zeros
from lathe.core.kernels.cpu.nest import grain, offsets_of
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.gemm.wide_spec import WideGemmSpec
from lathe.core.kernels.shared.words import elements_per_word
from lathe.core.kernels.target import Target

_TASKS_PER_THREAD = 4


def generate(spec: WideGemmSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    multiply(k, spec)
    return k


def multiply(k: Kernel, spec: WideGemmSpec) -> None:
    """Generate the code of the product in kernel `k`, whose operands are A, B, the extras, Y and scratch, if any."""
    _WideGemm(k, spec)


class _WideGemm:
    """Writes the code of one spec."""

    def __init__(self, k: Kernel, spec: WideGemmSpec) -> None:
        self.spec, self.kernel = spec, k
        dtypes = (*spec.factors, *spec.extra_dtypes, spec.dtype)
        self.operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
        self.operands[:2] = [pointer.converting(spec.element) for pointer in self.operands[:2]]
        self.scratch = k.scratch(len(dtypes), spec.panel_bytes, spec.element) if spec.packs else None
        self.rows, self.columns, self.depth = (k.dim(dim) for dim in (spec.rows, spec.columns, spec.depth))
        entries, width = k.dim(product(spec.batch.extents)), spec.tile.columns
        panels = (self.columns + (width - 1)) // width
        block = self._block(entries * panels)
        self.whole = self.depth // elements_per_word(DType.UINT8)
        with k.parallel(entries, panels, (self.rows + block - 1) // block) as (entry, panel, part):
            self._task(entry, panel * width, part * block, k.ops.min((part + 1) * block, self.rows))

    def _block(self, panels: Val) -> Val:
        """Rows per task, whole tiles: all rows for a single thread; several threads share them.

        `panels` is the number of panels of all products.
        """
        k, height = self.kernel, self.spec.tile.rows
        least = k.index(grain(0, 1)) // k.ops.max(self.depth, 1) // self.spec.tile.columns
        tasks = k.ops.select(k.threads.equals(1), 1, k.threads * _TASKS_PER_THREAD)
        wanted = k.ops.max(tasks // k.ops.max(panels, 1), 1)
        rows = k.ops.max((self.rows + wanted - 1) // wanted, least)
        return k.ops.max((rows + (height - 1)) // height, 1) * height

    def _task(self, entry: Val, first: Val, start: Val, stop: Val) -> None:
        """Compute rows `start` to `stop` of the panel of columns from `first` on, of product number `entry`."""
        k, spec = self.kernel, self.spec
        offsets = offsets_of(k, spec.batch, entry)
        a, b, *rest = (pointer.at(offset) for pointer, offset in zip(self.operands, offsets, strict=True))
        b = b.at(first * k.dim(spec.b_steps[1]))
        steps = tuple(step if isinstance(step, int) else k.dim(step) for _, step in spec.result_steps)
        results = ResultWriter(k, spec.epilogue, tuple(rest), steps).at_column(first)
        count, width = self.columns - first, spec.tile.columns
        if isinstance(spec.columns, int):
            whole, rest_columns = divmod(spec.columns, width)
            if whole:
                with k.when(count >= width):
                    self._panel(a, b, results, k.index(width), start, stop)
            if rest_columns:
                with k.when(count < width):
                    self._panel(a, b, results, k.index(rest_columns), start, stop)
            return
        with k.when(count >= width):
            self._panel(a, b, results, k.index(width), start, stop)
        with k.when(count < width):
            self._panel(a, b, results, count, start, stop)

    def _panel(self, a: Pointer, b: Pointer, results: ResultWriter, count: Val, start: Val, stop: Val) -> None:
        """Compute `count` columns: all vectors at once if the count is a constant, otherwise one at a time."""
        k, tile, lanes = self.kernel, self.spec.tile, self.spec.tile.lanes
        step = k.dim(self.spec.b_steps[0])
        known = count.constant
        vectors = -(-int(known) // lanes) if known is not None else tile.vectors
        if self.scratch is not None:
            for v in range(vectors):
                left = count - v * lanes
                with k.when(left > 0):
                    self._copy(b, v, None if known is not None and known >= (v + 1) * lanes else left)
            b, step = self.scratch, k.index(tile.columns)
        if known is not None:
            rest = int(known) % lanes
            self._tiles(a, b, step, results, vectors, k.lane_mask(rest, lanes) if rest else None, start, stop)
            return
        for v in range(vectors):
            left = count - v * lanes
            with k.when(left > 0):
                mask = k.lane_mask(left, lanes)
                self._tiles(a, b.at(v * lanes), step, results.at_column(k.index(v * lanes)), 1, mask, start, stop)

    def _copy(self, b: Pointer, vector: int, left: Val | None) -> None:
        """Copy vector number `vector` of every row of the panel at `b` to scratch.

        `left` is the number of columns from it on, None if the vector is full.
        """
        assert self.scratch is not None
        k, tile, (down, across) = self.kernel, self.spec.tile, self.spec.b_steps
        lanes, along = tile.lanes, k.dim(across)
        mask = None if left is None else k.lane_mask(left, lanes)
        target, first = self.scratch.at(vector * lanes), b.at(along * (vector * lanes))

        def row(i: Val, source: Pointer) -> Val:
            line = source.at(i * k.dim(down))
            return line.load(0, lanes, mask) if across == 1 else line.gather(k.lane_numbers(lanes) * along, mask)

        if self.spec.words:
            unsigned = first.view(DType.UINT8).converting(DType.INT32)
            with k.loop(0, self.whole) as word:
                parts = [k.ops.shift_left(row(word * 4 + i, unsigned), 8 * i) for i in range(4)]
                target.store(reduce(k.ops.bit_or, parts), word * tile.columns)
        with k.loop(self.whole * 4 if self.spec.words else 0, self.depth) as i:
            place = i - self.whole * 3 if self.spec.words else i
            target.store(row(i, first), place * tile.columns)

    def _tiles(
        self,
        a: Pointer,
        b: Pointer,
        step: Val,
        results: ResultWriter,
        vectors: int,
        mask: Val | None,
        start: Val,
        stop: Val,
    ) -> None:
        """Compute rows `start` to `stop` of the results' first `vectors` vectors of columns, tile by tile.

        `b` is the panel, whose rows are `step` elements apart; `mask` guards the last vector.
        """
        k, spec, lanes = self.kernel, self.spec, self.spec.tile.lanes
        row_step, depth_step = (k.dim(each) for each in spec.a_steps)
        moves = [k.dim(row) for row, _ in spec.result_steps]
        loaded = None if spec.packs else mask

        def tile(row: Val, height: int) -> None:
            sources = [a.at((row + r) * row_step) for r in range(height)]
            grid, panel, depth = zeros(k, height, vectors, lanes, spec.element), b, self.depth
            if spec.words:
                words = [source.view(DType.INT32) for source in sources]
                grid = accumulate(
                    k, grid, words, 1, panel, step, _as_constant(self.whole), None, DType.UINT8,
                    panel_vectors=spec.tile.vectors,
                )  # fmt: skip
                sources = [source.at(self.whole * 4) for source in sources]
                panel, depth = panel.at(self.whole * step), depth - self.whole * 4
            if depth.constant != 0:
                grid = accumulate(
                    k, grid, sources, depth_step, panel, step, _as_constant(depth), loaded, spec.element,
                    panel_vectors=spec.tile.vectors,
                )  # fmt: skip
            results.store_tile(grid, row, lambda at: [at * move for move in moves], mask)

        for_each_tile(k, start, stop, spec.rows, spec.tile.rows, tile)


def _as_constant(count: Val) -> int | Val:
    """`count` as an int if it is a constant, otherwise unchanged."""
    return count if count.constant is None else int(count.constant)
