"""Weight gradients of convolutions of batch-last images: sums over pixels and rows of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from core.codegen.lang import Index, Kernel, Val
from core.codegen.registers import Pointer
from core.ir.types import DType
from core.kernels.catalog.conv_batch import BatchWeightSpec
from core.kernels.catalog.pool import Window
from core.kernels.cpu.conv_batch import ravel
from core.kernels.target import Target

F32 = DType.FLOAT32
_UNROLLED = 4  # vectors of rows at most


def generate(spec: BatchWeightSpec, target: Target) -> Kernel:
    return _BatchWeight(spec, target).kernel


class _BatchWeight:
    """Writes the kernel of one spec."""

    def __init__(self, spec: BatchWeightSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        self.x, self.dy, self.dw = (k.operand(i, F32) for i in range(3))
        length = spec.windows[-1].kernel
        parts = [range(at, min(at + spec.across, length)) for at in range(0, length, spec.across)]
        full, rest = divmod(spec.outputs, spec.together)
        lines = [window.kernel for window in spec.windows[:-1]]
        with k.parallel(spec.groups, full + bool(rest), len(parts), spec.channels, *lines) as task:
            group, block, part, channel, *line = task
            for number, places in enumerate(parts):
                if full:
                    with k.when((block < full) & part.equals(number)):
                        self._line(group, block * spec.together, spec.together, places, channel, line)
                if rest:
                    with k.when(block.equals(full) & part.equals(number)):
                        self._line(group, k.index(full * spec.together), rest, places, channel, line)

    def _line(self, group: Val, first: Val, outputs: int, places: range, channel: Val, line: Sequence[Val]) -> None:
        """Some places of one line of the window: `outputs` x `places` sums. `first` and `channel` are a group's own."""
        k, spec = self.kernel, self.spec
        *outer, columns = spec.windows
        output = group * spec.outputs + first
        count = prod(window.count for window in outer)

        def along(axis: int, image: Val, result: Val, sums: Sequence[Val]) -> list[Val]:
            """The sums with what the results from this axis on give: `image` and `result` count lines."""
            if axis == len(outer):
                x = self.x.at(image * (columns.size * spec.rows))
                width = columns.count * spec.rows
                dy = [self.dy.at(((output + m) * count + result) * width) for m in range(outputs)]
                return self._columns(x, dy, places, sums)
            window = outer[axis]
            shift = line[axis] * window.dilation - window.before
            with k.fold(*met(k, window, shift), sums) as fold:
                pixel = image * window.size + (fold.index * window.stride + shift)
                fold.values = along(axis + 1, pixel, result * window.count + fold.index, fold.values)
            return fold.values

        zeros = [k.zeros(F32, spec.lanes)] * (outputs * len(places))
        values = along(0, group * spec.channels + channel, k.index(0), zeros)
        lines = [window.kernel for window in outer]
        for m in range(outputs):
            own = ravel(k, [(output + m) * spec.channels + channel, *line], [0, *lines])
            target = self.dw.at(own * columns.kernel)
            for place in places:
                target.store(k.ops.sum(values[m * len(places) + place - places.start]), place)

    def _columns(self, x: Pointer, dy: Sequence[Pointer], places: range, sums: Sequence[Val]) -> list[Val]:
        """All pixels of a line: those whose window lies in the image in a loop, the others one by one."""
        k, columns = self.kernel, self.spec.windows[-1]
        first, last = columns.inside
        values = list(sums)
        for column in (*range(first), *range(last, columns.count)):
            values = self._pixel(x, dy, column, places, self._inside(column, places), values)
        with k.fold(first, last, values) as fold:
            fold.values = self._pixel(x, dy, fold.index, places, places, fold.values)
        return fold.values

    def _inside(self, column: int, places: range) -> Sequence[int]:
        """Those of some places of the window that meet the image."""
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
        """All rows of one pixel, for those of the places that are `inside` the image."""
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


def met(k: Kernel, window: Window, shift: Val) -> tuple[Val, Val]:
    """The results [first, last) of which a place of the window, `shift` pixels from their corners, meets the image."""
    ahead = window.stride - 1
    first = k.ops.max(k.index(ahead) - shift, 0) // window.stride
    last = k.ops.max(k.index(window.size + ahead) - shift, 0) // window.stride
    return first, k.ops.min(last, window.count)
