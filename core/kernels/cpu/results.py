"""The way from accumulators to memory: epilogue, extra inputs, masked tail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.graph import Graph
from core.kernels.catalog.panels import LINE_BYTES
from core.kernels.cpu.microkernel import Grid
from core.ops.fused import scalar_body

Offsets: TypeAlias = Callable[[Val], list[Val]]  # where each operand is in a row


@dataclass(frozen=True)
class Results:
    """Where results go: `operands` are the extra inputs of the epilogue, then the output.

    `steps` says how far each moves from one column to the next; an extra that does not move holds one value per row.
    """

    kernel: Kernel
    epilogue: Graph | None
    operands: tuple[Pointer, ...]
    steps: tuple[int | Val, ...]
    deferred: bool = False  # tiles store sums as they are, and `finish` runs the epilogue over whole rows
    stage: Pointer | None = None  # where the sums of a tile wait for an epilogue that is long

    def at_column(self, first: Val) -> Results:
        """The same, seen from column `first`."""
        moved = tuple(p.at(first * step) for p, step in zip(self.operands, self.steps, strict=True))
        return dataclasses.replace(self, operands=moved)

    def store_tile(self, grid: Grid, row: Val, offsets: Offsets, mask: Val | None) -> None:
        """Finish and store a tile whose first row is `row`; `offsets(row)` says where each operand is in a row, and
        `mask` guards the last vector."""
        if self.stage is None:
            self.store(grid, [offsets(row + r) for r in range(len(grid))], mask)
            return
        width, lanes = len(grid[0]), grid[0][0].lanes
        for r, values in enumerate(grid):
            for v, value in enumerate(values):
                self.stage.store(value, (r * width + v) * lanes)
        with self.kernel.loop(0, len(grid)) as line:
            self.finish_line(self.stage.at(line * (width * lanes)), offsets(row + line), width, lanes, mask)

    def finish_line(self, sums: Pointer, offsets: Sequence[Val], width: int, lanes: int, mask: Val | None) -> None:
        """Finish the sums of one row, `width` vectors in memory; `offsets` says where each operand is."""
        places = self._places(offsets)
        for v in range(width):
            self._finish(sums.load(v * lanes, lanes), places, v * lanes, mask if v == width - 1 else None)

    def fetch(self, rows: Sequence[Sequence[Val]], columns: int) -> None:
        """Ask for what the extra inputs hold for a tile that is about to be computed: the first term of a residual sum
        was written several steps ago. `rows`: as for `store`. What is the same in every row, as a bias is, stays near.
        """
        if self.deferred or self.stage is not None:
            return
        extras, steps = self.operands[:-1], self.steps[:-1]
        for place, step, *offsets in zip(extras, steps, *(offsets[:-1] for offsets in rows), strict=True):
            if step != 1 or all(offset.constant is not None for offset in offsets):
                continue
            for offset, at in product(offsets, range(0, columns, LINE_BYTES // place.dtype.itemsize)):
                place.at(offset).prefetch(at)

    def store(self, grid: Grid, rows: Sequence[Sequence[Val]], mask: Val | None) -> None:
        """Finish and store a tile. `rows[r]` holds each operand's offset in row r; `mask` guards the last vector."""
        for values, offsets in zip(grid, rows, strict=True):
            places = self._places(offsets)
            for v, value in enumerate(values):
                last = mask if v == len(values) - 1 else None
                if self.deferred:
                    places[-1].store(value, v * value.lanes, last)
                else:
                    self._finish(value, places, v * value.lanes, last)

    def _places(self, offsets: Sequence[Val]) -> list[Pointer]:
        return [p.at(offset) for p, offset in zip(self.operands, offsets, strict=True)]

    def finish(self, start: Val, stop: Val, columns: int, lanes: int, offsets: Offsets) -> None:
        """Run a deferred epilogue over the rows `start` to `stop`; `offsets(row)` says where each operand is."""
        if not self.deferred:
            return
        k = self.kernel
        with k.loop(start, stop) as row:
            places = self._places(offsets(row))
            for at in range(0, columns, lanes):
                mask = k.lane_mask(columns - at, lanes) if columns - at < lanes else None
                self._finish(places[-1].load(at, lanes, mask), places, at, mask)

    def _finish(self, value: Val, places: Sequence[Pointer], at: int, mask: Val | None) -> None:
        k, lanes = self.kernel, value.lanes
        extras = [self._extra(p, at, step, lanes, mask) for p, step in zip(places[:-1], self.steps[:-1], strict=True)]
        if self.epilogue is not None:
            value = k.ops.splat(scalar_body(k.ops, self.epilogue, [value, *extras])[0], lanes)
        y, step = places[-1], self.steps[-1]
        if step == 1:
            y.store(value, at, mask)
        else:
            y.scatter(value, (k.lane_numbers(lanes) + at) * step, mask)

    def _extra(self, place: Pointer, at: int, step: int | Val, lanes: int, mask: Val | None) -> Val:
        if step == 0:
            return place.load().splat(lanes)
        if step == 1:
            return place.load(at, lanes, mask)
        return place.gather((self.kernel.lane_numbers(lanes) + at) * step, mask)
