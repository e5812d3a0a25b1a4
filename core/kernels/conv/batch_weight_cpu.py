"""Weight gradients of convolutions of batch-last images: sums over pixels and batch rows.

The outermost loop of a task runs over lines of the results, so that the lines of both images stay in the cache for all
its channels and lines of the window. Their sums lie in scratch meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from lathe.core.codegen.lang import Index, Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.conv.batch_spec import BatchWeightSpec
from lathe.core.kernels.target import Target

F32 = DType.FLOAT32
_UNROLLED = 4  # vectors of batch rows, up to which their loop is unrolled


def generate(spec: BatchWeightSpec, target: Target) -> Kernel:
    return _BatchWeight(spec, target).kernel


class _BatchWeight:
    """Writes the kernel of one spec."""

    def __init__(self, spec: BatchWeightSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        self.x, self.dy, self.dw = (k.operand(i, F32) for i in range(3))
        self.sums = k.scratch(3, spec.sum_bytes, F32)
        length = spec.windows[-1].kernel
        parts = [range(at, min(at + spec.across, length)) for at in range(0, length, spec.across)]
        full, rest = divmod(spec.outputs, spec.together)
        chunks = -(-spec.channels // spec.chunk)
        with k.parallel(spec.groups, full + bool(rest), len(parts), chunks) as (group, block, part, chunk):
            start = chunk * spec.chunk
            channels = (start, k.ops.min(start + spec.chunk, spec.channels))
            for number, places in enumerate(parts):
                if full:
                    with k.when((block < full) & part.equals(number)):
                        self._block(group, block * spec.together, spec.together, places, channels)
                if rest:
                    with k.when(block.equals(full) & part.equals(number)):
                        self._block(group, k.index(full * spec.together), rest, places, channels)

    def _block(self, group: Val, first: Val, outputs: int, places: range, channels: tuple[Val, Val]) -> None:
        """Compute `places` of all lines of the window, for `outputs` outputs from `first` on and a range of `channels`.

        Outputs and channels count from the first of the group.
        """
        k, spec = self.kernel, self.spec
        *outer, columns = spec.windows
        lines, width, tile = prod(window.count for window in outer), columns.count * spec.rows, outputs * len(places)
        output = group * spec.outputs + first
        with k.loop(0, (channels[1] - channels[0]) * (spec.lines * tile)) as vector:
            self.sums.store(k.zeros(F32, spec.lanes), vector * spec.lanes)
        with k.loop(0, lines) as line:
            dy = [self.dy.at(((output + m) * lines + line) * width) for m in range(outputs)]
            with k.loop(*channels) as channel, k.loop(0, spec.lines) as tap:
                image, inside = self._image(group * spec.channels + channel, line, tap)
                own = self._own(channel - channels[0], tap, tile)
                with k.when(inside):
                    values = [own.load(i * spec.lanes, spec.lanes) for i in range(tile)]
                    x = self.x.at(image * (columns.size * spec.rows))
                    for i, value in enumerate(self._columns(x, dy, places, values)):
                        own.store(value, i * spec.lanes)
        with k.loop(*channels) as channel, k.loop(0, spec.lines) as tap:
            own = self._own(channel - channels[0], tap, tile)
            for m in range(outputs):
                line = ((output + m) * spec.channels + channel) * spec.lines + tap
                target = self.dw.at(line * columns.kernel)
                for i, place in enumerate(places):
                    target.store(k.ops.sum(own.load((m * len(places) + i) * spec.lanes, spec.lanes)), place)

    def _own(self, channel: Val, tap: Val, tile: int) -> Pointer:
        """The address in scratch of the sums of one channel and one line (`tap`) of the window: `tile` vectors."""
        return self.sums.at((channel * self.spec.lines + tap) * (tile * self.spec.lanes))

    def _image(self, plane: Val, line: Val, tap: Val) -> tuple[Val, Val]:
        """The image line that a line of the results reads for a line of the window, and whether it is in the image.

        `plane` is the channel, `line` and `tap` are row-major numbers over all axes but the last.
        """
        k, outer = self.kernel, self.spec.windows[:-1]
        inside = k.constant(True, DType.BOOL)
        if not outer:
            return plane, inside
        results = k.unravel(line, [window.count for window in outer])
        taps = k.unravel(tap, [window.kernel for window in outer])
        for window, result, place in zip(outer, results, taps, strict=True):
            at = result * window.stride + place * window.dilation - window.before
            inside, plane = inside & (at >= 0) & (at < window.size), plane * window.size + at
        return plane, inside

    def _columns(self, x: Pointer, dy: Sequence[Pointer], places: range, sums: Sequence[Val]) -> list[Val]:
        """`sums` plus the products of all pixels of a line of results.

        The code is a loop where the whole window lies in the image, and unrolled elsewhere.
        """
        k, columns = self.kernel, self.spec.windows[-1]
        first, last = columns.inside
        values = list(sums)
        for column in (*range(first), *range(last, columns.count)):
            values = self._pixel(x, dy, column, places, self._inside(column, places), values)
        with k.fold(first, last, values) as fold:
            fold.values = self._pixel(x, dy, fold.index, places, places, fold.values)
        return fold.values

    def _inside(self, column: int, places: range) -> Sequence[int]:
        """The `places` of the window that lie in the image for a column of the results."""
        columns = self.spec.windows[-1]
        corner = column * columns.stride - columns.before
        return [p for p in places if 0 <= corner + p * columns.dilation < columns.size]

    def _pixel(
        self,
        x: Pointer,
        dy: Sequence[Pointer],
        column: Index,
        places: range,
        inside: Sequence[int],
        sums: Sequence[Val],
    ) -> list[Val]:
        """`sums` plus the products of all batch rows of the results' pixel `column`, for the window places `inside`.

        The other `places` lie outside the image; their sums stay unchanged.
        """
        k, spec = self.kernel, self.spec
        columns = spec.windows[-1]
        corner = x.at((k.index(column) * columns.stride - columns.before) * spec.rows)
        sources = [corner.at(place * columns.dilation * spec.rows) for place in inside]
        seeds = [each.at(k.index(column) * spec.rows) for each in dy]

        def step(at: Index, mask: Val | None, *values: Val) -> list[Val]:
            current = list(values)
            seen = [source.load(at, spec.lanes, mask) for source in sources]
            for m, seed in enumerate(seeds):
                value = seed.load(at, spec.lanes, mask)
                for place, image in zip(inside, seen, strict=True):
                    index = m * len(places) + place - places.start
                    current[index] = k.ops.fma(value, image, current[index])
            return current

        if spec.rows > _UNROLLED * spec.lanes:
            return k.strip(spec.rows, step, sums)
        values = list(sums)
        for at in range(0, spec.rows, spec.lanes):
            left = spec.rows - at
            values = step(at, k.lane_mask(left, spec.lanes) if left < spec.lanes else None, *values)
        return values
