"""MaxPool and AveragePool: vectors over channels; windows inside the image are unrolled, windows at its border loop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.cpu.nest import even_chunks, grain
from lathe.core.kernels.cpu.reduction import lowest, parts_of
from lathe.core.kernels.pool.spec import PoolSpec
from lathe.core.kernels.shared.nest import row_major
from lathe.core.kernels.shared.window import Window
from lathe.core.kernels.target import Target

_MOST_UNROLLED = 64  # taps of a window
_MOST_VECTORS = 4  # vectors of channels per pass over a window


@dataclass(frozen=True, slots=True)
class _Channels:
    """Adjacent channels that are computed together: one or more vectors, the last one possibly masked."""

    first: Val
    masks: tuple[Val | None, ...]
    lanes: int

    @property
    def places(self) -> list[tuple[Val, Val | None]]:
        return [(self.first + i * self.lanes, mask) for i, mask in enumerate(self.masks)]


def generate(spec: PoolSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, y = (k.operand(i, spec.dtype).converting(spec.computed) for i in range(2))
    counts = [window.count for window in spec.windows]
    strides = row_major([*(window.size for window in spec.windows), spec.pitches[0]])
    image = strides[0] * spec.windows[0].size
    line = k.dim(counts[-1] * spec.pitches[1])
    steps = k.index(grain(2 * spec.dtype.itemsize, spec.taps)) // k.ops.max(line, 1)
    lines = k.dim(spec.batch) * math.prod(counts[:-1])
    with even_chunks(k, lines, steps) as (start, stop), k.loop(start, stop) as item:
        batch, *outer = k.unravel(item, [k.dim(spec.batch), *counts[:-1]])
        _line(k, spec, x.at(batch * k.dim(image)), y.at(item * line), outer, strides)
    return k


def _line(k: Kernel, spec: PoolSpec, x: Pointer, y: Pointer, outer: Sequence[Val], strides: Sequence[Dim]) -> None:
    """Compute a line of results along the last spatial axis.

    If the window is inside along the outer axes, the windows in the middle of the line are completely inside.
    """
    first, last = spec.windows[-1].inside if spec.taps <= _MOST_UNROLLED else (0, 0)
    inside = k.constant(True, DType.BOOL)
    for place, window in zip(outer, spec.windows, strict=False):
        inside = inside & (place >= window.inside[0]) & (place < window.inside[1])
    begin, end = k.ops.select(inside, k.index(first), 0), k.ops.select(inside, k.index(last), 0)
    count = spec.windows[-1].count

    def result(place: Val, unrolled: bool) -> None:
        _result(k, spec, x, y.at(place * k.dim(spec.pitches[1])), [*outer, place], strides, unrolled)

    with k.loop(0, begin + (count - end)) as border:
        result(k.ops.select(border < begin, border, border - begin + end), unrolled=False)
    if first < last:
        with k.loop(begin, end) as place:
            result(place, unrolled=True)


def _result(
    k: Kernel, spec: PoolSpec, x: Pointer, y: Pointer, places: Sequence[Val], strides: Sequence[Dim], unrolled: bool
) -> None:
    """Compute all channels of the result's pixel at `places`, and store them at `y`.

    `unrolled` requires that its window lies completely in the image.
    """
    starts = [place * window.stride - window.before for place, window in zip(places, spec.windows, strict=True)]
    reduce = _reduce_unrolled if unrolled else _reduce_clipped
    count: Val | int = spec.taps if unrolled or not spec.average else _divisor(k, spec, starts)

    def block(channels: _Channels) -> None:
        values = reduce(k, spec, x, starts, strides, channels)
        for (channel, mask), value in zip(channels.places, values, strict=True):
            y.store(_average(k, value, count) if spec.average else value, channel, mask)

    _each_block(k, spec, block)


def _each_block(k: Kernel, spec: PoolSpec, emit: Callable[[_Channels], None]) -> None:
    """Generate calls of `emit` that cover all channels: `_MOST_VECTORS` vectors at a time, then the rest.

    A dynamic number of channels is covered by one masked vector at a time.
    """
    if spec.channels == 1:
        emit(_Channels(k.index(0), (None,), 1))
        return
    lanes = max(1, k.target.vector_bytes // spec.computed.itemsize)
    if not isinstance(spec.channels, int):
        with k.loop(0, k.dim(spec.channels), lanes) as first:
            emit(_Channels(first, (k.lane_mask(k.dim(spec.channels) - first, lanes),), lanes))
        return
    width = lanes * _MOST_VECTORS
    whole = spec.channels // width * width
    with k.loop(0, whole, width) as first:
        emit(_Channels(first, (None,) * _MOST_VECTORS, lanes))
    rest = parts_of(k, spec.channels - whole, lanes)
    if rest:
        emit(_Channels(k.index(whole), tuple(part.mask for part in rest), lanes))


def _start(k: Kernel, spec: PoolSpec, channels: _Channels) -> list[Val]:
    identity = 0 if spec.average else lowest(spec.computed)
    return [k.constant(identity, spec.computed, channels.lanes)] * len(channels.masks)


def _tap(k: Kernel, spec: PoolSpec, x: Pointer, channels: _Channels, values: Sequence[Val]) -> list[Val]:
    """The accumulators `values` (maxima or sums) after one more place of the window, whose channels start at `x`."""
    combine = k.ops.add if spec.average else k.ops.max
    loads = [x.load(channel, channels.lanes, mask) for channel, mask in channels.places]
    return [combine(value, load) for value, load in zip(values, loads, strict=True)]


def _reduce_unrolled(
    k: Kernel, spec: PoolSpec, x: Pointer, starts: Sequence[Val], strides: Sequence[Dim], channels: _Channels
) -> list[Val]:
    """The maxima or sums of a window that lies completely in the image, one vector for each of `channels`.

    `starts` are the window's first places, `strides` those of the image along its axes.
    """
    corner = sum((start * k.dim(stride) for start, stride in zip(starts, strides, strict=False)), start=k.index(0))
    values = _start(k, spec, channels)
    for tap in itertools.product(*(range(window.kernel) for window in spec.windows)):
        steps = [k.dim(stride * (t * w.dilation)) for t, w, stride in zip(tap, spec.windows, strides, strict=False)]
        values = _tap(k, spec, x.at(corner + sum(steps, start=k.index(0))), channels, values)
    return values


def _reduce_clipped(
    k: Kernel, spec: PoolSpec, x: Pointer, starts: Sequence[Val], strides: Sequence[Dim], channels: _Channels
) -> list[Val]:
    """As `_reduce_unrolled`, by loops over the part of a window that lies in the image."""

    def nested(axis: int, offset: Val, values: list[Val]) -> list[Val]:
        if axis == len(spec.windows):
            return _tap(k, spec, x.at(offset), channels, values)
        window, start = spec.windows[axis], starts[axis]
        low, high = _taps_inside(k, window, start)
        with k.fold(low, high, values) as fold:
            place = start + fold.index * window.dilation
            fold.values = nested(axis + 1, offset + place * k.dim(strides[axis]), fold.values)
        return fold.values

    return nested(0, k.index(0), _start(k, spec, channels))


def _taps_inside(k: Kernel, window: Window, start: Val) -> tuple[Val, Val]:
    """The range [low, high) of taps that lie in the image, for a window that begins at `start`."""
    low = (k.ops.max(0 - start, 0) + (window.dilation - 1)) // window.dilation
    return low, _taps_before(k, window, start, window.size)


def _taps_before(k: Kernel, window: Window, start: Val, limit: int) -> Val:
    """The number of taps that lie before place `limit` of an axis, for a window that begins at `start`."""
    return k.ops.min((k.ops.max(limit - start, 0) + (window.dilation - 1)) // window.dilation, window.kernel)


def _divisor(k: Kernel, spec: PoolSpec, starts: Sequence[Val]) -> Val:
    """The divisor of an average: the number of the window's places in the image.

    With `include_pad`, places in the padding count too.
    """
    count = k.index(1)
    for window, start in zip(spec.windows, starts, strict=True):
        if spec.include_pad:
            count = count * _taps_before(k, window, start, window.size + window.after)
        else:
            low, high = _taps_inside(k, window, start)
            count = count * (high - low)
    return count


def _average(k: Kernel, total: Val, count: Val | int) -> Val:
    return total / (count.cast(total.dtype) if isinstance(count, Val) else float(count))
