"""Convolutions as implicit matrix products: tiles of output pixels against panels of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lathe.core.codegen.lang import Index, Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.conv.spec import ConvSpec, table_lanes
from lathe.core.kernels.cpu.microkernel import (
    Grid,
    Prefetch,
    accumulate,
    for_each_panel,
    for_each_tile,
    prefetch_of,
    zeros,
)
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.register_shuffles import shuffle
from lathe.core.kernels.cpu.repack import widen_rows
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.shared.panels import fits_l2, packed_size, prefetch_tiles, stage_bytes
from lathe.core.kernels.shared.words import WORD_BYTES, accumulator_dtype, stored_dtype, word_dtype
from lathe.core.kernels.target import Target

F32, I64 = DType.FLOAT32, DType.INT64


@dataclass(frozen=True)
class _Panel:
    """One weight panel of one group, with the image's channels and the results that belong to it."""

    image: Pointer
    weights: Pointer
    results: ResultWriter
    columns: int


def generate(spec: ConvSpec, target: Target) -> Kernel:
    return _Conv(spec, target).kernel


class _Conv:
    """Writes the kernel of one spec."""

    def __init__(self, spec: ConvSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        self.lanes, self.entries = spec.tile.lanes, table_lanes(spec.tile)
        self.word, self.stored = word_dtype(spec.element), stored_dtype(spec.element)
        dtypes = (self.stored, self.stored, *spec.finish.extra_dtypes, spec.finish.dtype)
        operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
        self.image, self.weights = (pointer.converting(self.word) for pointer in operands[:2])
        finish = spec.finish
        index, total = len(operands), accumulator_dtype(spec.element)
        if spec.widened_words:
            self.wide = k.scratch(index + 1, spec.widened_words * WORD_BYTES, F32)
        behind = index + 1 + (spec.widened_words > 0)
        stage = k.scratch(behind, stage_bytes(spec.tile), total) if finish.staged else None
        steps = (*finish.extra_steps, 1)
        self.results = ResultWriter(k, finish.epilogue, tuple(operands[2:]), steps, finish.deferred, stage)
        self._scratch(index)
        in_blocks = fits_l2(target, spec.depth, spec.columns * spec.groups)
        self.ahead = prefetch_tiles(spec.pixels, spec.tile, in_blocks)
        self._panels(in_blocks)

    def _panels(self, in_blocks: bool) -> None:
        """Compute all panels.

        Groups read adjacent channels of the same pixels. With `in_blocks`, all groups handle a block of pixels before
        the next block.
        """
        k, spec = self.kernel, self.spec
        each, rest = divmod(spec.columns, spec.tile.columns)
        if spec.groups == 1 or rest or not in_blocks:
            for_each_panel(k, k.index(spec.groups), spec.columns, spec.pixels, spec.tile, self._panel, in_blocks)
            return

        def panel(_: Val, number: Val, columns: int, start: Val, stop: Val, new: Val | None) -> None:
            self._panel(number // each, number % each, columns, start, stop, new)

        for_each_panel(k, k.index(1), spec.columns * spec.groups, spec.pixels, spec.tile, panel, in_blocks)

    def _scratch(self, index: int) -> None:
        """Set the addresses in scratch operand `index`: rows for gathered windows if the spec gathers.

        Otherwise the operand holds the table of runs, followed by a run of `fill`. If the image is padded, this
        function generates the code that writes that run.
        """
        k, spec = self.kernel, self.spec
        if spec.gathers:
            self.rows = k.scratch(index, spec.tile.rows * spec.row_elements * WORD_BYTES, self.word)
            return
        entries = spec.runs * self.entries
        room = -(-spec.run // self.lanes) * self.lanes
        self.table = k.scratch(index, entries * I64.itemsize + room * F32.itemsize, I64)
        self.outside = self.table.at(entries).view(self.stored).converting(self.word)
        if spec.padded:
            with k.loop(0, room, self.lanes) as i:
                self.outside.store(k.constant(spec.fill, self.word, self.lanes), i)

    def _panel(self, group: Val, panel: Val, columns: int, start: Val, stop: Val, new: Val | None) -> None:
        """Compute pixels `start` to `stop` of one panel, which has `columns` output channels of group `group`.

        `new` is true where a thread reads this panel for the first time (None: always).
        """
        k, spec = self.kernel, self.spec
        first = panel * spec.tile.columns
        weights = self.weights.at(group * packed_size(spec.depth, spec.columns, spec.tile) + first * spec.depth)
        results = self.results.at_column(group * spec.columns + first)
        place = _Panel(self.image.at(group * spec.channels), weights, results, columns)

        def tile(pixel: Val, height: int) -> None:
            ahead, number, depth = None, (pixel - start) // spec.tile.rows, spec.depth
            if self.ahead and height == spec.tile.rows:
                ahead = prefetch_of(weights, columns * depth, columns, spec.tile, number, self.ahead, depth, new)
            self._tile(place, pixel, height, ahead)

        for_each_tile(k, start, stop, spec.pixels, spec.tile.rows, tile)
        results.finish(start, stop, columns, self.lanes, self._offsets)

    def _offsets(self, pixel: Val) -> list[Val]:
        """The offsets of the extras and of Y, in elements, at output pixel number `pixel` of the batch."""
        return offsets_of(self.kernel, self.spec.finish.pixels, pixel)

    def _tile(self, place: _Panel, pixel: Val, height: int, ahead: Prefetch | None) -> None:
        k, lanes = self.kernel, self.lanes
        vectors, tail = -(-place.columns // lanes), place.columns % lanes
        place.results.fetch([self._offsets(pixel + r) for r in range(height)], place.columns)
        grid = zeros(k, height, vectors, lanes, accumulator_dtype(self.spec.element))
        grid = (
            self._sum_gathered(place, grid, pixel)
            if self.spec.gathers
            else self._sum_implicit(place, grid, pixel, ahead)
        )
        place.results.store_tile(grid, pixel, self._offsets, k.lane_mask(tail, lanes) if tail else None)

    # Windows found through a table

    def _sum_implicit(self, place: _Panel, grid: Grid, pixel: Val, ahead: Prefetch | None) -> Grid:
        k, spec = self.kernel, self.spec
        height, width = len(grid), len(grid[0]) * self.lanes
        self._fill_table(place.image, pixel)
        with k.fold(0, spec.runs, _flat(grid)) as fold:
            sources = [self._source(place.image, fold.index, r) for r in range(height)]
            panel = place.weights.at(fold.index * (spec.run // spec.pair * width))
            carried = _as_grid(fold.values, grid)
            part = ahead.after(fold.index * spec.run) if ahead is not None else None
            if spec.pair > 1:
                rows = self._add_groups(carried, sources, panel)
            else:
                sources = self._widen_sources(sources, spec.run)
                rows = self._accumulate(carried, sources, panel, width, spec.run, ahead=part)
            fold.values = _flat(rows)
        return _as_grid(fold.values, grid)

    def _widen_sources(self, sources: list[Pointer], count: int) -> list[Pointer]:
        """The addresses of `count` words of each pixel: `sources`, or float32 copies in scratch for a float16 image."""
        needed = self.spec.widened_words > 0
        return widen_rows(self.kernel, sources, self.wide, count, self.lanes) if needed else sources

    def _add_groups(self, grid: Grid, sources: Sequence[Pointer], panel: Pointer) -> Grid:
        """`grid` plus the products of one run, for several groups side by side in a vector.

        Channel c of each group is broadcast to the lanes of that group's results.
        """
        k, lanes, size = self.kernel, self.lanes, self.spec.channels // self.spec.pair
        images, sums = [source.load(0, lanes) for source in sources], [row[0] for row in grid]
        for channel in range(size):
            weights = panel.load(channel * lanes, lanes)
            spread = [lane // size * size + channel for lane in range(lanes)]
            sums = [k.ops.fma(shuffle(k, x, x, spread), weights, total) for x, total in zip(images, sums, strict=True)]
        return [[total] for total in sums]

    def _accumulate(
        self,
        grid: Grid,
        sources: Sequence[Pointer],
        panel: Pointer,
        width: int,
        depth: int,
        ahead: Prefetch | None = None,
    ) -> Grid:
        spec = self.spec
        return accumulate(
            self.kernel, grid, sources, 1, panel, width, depth,
            element=spec.element, ahead=ahead, panel_vectors=spec.tile.vectors,
        )  # fmt: skip

    def _source(self, image: Pointer, run: Val, row: int) -> Pointer:
        return image.at(self.table.load(run * self.entries + row))

    def _fill_table(self, image: Pointer, pixel: Val) -> None:
        """Fill the table: the image offset of each run of the window, for each pixel of the tile."""
        k, spec = self.kernel, self.spec
        outside = self.outside.distance_from(image)
        numbers = k.lane_numbers(self.entries)
        batch, *places = k.unravel((numbers + pixel).cast(DType.INT32), [0, *map(self._lane_count, spec.counts)])
        corners = [place * w.stride - w.before for place, w in zip(places, spec.windows, strict=True)]
        sizes = [k.dim(size) for size in spec.sizes]
        for run in range(spec.runs):
            tap = run * (spec.taps // spec.runs)
            offset, inside = batch.cast(I64), None
            axes = zip(corners, spec.windows, self._tap_steps(tap), sizes, spec.reaches, strict=True)
            for corner, w, step, size, reaches in axes:
                at = corner + step * w.dilation
                offset = offset * size + at.cast(I64)
                if reaches:
                    within = (at >= 0) & (at.cast(I64) < size)
                    inside = within if inside is None else inside & within
            offset = offset * (spec.channels * spec.groups)
            if inside is not None:
                offset = k.ops.select(inside, offset, outside)
            self.table.store(offset, run * self.entries)

    def _lane_count(self, count: Dim) -> Index:
        """The number of results along an axis, as a divisor of vectors of pixel numbers.

        An int, or a dynamic number as an int32 in all lanes.
        """
        k = self.kernel
        return count if isinstance(count, int) else k.dim(count).cast(DType.INT32).splat(self.entries)

    def _tap_steps(self, tap: int) -> list[int]:
        """The coordinates of place `tap` in the window."""
        steps: list[int] = []
        for window in reversed(self.spec.windows):
            tap, step = divmod(tap, window.kernel)
            steps.insert(0, step)
        return steps

    # Windows read in place line by line, or copied into rows

    def _sum_gathered(self, place: _Panel, grid: Grid, pixel: Val) -> Grid:
        """`grid` plus the products of a tile of pixels from `pixel` on.

        Windows of one or two axes that lie inside the image, on one line of results, are read in place; others are
        copied first.
        """
        if len(self.spec.windows) > 2:
            return self._sum_copied(place, grid, pixel)
        inside, corner = self._first_window(place.image, pixel, len(grid))
        flat = self.kernel.choose(
            inside,
            lambda: _flat(self._sum_in_place(place, grid, corner)),
            lambda: _flat(self._sum_copied(place, grid, pixel)),
        )
        return _as_grid(flat, grid)

    def _first_window(self, image: Pointer, pixel: Val, height: int) -> tuple[Val, Pointer]:
        """Whether `height` pixels from `pixel` on are on one line with their windows inside the image.

        Also returns the address of the first window's first element, which is valid only then.
        """
        k, spec = self.kernel, self.spec
        batch, *places = k.unravel(pixel, [0, *(w.count for w in spec.windows)])
        inside, offset = places[-1] + height <= spec.windows[-1].inside[1], batch
        for at, w in zip(places, spec.windows, strict=True):
            first, after = w.inside
            inside = inside & (at >= first) & (at < after)
            offset = offset * w.size + at * w.stride - w.before
        return inside, image.at(offset * spec.channels)

    def _sum_in_place(self, place: _Panel, grid: Grid, corner: Pointer) -> Grid:
        """`grid` plus the products of windows that are read in place; the first pixel's window begins at `corner`."""
        k, spec = self.kernel, self.spec
        *outer, inner = spec.windows
        width = len(grid[0]) * self.lanes
        with k.fold(0, spec.taps // inner.kernel, _flat(grid)) as fold:
            line = corner.at(fold.index * (sum(w.dilation for w in outer) * inner.size * spec.channels))
            sources = self._widen_sources(
                [line.at(r * inner.stride * spec.channels) for r in range(len(grid))], spec.row
            )
            panel, carried = place.weights.at(fold.index * (spec.row * width)), _as_grid(fold.values, grid)
            fold.values = _flat(self._accumulate(carried, sources, panel, width, spec.row))
        return _as_grid(fold.values, grid)

    def _sum_copied(self, place: _Panel, grid: Grid, pixel: Val) -> Grid:
        k, spec = self.kernel, self.spec
        with k.loop(0, len(grid)) as r:
            self._gather_window(place.image, self.rows.at(r * spec.row_elements), pixel + r)
        sources = [self.rows.at(r * spec.row_elements) for r in range(len(grid))]
        width = len(grid[0]) * self.lanes
        return self._accumulate(grid, sources, place.weights, width, spec.depth)

    def _gather_window(self, image: Pointer, row: Pointer, pixel: Val) -> None:
        """Copy the window of output pixel `pixel` to `row`, line by line, with `fill` for places outside the image."""
        k, spec = self.kernel, self.spec
        batch, *places = k.unravel(pixel, [0, *(w.count for w in spec.windows)])
        *outer, last = [place * w.stride - w.before for place, w in zip(places, spec.windows, strict=True)]
        inner = spec.windows[-1]
        first = k.ops.max(k.index(0) - last, 0) * spec.channels
        after = k.ops.min(k.index(inner.size) - last, inner.kernel) * spec.channels
        runs = spec.taps // inner.kernel
        for run in range(runs):
            offset, end = batch, after
            for corner, w, step in zip(outer, spec.windows[:-1], self._tap_steps(run * inner.kernel), strict=False):
                at = corner + step * w.dilation
                offset = offset * w.size + at
                if w.inside != (0, w.count):
                    end = k.ops.select((at >= 0) & (at < w.size), end, 0)
            source = image.at((offset * inner.size + last) * spec.channels)
            self._copy_run(source, row.at(run * spec.row), first, end)

    def _copy_run(self, source: Pointer, target: Pointer, first: Val, end: Val) -> None:
        """Copy words `first` to `end` of a row of a window, and write `fill` to the other words of the row.

        Whole vectors are written; the copy of the next row overwrites the excess.
        """
        k, lanes = self.kernel, self.lanes
        fill = k.constant(self.spec.fill, self.word, lanes)
        for at in range(0, self.spec.row, lanes):
            count = min(lanes, self.spec.row - at)
            if self.spec.padded:
                mask = k.lane_mask(end - at, lanes) & ~k.lane_mask(first - at, lanes)
            else:
                mask = k.lane_mask(count, lanes)
            value = source.load(at, lanes, mask)
            target.store(k.ops.select(mask, value, fill) if self.spec.fill else value, at)


def _flat(grid: Grid) -> list[Val]:
    return [value for row in grid for value in row]


def _as_grid(values: Sequence[Val], like: Grid) -> Grid:
    """Flat values as a grid with rows as long as those of `like`."""
    width = len(like[0])
    return [list(values[r * width : (r + 1) * width]) for r in range(len(like))]
