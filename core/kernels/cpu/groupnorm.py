"""GroupNormalization and InstanceNormalization of images in either layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.codegen.lang import Kernel, Pointer, Val
from core.ir.types import DType
from core.kernels.catalog.norm import GroupNormSpec
from core.kernels.cpu.lanes import Chains
from core.kernels.cpu.layernorm import squares_of, sum_of
from core.kernels.cpu.nest import cover, even_chunks, has_masks
from core.kernels.target import Target

_F32 = DType.FLOAT32


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
    elif spec.channels == 1:
        _instances_last(k, spec, operands)
    else:
        _groups_last(k, spec, operands)
    return k


def _inverse(k: Kernel, spec: GroupNormSpec, squares: Val, count: Val) -> Val:
    return 1.0 / k.ops.sqrt(squares / count + k.constant(spec.epsilon, _F32))


def _channels_first(k: Kernel, spec: GroupNormSpec, o: _Operands) -> None:
    """A group is one run of memory."""
    pixels = k.dim(spec.pixels)
    length = pixels * spec.channels
    count = length.cast(_F32)
    with even_chunks(k, k.dim(spec.batch) * spec.groups, 1) as (start, stop), k.loop(start, stop) as item:
        x, y = o.x.at(item * length), o.y.at(item * length)
        mean = sum_of(k, x, length) / count
        deviation = _inverse(k, spec, squares_of(k, x, length, mean), count)
        first = item % spec.groups * spec.channels
        with k.loop(0, spec.channels) as c:
            factor, shift = o.scale.load(first + c) * deviation, o.bias.load(first + c)
            _affine(k, x.at(c * pixels), y.at(c * pixels), pixels, mean, factor, shift)


def _affine(k: Kernel, x: Pointer, y: Pointer, length: Val, mean: Val, factor: Val, shift: Val) -> None:
    def step(i: Val, lanes: int, mask: Val | None) -> None:
        y.store((x.load(i, lanes, mask) - mean) * factor + shift, i, mask)

    cover(k, length, step, k.lanes, has_masks(k.target, [4]), unroll=4)


def _groups_last(k: Kernel, spec: GroupNormSpec, o: _Operands) -> None:
    """A group is a few channels of every pixel."""
    pixels, width = k.dim(spec.pixels), spec.groups * spec.channels
    count = (pixels * spec.channels).cast(_F32)
    with even_chunks(k, k.dim(spec.batch) * spec.groups, 1) as (start, stop), k.loop(start, stop) as item:
        channel = item % spec.groups * spec.channels
        begin = item // spec.groups * pixels * width + channel
        x, y = o.x.at(begin), o.y.at(begin)
        mean = _over_pixels(k, spec, lambda row: lambda i, lanes, mask: x.load(row + i, lanes, mask)) / count

        def squared(row: Val) -> Callable[[Val, int, Val | None], Val]:
            def value(i: Val, lanes: int, mask: Val | None) -> Val:
                centered = x.load(row + i, lanes, mask) - mean
                return centered * centered

            return value

        deviation = _inverse(k, spec, _over_pixels(k, spec, squared), count)
        with k.loop(0, pixels) as pixel:
            _scaled(k, spec, o, channel, x.at(pixel * width), y.at(pixel * width), mean, deviation)


def _over_pixels(
    k: Kernel, spec: GroupNormSpec, value_at: Callable[[Val], Callable[[Val, int, Val | None], Val]]
) -> Val:
    """The sum of `value_at(row)(i, lanes, mask)` over a group; `row` is where a pixel starts."""
    chains = Chains(k, _F32, 0, k.ops.add, count=1 if spec.channels < 4 * k.lanes else 4)
    with k.fold(0, k.dim(spec.pixels), chains.start) as fold:
        value = value_at(fold.index * (spec.groups * spec.channels))

        def step(acc: Val, i: Val, lanes: int, mask: Val | None) -> Val:
            return acc + chains.masked(value(i, lanes, mask), mask)

        fold.values = chains.extend(fold.values, spec.channels, step)
    return chains.result(fold.values)


def _scaled(
    k: Kernel, spec: GroupNormSpec, o: _Operands, channel: Val, x: Pointer, y: Pointer, mean: Val, deviation: Val
) -> None:
    scale, bias = o.scale.at(channel), o.bias.at(channel)

    def step(i: Val, lanes: int, mask: Val | None) -> None:
        centered = (x.load(i, lanes, mask) - mean) * deviation
        y.store(centered * scale.load(i, lanes, mask) + bias.load(i, lanes, mask), i, mask)

    cover(k, spec.channels, step, k.lanes, has_masks(k.target, [4]))


def _instances_last(k: Kernel, spec: GroupNormSpec, o: _Operands) -> None:
    """Every channel for itself: neighbouring channels side by side in a vector."""
    pixels = k.dim(spec.pixels)
    blocks = -(-spec.groups // k.lanes)
    count = pixels.cast(_F32)
    with k.parallel(k.dim(spec.batch), blocks) as (image, block):
        channel = block * k.lanes
        begin = image * pixels * spec.groups + channel
        mask = None if spec.groups % k.lanes == 0 else k.lane_mask(k.index(spec.groups) - channel, k.lanes)
        x, y = o.x.at(begin), o.y.at(begin)
        mean = _down(k, spec, x, mask, lambda acc, v: acc + v) / count
        squares = _down(k, spec, x, mask, lambda acc, v: acc + (v - mean) * (v - mean))
        factor = o.scale.load(channel, k.lanes, mask) * _inverse(k, spec, squares, count)
        shift = o.bias.load(channel, k.lanes, mask)
        with k.loop(0, pixels) as pixel:
            value = x.load(pixel * spec.groups, k.lanes, mask)
            y.store((value - mean) * factor + shift, pixel * spec.groups, mask)


def _down(k: Kernel, spec: GroupNormSpec, x: Pointer, mask: Val | None, add: Callable[[Val, Val], Val]) -> Val:
    """Fold a column of vectors."""
    with k.fold(0, k.dim(spec.pixels), [k.zeros(_F32, k.lanes)]) as fold:
        fold.values = [add(fold.values[0], x.load(fold.index * spec.groups, k.lanes, mask))]
    return fold.values[0]
