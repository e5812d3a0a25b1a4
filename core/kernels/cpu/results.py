"""The way from accumulators to memory: epilogue, extra inputs, masked tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.graph import Graph
from core.ops.fused import scalar_body


@dataclass(frozen=True)
class Results:
    """Where results go: `operands` are the extra inputs of the epilogue, then the output.

    `steps` says how far each moves from one column to the next; an extra that does not move holds one value per row.
    """

    kernel: Kernel
    epilogue: Graph | None
    operands: tuple[Pointer, ...]
    steps: tuple[int, ...]

    def at_column(self, first: Val) -> Results:
        """The same, seen from column `first`."""
        moved = tuple(p.at(first * step) for p, step in zip(self.operands, self.steps, strict=True))
        return Results(self.kernel, self.epilogue, moved, self.steps)

    def store(self, grid: Sequence[Sequence[Val]], rows: Sequence[Sequence[Val]], mask: Val | None) -> None:
        """Finish and store a tile. `rows[r]` holds each operand's offset in row r; `mask` guards the last vector."""
        for values, offsets in zip(grid, rows, strict=True):
            places = [p.at(offset) for p, offset in zip(self.operands, offsets, strict=True)]
            for v, value in enumerate(values):
                self._finish(value, places, v * value.lanes, mask if v == len(values) - 1 else None)

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

    def _extra(self, place: Pointer, at: int, step: int, lanes: int, mask: Val | None) -> Val:
        if step == 0:
            return place.load().splat(lanes)
        if step == 1:
            return place.load(at, lanes, mask)
        return place.gather((self.kernel.lane_numbers(lanes) + at) * step, mask)
