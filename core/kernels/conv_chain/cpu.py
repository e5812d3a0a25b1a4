"""Depthwise convolutions between 1x1 convolutions: the wide images between them are computed line by line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.conv.spec import Finish
from lathe.core.kernels.conv_chain.spec import ConvChainSpec, Product
from lathe.core.kernels.cpu.microkernel import accumulate, for_each_tile, zeros
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.depthwise.cpu import Taps
from lathe.core.kernels.target import Target

F32 = DType.FLOAT32
_TASKS_PER_THREAD = 2
_LEAST_LINES = 4  # of a task, for each line of the wide image that the neighbouring task computes too


def generate(spec: ConvChainSpec, target: Target) -> Kernel:
    return _Chain(spec, target).kernel


class _Chain:
    """Writes the kernel of one spec."""

    def __init__(self, spec: ConvChainSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        self._count = 0
        self.image = self._operand()
        wide, middle, last = (
            self._parameters(finish) if finish is not None else []
            for finish in (_finish(spec.widen), spec.finish, _finish(spec.narrow))
        )
        self.y = self._operand()
        self.ring = k.scratch(self._count, max(spec.scratch_elements, 1) * F32.itemsize, F32)
        self.rows = self.ring.at(spec.wide_elements)
        self.wide_image = self.ring if spec.widen else self.image
        self.wide_parameters, self.last_parameters = wide, last
        weights, *extras = middle
        results = self._results(spec.finish, extras, self.rows if spec.narrow else self.y)
        self.taps = Taps(k, spec.windows, spec.channels, spec.columns, spec.lanes, weights, results)
        self._tasks()

    def _operand(self) -> Pointer:
        self._count += 1
        return self.kernel.operand(self._count - 1, F32)

    def _parameters(self, finish: Finish) -> list[Pointer]:
        """Take the next operands: the addresses of a convolution's weights and of the extra inputs of its epilogue."""
        return [self._operand() for _ in range(1 + len(finish.extra_dtypes))]

    def _results(self, finish: Finish, extras: Sequence[Pointer], y: Pointer, deferred: bool = False) -> ResultWriter:
        return ResultWriter(self.kernel, finish.epilogue, (*extras, y), (*finish.extra_steps, 1), deferred)

    def _tasks(self) -> None:
        """A task computes some bands of one image; a single thread takes whole images."""
        k, spec = self.kernel, self.spec
        lines = spec.windows[0]
        bands = lines.count // spec.band
        each = (bands + self._parts() - 1) // self._parts() * spec.band
        with k.parallel(k.dim(spec.batch), (k.index(lines.count) + each - 1) // each) as (image, part):
            start = part * each
            stop = k.ops.min(start + each, lines.count)
            done = k.ops.max(start * lines.stride - lines.before, 0)
            with k.fold(start, stop, [done], spec.band) as fold:
                fold.values = [self._band(image, fold.index, fold.values[0])]

    def _parts(self) -> Val:
        """The number of parts of an image: enough for all threads, but few, so that few lines are computed twice."""
        k, lines = self.kernel, self.spec.windows[0]
        threads, images = k.threads, k.ops.max(k.dim(self.spec.batch), 1)
        wanted = (threads * _TASKS_PER_THREAD + images - 1) // images
        repeated = max(self.spec.reach - lines.stride, 0) if self.spec.widen else 0
        most = max(lines.count // max(_LEAST_LINES * repeated, 1), 1)
        least = (threads + images - 1) // images
        parts = k.ops.max(k.ops.min(wanted, most) // least * least, least)
        return k.ops.select(threads.equals(1), k.index(1), k.ops.min(parts, lines.count // self.spec.band))

    def _band(self, image: Val, row: Val, done: Val) -> Val:
        """Compute a band of results from line `row` on.

        The lines of the wide image before `done` exist already. Returns the line up to which they exist afterwards.
        """
        k, spec = self.kernel, self.spec
        lines = spec.windows[0]
        corner = row * lines.stride - lines.before
        needed = k.ops.min(corner + ((spec.band - 1) * lines.stride + spec.reach), lines.size)
        if spec.widen is not None:
            self._widen(spec.widen, image, done, needed)
        self._convolve(image, row)
        if spec.narrow is not None:
            self._narrow(spec.narrow, image, row)
        return k.ops.max(needed, done)

    # The parts of a chain

    def _widen(self, product: Product, image: Val, start: Val, stop: Val) -> None:
        """Compute lines `start` to `stop` of the wide image."""
        k, spec = self.kernel, self.spec
        lines, columns = spec.windows
        weights, *extras = self.wide_parameters
        results = self._results(product.finish, extras, self.ring, product.finish.deferred)
        unmoved = [k.index(0)] * len(extras)

        def widen(line: Val, slot: Val, rows: Val) -> None:
            source = self.image.at((image * lines.size + line) * (columns.size * product.depth))
            place = slot * columns.size
            self._product(
                product, source, weights, results, rows, lambda row: [*unmoved, (place + row) * spec.channels]
            )

        if spec.has_whole_image:
            widen(start, start, k.ops.max(stop - start, 0) * columns.size)
        else:
            with k.loop(start, stop) as line:
                widen(line, line % spec.ring, k.index(columns.size))

    def _convolve(self, image: Val, first: Val) -> None:
        """Compute a band of the depthwise convolution.

        For a few columns at a time, all lines are computed in turn, so that inputs that adjacent lines share are still
        in the first-level cache.
        """
        k, spec = self.kernel, self.spec
        window = spec.windows[0]

        def tile(column: Val, count: int, inside: Sequence[int]) -> None:
            with k.loop(0, spec.band) as line:
                row = first + line
                corner = row * window.stride - window.before
                offsets = [self._place(image, row, line, column + c) for c in range(count)]
                self.taps.tile(self._lines(image, corner), self.taps.inner_lines(corner), column, inside, offsets)

        self.taps.each_tile(tile)

    def _place(self, image: Val, row: Val, line: Val, column: Val) -> list[Val]:
        """The offsets of the extras and of the output for one result of the depthwise convolution."""
        k, spec = self.kernel, self.spec
        lines, columns = spec.windows
        if spec.narrow is None:
            return offsets_of(k, spec.finish.pixels, (image * lines.count + row) * columns.count + column)
        unmoved = [k.index(0)] * len(spec.finish.extra_dtypes)
        return [*unmoved, (line * columns.count + column) * spec.channels]

    def _lines(self, image: Val, corner: Val) -> Callable[[Val], Pointer]:
        """A function that returns the address of a line of the window, given its number in the window.

        The window begins in line `corner` of the wide image; its lines lie in the ring buffer, or in the input.
        """
        k, spec = self.kernel, self.spec
        lines, elements = spec.windows[0], self.taps.line_elements
        if spec.widen is None:
            top = self.image.at((image * lines.size + corner) * elements)
            return lambda step: top.at(step * (lines.dilation * elements))
        if spec.has_whole_image:
            return lambda step: self.ring.at((corner + step * lines.dilation) * elements)
        slot = (corner + spec.ring) % spec.ring  # the first line may lie outside the image

        def line(step: Val) -> Pointer:
            at = slot + step * lines.dilation
            return self.ring.at(k.ops.select(at >= spec.ring, at - spec.ring, at) * elements)

        return line

    def _narrow(self, product: Product, image: Val, row: Val) -> None:
        k, spec = self.kernel, self.spec
        lines, columns = spec.windows
        weights, *extras = self.last_parameters
        results = self._results(product.finish, extras, self.y, product.finish.deferred)
        first = (image * lines.count + row) * columns.count

        def offsets(pixel: Val) -> list[Val]:
            return offsets_of(k, product.finish.pixels, first + pixel)

        self._product(product, self.rows, weights, results, k.index(spec.band * columns.count), offsets)

    def _product(
        self,
        product: Product,
        source: Pointer,
        weights: Pointer,
        results: ResultWriter,
        rows: Val,
        offsets: Callable[[Val], list[Val]],
    ) -> None:
        """Multiply `rows` adjacent pixels from `source` on by the weights, panel by panel."""
        k, tile = self.kernel, product.tile
        full, rest = divmod(product.columns, tile.columns)
        known = rows.constant
        count = int(known) if known is not None else self.spec.batch * self.spec.windows[1].size
        mask = k.lane_mask(rest % tile.lanes, tile.lanes) if rest % tile.lanes else None

        def panel(first: Val, columns: int) -> None:
            vectors = -(-columns // tile.lanes)
            here, part = results.at_column(first), weights.at(first * product.depth)

            def emit(row: Val, height: int) -> None:
                sources = [source.at((row + r) * product.depth) for r in range(height)]
                grid = zeros(k, height, vectors, tile.lanes)
                grid = accumulate(
                    k, grid, sources, 1, part, vectors * tile.lanes, product.depth, panel_vectors=tile.vectors
                )
                here.store_tile(grid, row, offsets, mask if columns == rest else None)

            for_each_tile(k, k.index(0), rows, count, tile.rows, emit)
            here.finish(k.index(0), rows, columns, tile.lanes, offsets)

        with k.loop(0, full * tile.columns, tile.columns) as first:
            panel(first, tile.columns)
        if rest:
            panel(k.index(full * tile.columns), rest)


def _finish(product: Product | None) -> Finish | None:
    return product.finish if product is not None else None
