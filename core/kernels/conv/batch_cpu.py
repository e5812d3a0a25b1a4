"""Convolutions of batch-last images: each weight is broadcast and multiplies vectors of batch rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.conv.batch_spec import BatchConvSpec
from lathe.core.kernels.shared.window import Window
from lathe.core.kernels.target import Target
from lathe.core.ops.nn.fused import scalar_body

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
        lines = [window.count for window in spec.windows[:-1]]
        with k.parallel(spec.groups, full + bool(rest), *lines) as (group, block, *line):
            if full:
                with k.when(block < full):
                    self._line(group, block * spec.together, spec.together, line)
            if rest:
                with k.when(block.equals(full)):
                    self._line(group, k.index(full * spec.together), rest, line)

    def _line(self, group: Val, first: Val, outputs: int, line: Sequence[Val]) -> None:
        """Compute one line of the result for `outputs` channels of a group, from channel `first` of the group on."""
        k, spec = self.kernel, self.spec
        x = self.x.at(group * (spec.channels * prod(window.size for window in spec.windows) * spec.rows))
        weights = spec.outputs * spec.channels * prod(window.kernel for window in spec.windows)
        w = self.w.at(group * weights + first * spec.steps[0] + spec.origin)
        with k.loop(0, spec.windows[-1].count) as column:
            place = [*line, column]
            reach = [taps(k, *axis) for axis in zip(spec.windows, spec.spreads, place, strict=True)]
            pixel = ravel(k, place, [window.count for window in spec.windows]) * spec.rows
            for start in range(0, spec.rows, spec.vectors * spec.lanes):
                self._tile(x.at(start), w, group * spec.outputs + first, outputs, reach, pixel + start, start)

    def _tile(
        self, x: Pointer, w: Pointer, first: Val, outputs: int, reach: Sequence[Taps], pixel: Val, start: int
    ) -> None:
        """Compute batch rows of one pixel, from row `start` on. `reach`: the taps inside the image, by axis."""
        k, spec = self.kernel, self.spec
        vectors, mask = _vectors(k, spec.rows - start, spec.vectors, spec.lanes)
        zeros = [k.zeros(F32, spec.lanes)] * (outputs * vectors)

        def along(axis: int, line: Val, w: Pointer, sums: Sequence[Val]) -> list[Val]:
            """`sums` plus all products over the window's axes from `axis` on.

            `line` is the row-major position in the image along the axes before; `w` points to the weights there.
            """
            if axis == len(reach):
                return self._products(x.at(line * spec.rows), w, sums, outputs, mask)
            taps = reach[axis]
            with k.fold(taps.first, taps.last, sums) as fold:
                inner = line * spec.windows[axis].size + (taps.source + fold.index * taps.step)
                fold.values = along(axis + 1, inner, w.at(taps.tap(fold.index) * spec.steps[axis + 2]), fold.values)
            return fold.values

        with k.fold(0, spec.channels, zeros) as planes:
            planes.values = along(0, planes.index, w.at(planes.index * spec.steps[1]), planes.values)
        self._store(planes.values, first, outputs, pixel, mask)

    def _products(self, x: Pointer, w: Pointer, sums: Sequence[Val], outputs: int, mask: Val | None) -> list[Val]:
        """`sums` plus the products at one place of the window: each output's weight times the vectors of rows there."""
        k, lanes, vectors = self.kernel, self.spec.lanes, len(sums) // outputs
        seen = [x.load(v * lanes, lanes, mask if v == vectors - 1 else None) for v in range(vectors)]
        weights = [w.load(m * self.spec.steps[0]).splat(lanes) for m in range(outputs)]
        pairs = [(weight, value) for weight in weights for value in seen]
        return [k.ops.fma(*pair, total) for pair, total in zip(pairs, sums, strict=True)]

    def _store(self, sums: Sequence[Val], first: Val, outputs: int, pixel: Val, mask: Val | None) -> None:
        spec, vectors = self.spec, len(sums) // outputs
        plane = prod(window.count for window in spec.windows) * spec.rows
        for m in range(outputs):
            target = self.y.at((first + m) * plane + pixel)
            for v in range(vectors):
                at, last = v * spec.lanes, mask if v == vectors - 1 else None
                target.store(self._apply_epilogue(sums[m * vectors + v], first + m, pixel + at, last), at, last)

    def _apply_epilogue(self, value: Val, output: Val, pixel: Val, mask: Val | None) -> Val:
        k, spec = self.kernel, self.spec
        if spec.epilogue is None:
            return value
        extras = []
        for extra, (step, moves) in zip(self.extras, spec.extra_steps, strict=True):
            own = extra.at(output * step)
            extras.append(own.load(pixel, spec.lanes, mask) if moves else own.load().splat(spec.lanes))
        return k.ops.splat(scalar_body(k.ops, spec.epilogue, [value, *extras])[0], spec.lanes)


@dataclass(frozen=True)
class Taps:
    """The taps of a window that lie in the image: `first` up to, but without, `last`.

    Tap t reads pixel `source + t*step`, and belongs to place `origin + t*spread` of the weights.
    """

    first: Val
    last: Val
    source: Val
    step: int
    origin: Val | int = 0
    spread: int = 1

    def tap(self, t: Val) -> Val:
        """The place of tap `t` in the weights."""
        return t if self.spread == 1 else t * self.spread + self.origin


def taps(k: Kernel, window: Window, spread: int, at: Val) -> Taps:
    """The taps of the window of result `at` that lie in an image whose pixels are `spread` apart."""
    step = window.dilation
    if spread == 1:
        return Taps(*window_range(k, window, at), at * window.stride - window.before, step)
    # Places k of the window with at - before + k * step = spread * pixel: every `spread`th place from `origin` on.
    ahead = spread * (abs(window.before) + window.count)  # makes the dividends positive
    origin = (window.before + ahead - at) % spread * pow(step, -1, spread) % spread
    source = (at + origin * step + (ahead - window.before)) // spread - ahead // spread
    first = k.ops.max(k.index(step - 1) - source, 0) // step
    last = k.ops.max(k.index(window.size + step - 1) - source, 0) // step
    own = (k.index(window.kernel + spread - 1) - origin) // spread
    return Taps(first, k.ops.min(last, own), source, step, origin, spread)


def ravel(k: Kernel, place: Sequence[Val], extents: Sequence[int]) -> Val:
    """The row-major position of the coordinates `place` among `extents`."""
    position = k.index(0)
    for at, extent in zip(place, extents, strict=True):
        position = position * extent + at
    return position


def window_range(k: Kernel, window: Window, at: Val) -> tuple[Val, Val]:
    """The range [first, last) of window places that lie in the image for result `at`."""
    if window.inside == (0, window.count):
        return k.index(0), k.index(window.kernel)
    corner = at * window.stride - window.before
    step = window.dilation
    first = k.ops.max(k.index(step - 1) - corner, 0) // step
    last = k.ops.max(k.index(window.size + step - 1) - corner, 0) // step
    return first, k.ops.min(last, window.kernel)


def _vectors(k: Kernel, rows: int, most: int, lanes: int) -> tuple[int, Val | None]:
    """The number of vectors, at most `most`, for the next of `rows` rows, and the mask of the last vector.

    The mask is None if that vector is full.
    """
    count = min(-(-rows // lanes), most)
    left = rows - (count - 1) * lanes
    return count, k.lane_mask(left, lanes) if left < lanes else None
