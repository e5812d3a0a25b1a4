"""Products and convolutions on matrix tiles: `lathe.core.kernels.amx.spec` describes the layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lathe.core.codegen import amx
from lathe.core.codegen.amx import Shape
from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.llvm_ir import I64
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.amx.copy_cpu import WORD, copy_band, copy_rows
from lathe.core.kernels.amx.spec import BLOCK, STAGE_BYTES, TILE, AmxSpec
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.shared.panels import LINE
from lathe.core.kernels.shared.words import WORD_BYTES, accumulator_dtype
from lathe.core.kernels.target import Target

_PLACE = DType.INT64
_TASKS_PER_THREAD = 4
_FETCHES = 8  # cache lines of the next panel of weights that each step prefetches


class _Band(NamedTuple):
    """The rows of A (results) that a task computes: `size` of them from `first` on.

    `source` is the address of row 0 of the whole matrix or, if the band is copied, of the band's copy.
    """

    first: Val
    size: Val
    source: Pointer


class _Block(NamedTuple):
    """Results `first` to `stop` (exclusive) of a band; `number` counts the band's blocks.

    Row 0 of the block's tiles is at position `place`: a row of the band, or a pixel of a plane of the copied images. In
    a matrix `place` may lie before `first`, so that the tiles do not exceed the last row.
    """

    number: Val
    place: Val
    first: Val
    stop: Val


class _Panel(NamedTuple):
    weights: Pointer
    following: Pointer  # the weights of the next panel
    results: ResultWriter
    columns: int


def generate(spec: AmxSpec, target: Target) -> Kernel:
    return _Amx(spec, target).kernel


class _Amx:
    """Writes the kernel of one spec."""

    def __init__(self, spec: AmxSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        self.total, finish = accumulator_dtype(spec.element), spec.finish
        dtypes = (DType.FLOAT32 if spec.parts > 1 else WORD, WORD, *finish.extra_dtypes, finish.dtype)
        self.source, self.weights, *rest = (k.operand(i, dtype) for i, dtype in enumerate(dtypes))
        self.results = ResultWriter(k, finish.epilogue, tuple(rest), (*finish.extra_steps, 1))
        scratch = k.scratch(len(dtypes), spec.scratch_bytes, self.total)
        self.stage, self.copy = scratch, scratch.at((STAGE_BYTES + 64) // WORD_BYTES).view(WORD)
        self.rows = k.dim(spec.rows)
        if spec.windows:
            flat = spec.flat
            self.places = self._table("places", flat.places)
            self.firsts = self._table("firsts", flat.blocks)
            size = flat.plane_pixels * spec.depth
            self.taps = self._table("taps", [tap.plane * size + tap.shift * spec.step for tap in flat.taps])
        with k.when(self.rows > 0):
            amx.configure(k, self._shapes(), scratch.at(STAGE_BYTES // WORD_BYTES))
        self._tasks()
        amx.release(k)

    def _table(self, name: str, numbers: Sequence[int]) -> Pointer:
        k = self.kernel
        return Pointer(k, k.module.constants(f"{k.symbol}.{name}", I64, numbers), _PLACE)

    def _shapes(self) -> list[Shape]:
        """The shapes of all tiles: 2 x 2 tiles of sums (0 to 3), the left factor's (4, 5), the right factor's (6, 7).

        A matrix that is read in place and has fewer rows than a block gets smaller tiles. A larger one ends with a
        block that overlaps the block before.
        """
        k, step = self.kernel, self.spec.step
        upper: Val | int = TILE
        lower: Val | int = TILE
        if not self.spec.copies:
            upper = k.ops.min(self.rows, TILE)
            lower = k.ops.max(k.ops.min(self.rows - TILE, TILE), 1)
        sums = [Shape(height, TILE) for height in (upper, upper, lower, lower)]
        return [*sums, Shape(upper, step), Shape(lower, step), Shape(step, TILE), Shape(step, TILE)]

    # Tasks

    def _tasks(self) -> None:
        """Generate the loop over tasks. A task is a band with all panels of weights.

        If there are too few bands for the threads, the panels of a band are divided among several tasks.
        """
        k, spec = self.kernel, self.spec
        panels = -(-spec.columns // BLOCK)
        bands = self._bands()
        bands_or_one = k.ops.max(bands, 1)  # an empty batch has none
        wanted = k.ops.select(k.threads.equals(1), 1, k.threads * _TASKS_PER_THREAD)
        parts = k.ops.min((wanted + bands_or_one - 1) // bands_or_one, panels)
        width = (parts + (panels - 1)) // parts
        with k.parallel(bands, parts) as (number, part):
            band, start = self._band(number), part * width
            stop = k.ops.min(start + width, panels)
            full, rest = divmod(spec.columns, BLOCK)
            with k.loop(start, k.ops.min(stop, full)) as panel:
                self._panel(band, panel, BLOCK)
            if rest:
                with k.when(stop.equals(panels)):
                    self._panel(band, k.index(full), rest)

    def _bands(self) -> Val:
        spec = self.spec
        if spec.windows:
            images = spec.flat.images
            return (self.rows + (images - 1)) // images * spec.flat.parts
        return (self.rows + (spec.band - 1)) // spec.band

    def _band(self, number: Val) -> _Band:
        k, spec = self.kernel, self.spec
        if spec.windows:
            first, count = copy_band(k, spec, self.source, self.copy, number, self.rows)
            return _Band(first, count, self.copy)
        first = number * spec.band
        count = k.ops.min(self.rows - first, spec.band)
        if spec.copies:
            copy_rows(k, spec, self.source, self.copy, first, count)
        return _Band(first, count, self.copy if spec.copies else self.source)

    def _panel(self, band: _Band, panel: Val, columns: int) -> None:
        spec = self.spec
        size = spec.steps * spec.taps * spec.parts * 2 * spec.tile_words
        weights = self.weights.at(panel * size)
        place = _Panel(weights, weights.at(size), self.results.at_column(panel * BLOCK), columns)
        self._each_block(band, lambda block, height: self._block(band, place, block, height))

    def _each_block(self, band: _Band, emit: Callable[[_Block, int], None]) -> None:
        """Generate loops that cut the band into blocks: `emit(block, height)` for blocks of 1 or 2 rows of tiles."""
        k = self.kernel
        if self.spec.windows:
            with k.loop(0, len(self.spec.flat.blocks) - 1) as number:
                first = self.firsts.load(number)
                stop = k.ops.min(self.firsts.load(number + 1), band.size)
                place = self.places.load(first)
                with k.when(first < stop):
                    used = self.places.load(stop - 1) - place
                    with k.when(used >= TILE):
                        emit(_Block(number, place, first, stop), 2)
                    with k.when(used < TILE):
                        emit(_Block(number, place, first, stop), 1)
            return
        whole = band.size // BLOCK * BLOCK
        rest = band.size - whole

        def block(first: Val, height: int) -> None:
            """Emit the block of `height` rows of tiles from result `first` of the band on.

            If that block would exceed the last row of a matrix, its tiles begin further up, if rows suffice.
            """
            stop, place = k.ops.min(first + BLOCK, band.size), first
            if not self.spec.copies:
                place = k.ops.min(band.first + first, k.ops.max(self.rows - height * TILE, 0)) - band.first
            emit(_Block(first // BLOCK, place, first, stop), height)

        with k.loop(0, k.ops.select(rest > TILE, band.size, whole), BLOCK) as first:
            block(first, 2)
        with k.when((rest > 0) & (rest <= TILE)):
            block(whole, 1)

    # A block

    def _block(self, band: _Band, panel: _Panel, block: _Block, height: int) -> None:
        k, spec = self.kernel, self.spec
        width = -(-panel.columns // TILE)
        sums = [(r, v) for r in range(height) for v in range(width)]
        for r, v in sums:
            amx.zero(k, 2 * r + v)
        if spec.copies:
            self._over_taps(band.source.at(block.place * spec.step), panel, block, (height, width))
        else:
            step = k.dim(spec.row_step)
            source = band.source.at((band.first + block.place) * step)
            with k.loop(0, spec.steps) as i:
                tiles = [source.at(i * spec.step + step * (r * TILE)) for r in range(height)]
                self._step([tiles], step, panel, block, i, width)
        for r, v in sums:
            amx.store(k, 2 * r + v, self.stage.at(r * TILE * BLOCK + v * TILE), BLOCK)
        self._finish(band, panel, block)

    def _over_taps(self, source: Pointer, panel: _Panel, block: _Block, shape: tuple[int, int]) -> None:
        """Add the products of a block from all steps of the depth and, within a step, all places of the window.

        `source` is the address of row 0 of the block, `shape` the numbers of tiles of rows and of columns.
        """
        k, spec = self.kernel, self.spec
        height, width = shape
        plane = spec.plane_pixels * spec.step
        with k.loop(0, spec.steps) as i:
            pixels = source.at(i * plane)
            with k.loop(0, spec.taps) as tap:
                at = pixels.at(self.taps.load(tap)) if spec.windows else pixels
                parts = [at.at(part * spec.part_words) for part in range(spec.parts)]
                tiles = [[part.at(r * TILE * spec.step) for r in range(height)] for part in parts]
                self._step(tiles, spec.step, panel, block, i * spec.taps + tap, width)

    def _step(
        self, left: list[list[Pointer]], row_step: Val | int, panel: _Panel, block: _Block, number: Val, width: int
    ) -> None:
        """Add the products of at most two tiles of the left factor by at most two of the weights, part by part.

        Meanwhile some lines of the next panel of weights are prefetched.
        """
        k, spec = self.kernel, self.spec
        weights = panel.weights.at(number * (spec.parts * width * spec.tile_words))
        loaded: dict[int, Pointer] = {}

        def load_once(tile: int, source: Pointer, step: Val | int) -> None:
            if loaded.get(tile) is not source:
                amx.load(k, tile, source, step)
                loaded[tile] = source

        right = [[weights.at((p * width + v) * spec.tile_words) for v in range(width)] for p in range(spec.parts)]
        for a, b in spec.products:
            for r, rows in enumerate(left[a]):
                load_once(4 + r, rows, row_step)
                for v, columns in enumerate(right[b]):
                    load_once(6 + v, columns, TILE)
                    amx.multiply_add(k, spec.element, 2 * r + v, 4 + r, 6 + v)
        part = k.ops.min(block.number, spec.parts * width * TILE // _FETCHES - 1) * (spec.steps * spec.taps) + number
        ahead = panel.following.at(part * (_FETCHES * LINE))
        for line in range(_FETCHES):
            ahead.prefetch(line * LINE)

    def _finish(self, band: _Band, panel: _Panel, block: _Block) -> None:
        """Run the epilogue over the staged sums and store the results."""
        k, spec = self.kernel, self.spec
        tail = panel.columns % TILE
        mask = k.lane_mask(tail, TILE) if tail else None
        with k.loop(block.first, block.stop) as row:
            place = self.places.load(row) if spec.windows else row
            line = self.stage.at((place - block.place) * BLOCK)
            offsets = offsets_of(k, spec.finish.pixels, band.first + row)
            panel.results.finish_line(line, offsets, -(-panel.columns // TILE), TILE, mask)
