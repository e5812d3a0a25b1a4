"""MaxPool with indices, in vectors of adjacent results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as places

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks, grain
from lathe.core.kernels.cpu.register_shuffles import shuffle
from lathe.core.kernels.pool.indices_spec import PoolIndicesSpec
from lathe.core.kernels.target import Target

I32, I64 = DType.INT32, DType.INT64


def generate(spec: PoolIndicesSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, y, indices = k.operand(0, spec.dtype), k.operand(1, spec.dtype), k.operand(2, I64)
    *outer, last = spec.windows
    counts, size = [k.dim(window.count) for window in outer], k.dim(product(window.size for window in spec.windows))
    lines, width = k.dim(spec.planes * product(window.count for window in outer)), k.dim(last.count)
    steps = k.index(grain(spec.dtype.itemsize, 4 * spec.taps)) // k.ops.max(width, 1)
    with even_chunks(k, lines, steps) as (start, stop), k.loop(start, stop) as line:
        plane, *results = k.unravel(line, [k.dim(spec.planes), *counts])
        image, first = x.at(plane * size), line * width

        def step(at: Val, mask: Val | None) -> None:
            value, place = _greatest(k, spec, image, results, at)
            y.store(value, first + at, mask)
            indices.store(place.cast(I64) + plane * size, first + at, mask)

        k.strip(width, step, lanes=_lanes(spec, target))
    return k


def _greatest(k: Kernel, spec: PoolIndicesSpec, image: Pointer, results: Sequence[Val], at: Val) -> tuple[Val, Val]:
    """The maxima of the windows of adjacent results from `at` on, and their row-major indices in the image (int32).

    `results` are the coordinates of the line of results along all axes but the last.
    """
    *outer, last = spec.windows
    columns = [
        _Columns.of(k, spec, at * last.stride + (tap * last.dilation - last.before)) for tap in range(last.kernel)
    ]
    best, where = k.zeros(spec.dtype, columns[0].lanes), k.constant(-1, I32, columns[0].lanes)
    for taps in places(*(range(window.kernel) for window in outer)):
        line, inside = k.index(0), k.constant(True, DType.BOOL)
        for window, result, tap in zip(outer, results, taps, strict=True):
            place = result * window.stride + (tap * window.dilation - window.before)
            inside = inside & (place >= 0) & (place < k.dim(window.size))
            line = line * k.dim(window.size) + place
        line = line * k.dim(last.size)
        for column in columns:
            value = column.load(image.at(line), inside)
            better = (value > best) | (where < 0)
            better = better & column.there & inside
            best = k.ops.select(better, value, best)
            where = k.ops.select(better, column.numbers + line.cast(I32), where)
    return best, where


@dataclass(frozen=True)
class _Columns:
    """The columns of a line that adjacent results read for one tap: from `first` on, `step` apart."""

    first: Val
    step: int
    parts: tuple[Val, ...]  # for each loaded vector, a mask of the columns inside the image
    there: Val  # a mask of the columns of `numbers` inside the image
    numbers: Val  # of the columns

    @classmethod
    def of(cls, k: Kernel, spec: PoolIndicesSpec, first: Val) -> _Columns:
        window, lanes = spec.windows[-1], _lanes(spec, k.target)
        first = k.hidden(first)  # with constant masks, LLVM 22 loads lanes that are not used afterwards
        size, steps = k.dim(window.size), k.lane_numbers(lanes)

        def there(columns: Val) -> Val:
            return (columns >= 0) & (columns < size)

        columns = steps * window.stride + first
        halves = tuple(there(steps + (first + half * lanes)) for half in range(2)) if window.stride == 2 else ()
        return cls(first, window.stride, halves or (there(columns),), there(columns), columns.cast(I32))

    @property
    def lanes(self) -> int:
        return self.there.lanes

    def load(self, line: Pointer, inside: Val) -> Val:
        """The elements in these columns of a line; nothing is read unless the line is `inside` the image."""
        k, lanes = line.kernel, self.lanes
        if self.step > 2:
            return line.gather(k.lane_numbers(lanes) * self.step + self.first, self.there & inside)
        parts = [line.load(self.first + i * lanes, lanes, part & inside) for i, part in enumerate(self.parts)]
        return parts[0] if self.step == 1 else shuffle(k, parts[0], parts[1], range(0, 2 * lanes, 2))


def _lanes(spec: PoolIndicesSpec, target: Target) -> int:
    """The number of results per vector: a vector of elements and a vector of int32 indices must both hold them."""
    return max(target.vector_bytes // max(spec.dtype.itemsize, I32.itemsize), 1)
