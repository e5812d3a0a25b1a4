"""GridSample in vectors of adjacent results: places and weights are computed once for all channels."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks
from lathe.core.kernels.sampling.grid_sample_spec import GridSampleSpec
from lathe.core.kernels.target import Target

F32, I32, I64 = DType.FLOAT32, DType.INT32, DType.INT64

_CUBIC_A = -0.75
_WORK = 1 << 12  # multiplications per task
_FAR = {I32: float(1 << 30), I64: float(1 << 40)}  # a place beyond every image that the integer type can hold


@dataclass(frozen=True, slots=True)
class Tap:
    """One neighbour of each sample of a vector: its index along an axis or its pixel in a channel, and its weight.

    Nothing is read where it is not `inside`.
    """

    place: Val
    inside: Val
    weight: Val | None  # None: 1


def generate(spec: GridSampleSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, grid, y = (k.operand(i, F32) for i in range(3))
    lanes, axes = k.lanes, len(spec.sizes)
    samples, channels, pixels = k.dim(spec.samples), k.dim(spec.channels), k.dim(product(spec.sizes))
    vectors = (samples + (lanes - 1)) // lanes
    work = channels * (lanes * spec.taps**axes)
    with (
        even_chunks(k, k.dim(spec.batch) * vectors, k.index(_WORK) // k.ops.max(work, 1)) as (start, stop),
        k.loop(start, stop) as item,
    ):
        image, first = item // vectors, item % vectors * lanes
        mask = k.lane_mask(samples - first, lanes)
        numbers = grid.at((image * samples + first) * axes)
        taps = [
            _taps(k, spec, axis, numbers.gather(k.lane_numbers(lanes) * axes + (axes - 1 - axis), mask))
            for axis in range(axes)
        ]
        around = [_pixel(k, spec, corner, mask) for corner in itertools.product(*taps)]
        source, result = x.at(image * channels * pixels), y.at(image * channels * samples + first)
        with k.loop(0, channels) as channel:
            result.store(_sum(k, source.at(channel * pixels), around), channel * samples, mask)
    return k


def _sum(k: Kernel, source: Pointer, around: list[Tap]) -> Val:
    total: Val | None = None
    for tap in around:
        value = source.gather(tap.place.cast(I64), tap.inside)
        if tap.weight is None:
            total = value
        else:
            total = value * tap.weight if total is None else k.ops.fma(value, tap.weight, total)
    assert total is not None
    return total


def _pixel(k: Kernel, spec: GridSampleSpec, taps: tuple[Tap, ...], mask: Val) -> Tap:
    """One pixel around each sample, given one neighbour along each axis; its place is row-major in the channel.

    The weight of the pixel is the product of the neighbours' weights. `mask` is true for the samples that exist.
    """
    dtype = _place_type(spec)
    place, inside, weight = k.zeros(dtype, k.lanes), mask, None
    for tap, size in zip(taps, spec.sizes, strict=True):
        place, inside = place * k.dim(size).cast(dtype) + tap.place, inside & tap.inside
        weight = tap.weight if weight is None or tap.weight is None else weight * tap.weight
    return Tap(place, inside, weight)


def _place_type(spec: GridSampleSpec) -> DType:
    """The type of places in a channel: int32 if it suffices, since such gathers have twice as many lanes."""
    pixels = product(spec.sizes)
    return I32 if isinstance(pixels, int) and pixels < _FAR[I32] else I64


def _taps(k: Kernel, spec: GridSampleSpec, axis: int, number: Val) -> list[Tap]:
    """The neighbours along an axis of samples with the coordinates `number`, where -1 to 1 covers the image.

    One for the mode "nearest", two for "linear", four for "cubic"; see `lathe.core.ops.image.sampling`.
    """
    count = k.dim(spec.sizes[axis])
    size = count.cast(F32)
    at = (number + 1.0) / 2.0 * (size - 1.0) if spec.aligned else ((number + 1.0) * size - 1.0) / 2.0
    if spec.mode == "nearest":
        return [_tap(k, spec, _apply_padding(k, spec, size, k.ops.rint(at)), count, None)]
    if spec.mode == "linear":
        at = _apply_padding(k, spec, size, at)
    low = k.ops.floor(at)
    ratio = at - low
    if spec.mode == "linear":
        weights, before = [1.0 - ratio, ratio], 0
    else:
        weights, before = (
            [
                _cubic_weight(k, ratio + 1.0),
                _cubic_weight(k, ratio),
                _cubic_weight(k, 1.0 - ratio),
                _cubic_weight(k, 2.0 - ratio),
            ],
            1,
        )
    places = [low + float(shift - before) for shift in range(len(weights))]
    return [
        _tap(k, spec, _apply_padding(k, spec, size, place), count, weight)
        for place, weight in zip(places, weights, strict=True)
    ]


def _cubic_weight(k: Kernel, distance: Val) -> Val:
    """The cubic weight of a neighbour at `distance`, from 0 to 2 pixels, from the sample.

    Source: R. Keys, Cubic convolution interpolation for digital image processing, 1981.
    """
    d, a = distance, _CUBIC_A
    near = ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0
    far = ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a
    return k.ops.select(d <= 1.0, near, far)


def _tap(k: Kernel, spec: GridSampleSpec, at: Val, count: Val, weight: Val | None) -> Tap:
    """The tap at position `at` (rounded) along an axis of `count` places.

    With zero padding, places outside and NaN are not read. With other paddings the position has been moved into the
    image, NaN reads place 0 (with a weight of NaN, or without a weight if that is None), and nothing is read from an
    empty image.
    """
    at = k.ops.rint(at)
    ahead = k.ops.select(at >= 0.0, at, k.zeros(F32, k.lanes))
    dtype = _place_type(spec)
    count, place = count.cast(dtype), k.ops.min(ahead, _FAR[dtype]).cast(dtype)
    if spec.padding == "zeros":
        return Tap(place, (at >= 0.0) & (place < count), weight)
    place = k.ops.min(place, count - 1)
    return Tap(place, place >= 0, weight)


def _apply_padding(k: Kernel, spec: GridSampleSpec, size: Val, at: Val) -> Val:
    """Positions moved into the image by border or reflection padding; unchanged for zero padding."""
    if spec.padding == "zeros":
        return at
    if spec.padding == "border":
        return k.ops.min(k.ops.max(at, 0.0), size - 1.0)
    low, high = (k.constant(0.0, F32), size - 1.0) if spec.aligned else (k.constant(-0.5, F32), size - 0.5)
    room = high - low
    period = k.ops.max(room * 2.0, 1.0)
    turns = k.ops.floor((at - low) / period)
    phase = at - low - turns * period
    inside = (at >= low) & (at <= high)
    reflected = k.ops.select(room > 0.0, low + k.ops.min(phase, period - phase), low)
    return k.ops.select(inside, at, reflected)
