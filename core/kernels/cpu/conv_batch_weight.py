"""Weight gradients of convolutions of batch-last images: sums over pixels and rows of the batch."""

from __future__ import annotations

from collections.abc import Sequence

from core.codegen.lang import Index, Kernel, Val
from core.codegen.registers import Pointer
from core.ir.types import DType
from core.kernels.catalog.conv_batch import BatchWeightSpec
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
        length = spec.windows[1].kernel
        parts = [range(at, min(at + spec.across, length)) for at in range(0, length, spec.across)]
        full, rest = divmod(spec.outputs, spec.together)
        tasks = (spec.groups, full + bool(rest), len(parts), spec.channels, spec.windows[0].kernel)
        with k.parallel(*tasks) as (group, block, part, channel, tap):
            for number, places in enumerate(parts):
                if full:
                    with k.when((block < full) & part.equals(number)):
                        self._line(group, block * spec.together, spec.together, places, channel, tap)
                if rest:
                    with k.when(block.equals(full) & part.equals(number)):
                        self._line(group, k.index(full * spec.together), rest, places, channel, tap)

    def _line(self, group: Val, first: Val, outputs: int, places: range, channel: Val, tap: Val) -> None:
        """Some places of one line of the window: `outputs` x `places` sums. `first` and `channel` are a group's own."""
        k, spec = self.kernel, self.spec
        lines, columns = spec.windows
        shift = tap * lines.dilation - lines.before
        begin = k.ops.max(k.index(lines.stride - 1) - shift, 0) // lines.stride
        end = k.ops.min(k.ops.max(k.index(lines.size + lines.stride - 1) - shift, 0) // lines.stride, lines.count)
        zeros = [k.zeros(F32, spec.lanes)] * (outputs * len(places))
        above, output = group * spec.channels + channel, group * spec.outputs + first
        with k.fold(begin, end, zeros) as fold:
            image = above * lines.size + (fold.index * lines.stride + shift)
            x = self.x.at(image * (columns.size * spec.rows))
            width = columns.count * spec.rows
            dy = [self.dy.at(((output + m) * lines.count + fold.index) * width) for m in range(outputs)]
            fold.values = self._columns(x, dy, places, fold.values)
        taps = lines.kernel * columns.kernel
        for m in range(outputs):
            target = self.dw.at(((output + m) * spec.channels + channel) * taps + tap * columns.kernel)
            for place in places:
                target.store(k.ops.sum(fold.values[m * len(places) + place - places.start]), place)

    def _columns(self, x: Pointer, dy: Sequence[Pointer], places: range, sums: Sequence[Val]) -> list[Val]:
        """All pixels of a line: those whose window lies in the image in a loop, the others one by one."""
        k, columns = self.kernel, self.spec.windows[1]
        first, last = columns.inside
        values = list(sums)
        for column in (*range(first), *range(last, columns.count)):
            values = self._pixel(x, dy, column, places, self._inside(column, places), values)
        with k.fold(first, last, values) as fold:
            fold.values = self._pixel(x, dy, fold.index, places, places, fold.values)
        return fold.values

    def _inside(self, column: int, places: range) -> Sequence[int]:
        """Those of some places of the window that meet the image."""
        columns = self.spec.windows[1]
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
        columns = spec.windows[1]
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
