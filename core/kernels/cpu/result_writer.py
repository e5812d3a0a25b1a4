"""Stores of results: from accumulators through the epilogue with its extra inputs to memory, with a masked tail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.graph import Graph
from lathe.core.kernels.cpu.microkernel import Grid
from lathe.core.kernels.shared.panels import LINE_BYTES
from lathe.core.ops.nn.fused import scalar_body

Offsets: TypeAlias = Callable[[Val], list[Val]]  # the offset of each operand in a row


@dataclass(frozen=True)
class ResultWriter:
    """Generates code that runs the epilogue on sums and stores the results, matrices of rows and columns.

    `operands` are the addresses of the epilogue's extra inputs, then of the output; `steps` are their strides along the
    columns. An extra with step 0 holds one value per row.
    """

    kernel: Kernel
    epilogue: Graph | None
    operands: tuple[Pointer, ...]
    steps: tuple[int | Val, ...]
    deferred: bool = False  # tiles store their sums, and `finish` runs the epilogue over whole rows
    stage: Pointer | None = None  # buffer for the sums of a tile, if the epilogue is staged (see `panels.is_staged`)

    def at_column(self, first: Val) -> ResultWriter:
        """A writer of the same results whose column 0 is column `first` of this one."""
        moved = tuple(p.at(first * step) for p, step in zip(self.operands, self.steps, strict=True))
        return dataclasses.replace(self, operands=moved)

    def store_tile(self, grid: Grid, row: Val, offsets: Offsets, mask: Val | None) -> None:
        """Run the epilogue on the tile `grid` of sums, whose first row is `row`, and store the results.

        `offsets(row)` gives the offset of each operand in a row; `mask` guards the last vector. If the epilogue is
        deferred, the sums themselves are stored.
        """
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
        """Run the epilogue on the sums of one row, `width` vectors in memory, and store the results.

        `offsets` are those of the operands in this row; `mask` guards the last vector.
        """
        places = self._places(offsets)
        for v in range(width):
            self._finish(sums.load(v * lanes, lanes), places, v * lanes, mask if v == width - 1 else None)

    def fetch(self, rows: Sequence[Sequence[Val]], columns: int) -> None:
        """Prefetch the extra inputs of a tile that is about to be computed.

        An extra such as the first term of a residual sum was written several steps ago and has left the cache. Extras
        that are the same in every row, such as a bias, stay in the cache and are skipped, and so are extras that are
        not contiguous along the columns. If the epilogue is deferred or staged, nothing is prefetched. `rows`: as for
        `store`.
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
        """Run the epilogue on the tile `grid` of sums, unless it is deferred, and store the values.

        `rows[r]` are the operands' offsets in row r; `mask` guards the last vector.
        """
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
        """Run the epilogue over the stored sums of rows `start` to `stop`, in place, if it is deferred.

        `offsets(row)` gives the operands' offsets in a row. Other writers do nothing.
        """
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
