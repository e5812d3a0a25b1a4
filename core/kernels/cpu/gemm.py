"""Matrix products: panels of B outermost, tiles of rows inside, so that a panel is read from memory once."""

from __future__ import annotations

from dataclasses import dataclass

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.types import DType
from core.kernels.catalog.gemm import GemmSpec
from core.kernels.catalog.panels import tails
from core.kernels.cpu import microkernel
from core.kernels.cpu.nest import offsets_of
from core.kernels.cpu.tile import transpose_rows
from core.kernels.target import Target

F32 = DType.FLOAT32
_TASKS_PER_THREAD = 4


@dataclass(frozen=True)
class _Place:
    """Where the operands of one task begin: a batch entry, at the first row and the first column of the panel."""

    a: Pointer
    b: Pointer
    extras: tuple[Pointer, ...]
    y: Pointer


def generate(spec: GemmSpec, target: Target) -> Kernel:
    return _Gemm(spec, target).kernel


class _Gemm:
    """Writes the kernel of one spec."""

    def __init__(self, spec: GemmSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        self.lanes = spec.tile.lanes
        extras = len(spec.extra_dtypes)
        self.operands = [
            k.operand(0, F32),
            k.operand(1, F32),
            *(k.operand(2 + i, dtype) for i, dtype in enumerate(spec.extra_dtypes)),
            k.operand(2 + extras, spec.dtype),
        ]
        self.scratch = (
            k.scratch(3 + extras, spec.depth * spec.tile.columns * F32.itemsize, F32) if spec.repacks else None
        )
        self.rows = k.dim(spec.rows)
        self._tasks()

    def _tasks(self) -> None:
        """A task is a batch entry, a panel and a block of rows."""
        k, spec = self.kernel, self.spec
        batch = spec.nest.take(range(spec.nest.rank - 1))
        entries = k.index(1)
        for extent in batch.extents:
            entries = entries * k.dim(extent)
        full, rest = divmod(spec.columns, spec.tile.columns)
        panels = full + bool(rest)
        block = self._block_rows(entries * panels)
        with k.parallel(entries, panels, (self.rows + block - 1) // block) as (entry, panel, part):
            offsets = offsets_of(k, batch, entry)
            start = part * block
            stop = k.ops.min(start + block, self.rows)
            if full:
                with k.when(panel < full):
                    self._panel(offsets, panel, start, stop, spec.tile.columns)
            if rest:
                with k.when(panel.equals(full)):
                    self._panel(offsets, k.index(full), start, stop, rest)

    def _block_rows(self, panels: Val) -> Val:
        """All rows for a thread alone; for a team, blocks of whole tiles that give each thread several tasks."""
        k, height = self.kernel, self.spec.tile.rows
        wanted = k.ops.max((k.threads * _TASKS_PER_THREAD + panels - 1) // panels, 1)
        wanted = k.ops.select(k.threads.equals(1), 1, wanted)
        tiles = (self.rows + (height - 1)) // height
        return k.ops.max((tiles + wanted - 1) // wanted, 1) * height

    def _panel(self, offsets: list[Val], panel: Val, start: Val, stop: Val, columns: int) -> None:
        """Rows `start` to `stop` of one panel that has so many columns."""
        k, spec = self.kernel, self.spec
        first = panel * spec.tile.columns
        a, b, *rest = (pointer.at(offset) for pointer, offset in zip(self.operands, offsets, strict=True))
        steps = (*spec.extra_steps, spec.y_step)
        *extras, y = (pointer.at(first * step) for pointer, step in zip(rest, steps, strict=True))
        b = b.at(first * (spec.depth if spec.packed else spec.b_steps[1]))
        if self.scratch is not None:
            self._gather_panel(b, self.scratch, columns)
            b = self.scratch
        place = _Place(a, b, tuple(extras), y)
        height = spec.tile.rows
        full = start + (stop - start) // height * height
        with k.loop(start, full, height) as row:
            self._tile(place, row, height, columns)
        heights = tails(spec.rows, height)
        powers = len(heights) > 2
        microkernel.each_tail(k, full, stop, heights, powers, lambda row, size: self._tile(place, row, size, columns))

    def _tile(self, place: _Place, row: Val, height: int, columns: int) -> None:
        k, spec = self.kernel, self.spec
        vectors = -(-columns // self.lanes)
        tail = columns % self.lanes
        mask = k.lane_mask(tail, self.lanes) if tail else None
        moves = [k.dim(stride) for stride in spec.nest.loop(spec.nest.rank - 1)]
        a_rows = [place.a.at((row + r) * moves[0]) for r in range(height)]
        padded = spec.packed or spec.repacks
        panel_step = vectors * self.lanes if padded else spec.b_steps[0]
        grid = microkernel.accumulate(
            k, microkernel.zeros(k, height, vectors, self.lanes), a_rows, spec.a_step, place.b, panel_step, spec.depth,
            None if padded else mask,
        )  # fmt: skip
        for r in range(height):
            for v in range(vectors):
                self._store(place, row + r, moves, v, grid[r][v], mask if v == vectors - 1 else None)

    def _store(self, place: _Place, row: Val, moves: list[Val], v: int, value: Val, mask: Val | None) -> None:
        """The epilogue of one vector of results."""
        spec, at = self.spec, v * self.lanes
        extras = [
            self._load(pointer.at(row * move), at, step, mask)
            for pointer, move, step in zip(place.extras, moves[2:-1], spec.extra_steps, strict=True)
        ]
        result = microkernel.apply_epilogue(self.kernel, spec.epilogue, value, extras)
        y = place.y.at(row * moves[-1])
        if spec.y_step == 1:
            y.store(result, at, mask)
        else:
            y.scatter(result, (self.kernel.lane_numbers(self.lanes) + at) * spec.y_step, mask)

    def _load(self, pointer: Pointer, at: int, step: int, mask: Val | None) -> Val:
        return pointer.load(at, self.lanes, mask) if step else pointer.load().splat(self.lanes)

    def _gather_panel(self, b: Pointer, panel: Pointer, columns: int) -> None:
        """Copy a panel of B, whose columns are not neighbours, into the packed layout."""
        k, (k_step, j_step) = self.kernel, self.spec.b_steps
        width = -(-columns // self.lanes) * self.lanes
        for first in range(0, width, self.lanes):
            count = min(self.lanes, columns - first)
            source, target = b.at(first * j_step), panel.at(first)
            if k_step == 1:
                self._transpose(source, target, j_step, count, width)
                continue
            mask = k.lane_mask(count, self.lanes) if count < self.lanes else None
            with k.loop(0, self.spec.depth) as i:
                numbers = k.lane_numbers(self.lanes) * j_step
                target.store(source.at(i * k_step).gather(numbers, mask), i * width)

    def _transpose(self, source: Pointer, target: Pointer, j_step: int, count: int, width: int) -> None:
        """`count` contiguous columns of B, a square of `lanes` x `lanes` at a time."""
        k, depth, lanes = self.kernel, self.spec.depth, self.lanes

        def square(i: Val, valid: int) -> None:
            mask = k.lane_mask(valid, lanes) if valid < lanes else None
            lines = [
                source.load(i + j * j_step, lanes, mask) if j < count else k.zeros(F32, lanes) for j in range(lanes)
            ]
            for step, line in enumerate(transpose_rows(k, lines)[:valid]):
                target.store(line, (i + step) * width)

        whole = depth // lanes * lanes
        with k.loop(0, whole, lanes) as i:
            square(i, lanes)
        if depth > whole:
            square(k.index(whole), depth - whole)
