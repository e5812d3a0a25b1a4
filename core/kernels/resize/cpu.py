"""Resize with constant tables of taps; vectors over channels, or over a line of results for one channel."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.codegen.registers import element_type
from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks, for_each_vector, grain, has_masks
from lathe.core.kernels.resize.spec import ResizeSpec, Taps
from lathe.core.kernels.target import Target

_F32, _I64 = DType.FLOAT32, DType.INT64


@dataclass(frozen=True, slots=True)
class _Table:
    """Taps as constants of the module, tap by tap, so that adjacent results are contiguous."""

    results: int
    taps: int
    indices: Pointer
    weights: Pointer

    def at(self, result: Val, tap: int, lanes: int = 1, mask: Val | None = None) -> tuple[Val, Val]:
        """The indices and the weights of tap number `tap` of `lanes` adjacent results from `result` on."""
        place = result + tap * self.results
        return self.indices.load(place, lanes, mask), self.weights.load(place, lanes, mask)


def generate(spec: ResizeSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, y = k.operand(0, _F32), k.operand(1, _F32)
    planes, rows, columns = (
        _table(k, name, taps)
        for name, taps in (("planes", spec.planes), ("rows", spec.rows), ("columns", spec.columns))
    )
    width = spec.columns.size * spec.channels
    line = columns.results * spec.channels
    steps = grain(8, 2 * planes.taps * rows.taps * columns.taps) // max(line, 1)
    lines = k.dim(spec.batch) * (planes.results * rows.results)
    with even_chunks(k, lines, steps) as (start, stop), k.loop(start, stop) as item:
        of_plane, row = item // max(rows.results, 1), item % max(rows.results, 1)
        sources = [
            (x.at((plane * spec.rows.size + index) * width), weight if factor is None else factor * weight)
            for plane, factor in _planes(spec.planes, planes, of_plane)
            for index, weight in (rows.at(row, tap) for tap in range(rows.taps))
        ]
        if spec.channels == 1:
            _line(k, columns, sources, y.at(item * line))
        else:
            with k.loop(0, columns.results) as column:
                _pixel(k, spec, columns, column, sources, y.at(item * line + column * spec.channels))
    return k


def _planes(taps: Taps, table: _Table, result: Val) -> list[tuple[Val, Val | None]]:
    """The planes of all images that plane number `result` of all results is made from, each with its weight, or None.

    None stands for a weight of 1: images of one plane.
    """
    if taps.size == 1 and table.results == 1:
        return [(result, None)]
    image, plane = result // max(table.results, 1), result % max(table.results, 1)
    pairs = [table.at(plane, tap) for tap in range(table.taps)]
    return [(image * taps.size + index, weight) for index, weight in pairs]


def _table(k: Kernel, name: str, taps: Taps) -> _Table:
    results, count = taps.shape
    indices, weights = (
        _constant(k, f"{name}.indices", taps.indices.T, _I64),
        _constant(k, f"{name}.weights", taps.weights.T, _F32),
    )
    return _Table(results, count, indices, weights)


def _constant(k: Kernel, name: str, array: Array, dtype: DType) -> Pointer:
    """Add an array, as elements of `dtype`, to the module's read-only data; returns its address."""
    return Pointer(k, k.module.constants(f"{k.symbol}.{name}", element_type(dtype), array.ravel().tolist()), dtype)


def _pixel(
    k: Kernel, spec: ResizeSpec, columns: _Table, column: Val, sources: list[tuple[Pointer, Val]], y: Pointer
) -> None:
    """Compute all channels of the result's pixel `column` of a line, and store them at `y`.

    `sources` are the addresses of the image lines that it reads, each with its weight.
    """
    taps = [columns.at(column, tap) for tap in range(columns.taps)]
    corners = [
        (source.at(index * spec.channels), row_weight * weight)
        for (source, row_weight), (index, weight) in itertools.product(sources, taps)
    ]

    def step(i: Val, lanes: int, mask: Val | None) -> None:
        total = None
        for source, weight in corners:
            part = source.load(i, lanes, mask)
            total = part * weight if total is None else k.ops.fma(part, weight, total)
        if total is not None:
            y.store(total, i, mask)

    for_each_vector(k, spec.channels, step, k.lanes, has_masks(k.target, [4]))


def _line(k: Kernel, columns: _Table, sources: list[tuple[Pointer, Val]], y: Pointer) -> None:
    """Compute a line of results at `y` for an image of one channel, with gathers.

    `sources` are the addresses of the image lines that it reads, each with its weight.
    """

    def step(i: Val, lanes: int, mask: Val | None) -> None:
        total = None
        for tap in range(columns.taps):
            indices, weights = columns.at(i, tap, lanes, mask)
            for source, row_weight in sources:
                part = source.load(indices) if lanes == 1 else source.gather(indices, mask)
                weight = weights * row_weight
                total = part * weight if total is None else k.ops.fma(part, weight, total)
        if total is not None:
            y.store(total, i, mask)

    for_each_vector(k, columns.results, step, k.lanes, has_masks(k.target, [4, 8]))
