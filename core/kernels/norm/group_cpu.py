"""GroupNormalization and InstanceNormalization of images in either layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks, for_each_vector, has_masks
from lathe.core.kernels.cpu.reduction import ParallelAccumulators, Part, parts_of
from lathe.core.kernels.cpu.register_shuffles import shuffle
from lathe.core.kernels.norm.layer_cpu import squares_of, sum_of
from lathe.core.kernels.norm.spec import GroupNormSpec
from lathe.core.kernels.target import Target

_F32 = DType.FLOAT32
_MOST_VECTORS = 4  # vectors of adjacent channels that are normalised together


@dataclass(frozen=True, slots=True)
class _Operands:
    x: Pointer
    scale: Pointer
    bias: Pointer
    y: Pointer


def generate(spec: GroupNormSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    operands = _Operands(*(k.operand(i, _F32) for i in range(4)))
    if not spec.last:
        _channels_first(k, spec, operands)
    elif spec.channels <= k.lanes and spec.channels & (spec.channels - 1) == 0:
        _vectors_last(k, spec, operands)
    else:
        _groups_last(k, spec, operands)
    return k


def _inverse_deviation(k: Kernel, spec: GroupNormSpec, squares: Val, count: Val) -> Val:
    return 1.0 / k.ops.sqrt(squares / count + k.constant(spec.epsilon, _F32))


def _channels_first(k: Kernel, spec: GroupNormSpec, o: _Operands) -> None:
    """Normalise channels-first images: a group is contiguous in memory."""
    pixels = k.dim(spec.pixels)
    length = pixels * spec.channels
    count = length.cast(_F32)
    with even_chunks(k, k.dim(spec.batch) * spec.groups, 1) as (start, stop), k.loop(start, stop) as item:
        x, y = o.x.at(item * length), o.y.at(item * length)
        mean = sum_of(k, x, length) / count
        deviation = _inverse_deviation(k, spec, squares_of(k, x, length, mean), count)
        first = item % spec.groups * spec.channels
        with k.loop(0, spec.channels) as c:
            factor, shift = o.scale.load(first + c) * deviation, o.bias.load(first + c)
            _affine(k, x.at(c * pixels), y.at(c * pixels), pixels, mean, factor, shift)


def _affine(k: Kernel, x: Pointer, y: Pointer, length: Val, mean: Val, factor: Val, shift: Val) -> None:
    def step(i: Val, lanes: int, mask: Val | None) -> None:
        y.store((x.load(i, lanes, mask) - mean) * factor + shift, i, mask)

    for_each_vector(k, length, step, k.lanes, has_masks(k.target, [4]), unroll=4)


def _groups_last(k: Kernel, spec: GroupNormSpec, o: _Operands) -> None:
    """Normalise channels-last images: a group is a few channels of each pixel."""
    pixels, width = k.dim(spec.pixels), spec.groups * spec.channels
    count = (pixels * spec.channels).cast(_F32)
    with even_chunks(k, k.dim(spec.batch) * spec.groups, 1) as (start, stop), k.loop(start, stop) as item:
        channel = item % spec.groups * spec.channels
        begin = item // spec.groups * pixels * width + channel
        x, y = o.x.at(begin), o.y.at(begin)
        mean = _sum_over_pixels(k, spec, lambda row: lambda i, lanes, mask: x.load(row + i, lanes, mask)) / count

        def squared(row: Val) -> Callable[[Val, int, Val | None], Val]:
            def value(i: Val, lanes: int, mask: Val | None) -> Val:
                centered = x.load(row + i, lanes, mask) - mean
                return centered * centered

            return value

        deviation = _inverse_deviation(k, spec, _sum_over_pixels(k, spec, squared), count)
        with k.loop(0, pixels) as pixel:
            _scale_pixel(k, spec, o, channel, x.at(pixel * width), y.at(pixel * width), mean, deviation)


def _sum_over_pixels(
    k: Kernel, spec: GroupNormSpec, value_at: Callable[[Val], Callable[[Val, int, Val | None], Val]]
) -> Val:
    """The sum over a group of `value_at(row)(i, lanes, mask)`: `row` is the offset of a pixel, `i` a channel of it."""
    chains = ParallelAccumulators(k, _F32, 0, k.ops.add, count=1 if spec.channels < 4 * k.lanes else 4)
    with k.fold(0, k.dim(spec.pixels), chains.start) as fold:
        value = value_at(fold.index * (spec.groups * spec.channels))

        def step(acc: Val, i: Val, lanes: int, mask: Val | None) -> Val:
            return acc + chains.masked(value(i, lanes, mask), mask)

        fold.values = chains.extend(fold.values, spec.channels, step)
    return chains.result(fold.values)


def _scale_pixel(
    k: Kernel, spec: GroupNormSpec, o: _Operands, channel: Val, x: Pointer, y: Pointer, mean: Val, deviation: Val
) -> None:
    scale, bias = o.scale.at(channel), o.bias.at(channel)

    def step(i: Val, lanes: int, mask: Val | None) -> None:
        centered = (x.load(i, lanes, mask) - mean) * deviation
        y.store(centered * scale.load(i, lanes, mask) + bias.load(i, lanes, mask), i, mask)

    for_each_vector(k, spec.channels, step, k.lanes, has_masks(k.target, [4]))


def _vectors_last(k: Kernel, spec: GroupNormSpec, o: _Operands) -> None:
    """Normalise channels-last images whose vectors hold whole groups, a few vectors of adjacent channels at a time."""
    channels = spec.groups * spec.channels
    width = k.lanes * min(_MOST_VECTORS, -(-channels // k.lanes))
    whole = channels // width
    with k.parallel(k.dim(spec.batch), -(-channels // width)) as (image, block):
        channel = block * width
        begin = image * k.dim(spec.pixels) * channels + channel
        here = _Operands(o.x.at(begin), o.scale.at(channel), o.bias.at(channel), o.y.at(begin))
        with k.when(block < whole):
            _columns(k, spec, here, parts_of(k, width))
        if channels % width:
            with k.when(block >= whole):
                _columns(k, spec, here, parts_of(k, channels % width))


def _columns(k: Kernel, spec: GroupNormSpec, o: _Operands, parts: Sequence[Part]) -> None:
    """Normalise the channels that the vectors `parts` hold at all pixels, in three passes: mean, variance, results."""
    count = (k.dim(spec.pixels) * spec.channels).cast(_F32)
    zero = [k.zeros(_F32, k.lanes)] * len(parts)
    sums = _fold_pixels(k, spec, o.x, parts, zero, lambda total, value, _: total + value)
    means = [_sum_over_group(k, total, spec.channels) / count for total in sums]

    def square(total: Val, value: Val, i: int) -> Val:
        centered = value - means[i]
        return k.ops.fma(centered, centered, total)

    squares = _fold_pixels(k, spec, o.x, parts, zero, square)
    factors = [
        o.scale.load(part.start, part.lanes, part.mask)
        * _inverse_deviation(k, spec, _sum_over_group(k, total, spec.channels), count)
        for part, total in zip(parts, squares, strict=True)
    ]
    shifts = [o.bias.load(part.start, part.lanes, part.mask) for part in parts]
    with k.loop(0, k.dim(spec.pixels)) as pixel:
        for part, mean, factor, shift in zip(parts, means, factors, shifts, strict=True):
            place = pixel * (spec.groups * spec.channels) + part.start
            value = o.x.load(place, part.lanes, part.mask)
            o.y.store(k.ops.fma(value - mean, factor, shift), place, part.mask)


def _sum_over_group(k: Kernel, total: Val, channels: int) -> Val:
    """`total` with each lane replaced by the sum over its group: `channels` adjacent lanes, a power of two."""
    distance = 1
    while distance < channels:
        total = total + shuffle(k, total, total, [lane ^ distance for lane in range(total.lanes)])
        distance *= 2
    return total


def _fold_pixels(
    k: Kernel,
    spec: GroupNormSpec,
    x: Pointer,
    parts: Sequence[Part],
    start: Sequence[Val],
    add: Callable[[Val, Val, int], Val],
) -> list[Val]:
    """Reduce the channels that the vectors `parts` hold over all pixels; returns one vector for each part.

    `add(total, value, i)` adds the vector of a pixel to the total of part i, which begins as `start[i]`.
    """
    with k.fold(0, k.dim(spec.pixels), start) as fold:
        place = fold.index * (spec.groups * spec.channels)
        values = [x.load(place + part.start, part.lanes, part.mask) for part in parts]
        fold.values = [add(t, v, i) for i, (t, v) in enumerate(zip(fold.values, values, strict=True))]
    return fold.values
