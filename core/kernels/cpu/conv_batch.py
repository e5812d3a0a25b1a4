"""Convolutions of batch-last images: weights are broadcast to vectors of rows of the batch."""

from __future__ import annotations

from collections.abc import Sequence

from core.codegen.lang import Kernel, Val
from core.ir.types import DType
from core.kernels.catalog.conv_batch import BatchConvSpec
from core.kernels.catalog.pool import Window
from core.kernels.target import Target
from core.ops.fused import scalar_body

F32 = DType.FLOAT32


def generate(spec: BatchConvSpec, target: Target) -> Kernel:
    return _BatchConv(spec, target).kernel


class _BatchConv:
    """Writes the kernel of one spec."""

    def __init__(self, spec: BatchConvSpec, target: Target) -> None:
        self.spec = spec
        self.kernel = k = Kernel(spec, target)
        count = len(spec.extra_steps)
        self.x, self.w, *self.extras, self.y = (k.operand(i, F32) for i in range(3 + count))
        full, rest = divmod(spec.outputs, spec.together)
        with k.parallel(full + bool(rest), spec.windows[0].count) as (block, line):
            if full:
                with k.when(block < full):
                    self._line(block * spec.together, spec.together, line)
            if rest:
                with k.when(block.equals(full)):
                    self._line(k.index(full * spec.together), rest, line)

    def _line(self, first: Val, outputs: int, line: Val) -> None:
        """One line of the result, for some output channels."""
        k, spec = self.kernel, self.spec
        with k.loop(0, spec.windows[1].count) as column:
            places = [(line, *reached(k, spec.windows[0], line)), (column, *reached(k, spec.windows[1], column))]
            for start in range(0, spec.rows, spec.vectors * spec.lanes):
                self._tile(first, outputs, places, start)

    def _tile(self, first: Val, outputs: int, places: Sequence[tuple[Val, Val, Val]], start: int) -> None:
        """Rows from `start` on of one pixel. `places`: its line and column, and what part of the window meets the image
        along each axis."""
        k, spec = self.kernel, self.spec
        vectors, mask = _vectors(k, spec.rows - start, spec.vectors, spec.lanes)
        (line, top, bottom), (column, left, right) = places
        lines, columns = spec.windows
        zeros = [k.zeros(F32, spec.lanes)] * (outputs * vectors)
        weights = self.w.at(first * spec.steps[0] + spec.origin)
        with k.fold(0, spec.channels, zeros) as planes:
            with k.fold(top, bottom, planes.values) as taps:
                at = planes.index * lines.size + (line * lines.stride - lines.before + taps.index * lines.dilation)
                source = self.x.at((at * columns.size + (column * columns.stride - columns.before)) * spec.rows + start)
                own = weights.at(planes.index * spec.steps[1] + taps.index * spec.steps[2])
                with k.fold(left, right, taps.values) as across:
                    values = list(across.values)
                    place = source.at(across.index * (columns.dilation * spec.rows))
                    factor = own.at(across.index * spec.steps[3])
                    x = [
                        place.load(v * spec.lanes, spec.lanes, mask if v == vectors - 1 else None)
                        for v in range(vectors)
                    ]
                    for m in range(outputs):
                        weight = factor.load(m * spec.steps[0]).splat(spec.lanes)
                        for v in range(vectors):
                            values[m * vectors + v] = k.ops.fma(weight, x[v], values[m * vectors + v])
                    across.values = values
                taps.values = across.values
            planes.values = taps.values
        self._store(planes.values, first, outputs, (line * columns.count + column) * spec.rows + start, mask)

    def _store(self, sums: Sequence[Val], first: Val, outputs: int, pixel: Val, mask: Val | None) -> None:
        spec, vectors = self.spec, len(sums) // outputs
        plane = spec.windows[0].count * spec.windows[1].count * spec.rows
        for m in range(outputs):
            target = self.y.at((first + m) * plane + pixel)
            for v in range(vectors):
                value = self._finished(sums[m * vectors + v], first + m)
                target.store(value, v * spec.lanes, mask if v == vectors - 1 else None)

    def _finished(self, value: Val, output: Val) -> Val:
        k, spec = self.kernel, self.spec
        if spec.epilogue is None:
            return value
        pairs = zip(self.extras, spec.extra_steps, strict=True)
        extras = [extra.load(output * step).splat(spec.lanes) for extra, step in pairs]
        return k.ops.splat(scalar_body(k.ops, spec.epilogue, [value, *extras])[0], spec.lanes)


def reached(k: Kernel, window: Window, at: Val) -> tuple[Val, Val]:
    """The part [first, last) of a window that meets the image where it stands at result `at`."""
    if window.inside == (0, window.count):
        return k.index(0), k.index(window.kernel)
    corner = at * window.stride - window.before
    step = window.dilation
    first = k.ops.max(k.index(step - 1) - corner, 0) // step
    last = k.ops.max(k.index(window.size + step - 1) - corner, 0) // step
    return first, k.ops.min(last, window.kernel)


def _vectors(k: Kernel, rows: int, most: int, lanes: int) -> tuple[int, Val | None]:
    """How many vectors the next rows take, and the mask of the last of them."""
    count = min(-(-rows // lanes), most)
    left = rows - (count - 1) * lanes
    return count, k.lane_mask(left, lanes) if left < lanes else None
