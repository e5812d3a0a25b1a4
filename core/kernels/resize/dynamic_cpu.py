"""Resize with coordinates that are computed at run time; vectors over the channels of one result."""

from __future__ import annotations

import itertools
from typing import TypeAlias

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks
from lathe.core.kernels.resize.dynamic_spec import DynamicAxis, DynamicResizeSpec
from lathe.core.kernels.target import Target

F32, I64 = DType.FLOAT32, DType.INT64
Taps: TypeAlias = list[tuple[Val, Val | None]]  # places along an axis and their weights; None: a weight of 1

_LINES = 1 << 12  # elements of the lines of a task
_ROUNDED = 1 + 1e-5  # beyond this ratio, the length of an axis was rounded down


def generate(spec: DynamicResizeSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, y = k.operand(0, F32), k.operand(1, F32)
    depth, height, width = spec.axes
    planes, rows, columns = k.dim(depth.count), k.dim(height.count), k.dim(width.count)
    line = columns * spec.channels
    lanes = min(target.lanes, 1 << (spec.channels - 1).bit_length())
    steps = k.index(_LINES) // k.ops.max(line, 1)
    with even_chunks(k, k.dim(spec.batch) * planes * rows, steps) as (start, stop), k.loop(start, stop) as item:
        of_plane, row = item // rows, item % rows
        image, plane = of_plane // planes, of_plane % planes
        line_of_x = k.dim(width.size) * spec.channels
        lines = [
            (x.at(((image * k.dim(depth.size) + deep) * k.dim(height.size) + high) * line_of_x), _times(one, other))
            for (deep, one), (high, other) in itertools.product(
                _taps(k, spec, depth, plane), _taps(k, spec, height, row)
            )
        ]
        with k.loop(0, columns) as column:
            across = _taps(k, spec, width, column)
            corners = [
                (source.at(place * spec.channels), _times(weight, other))
                for (source, weight), (place, other) in itertools.product(lines, across)
            ]
            target_place = y.at(item * line + column * spec.channels)

            def channels(at: Val, mask: Val | None) -> None:
                total: Val | None = None
                for source, weight in corners:
                    part = source.load(at, lanes, mask)
                    if weight is not None:
                        part = part * weight.splat(lanes)
                    total = part if total is None else total + part
                if total is not None:
                    target_place.store(total, at, mask)

            k.strip(spec.channels, channels, lanes=lanes)
    return k


def _times(weight: Val | None, other: Val | None) -> Val | None:
    """The product of two weights; None stands for 1."""
    return weight * other if weight is not None and other is not None else (weight if other is None else other)


def _taps(k: Kernel, spec: DynamicResizeSpec, axis: DynamicAxis, result: Val) -> Taps:
    """The places along an axis from which result number `result` is interpolated, each with its weight.

    Two places, or one with the weight None (1) if the spec rounds to the nearest or the axis keeps its size. Places
    outside are clamped.
    """
    if axis.is_identity:
        return [(result, None)]
    at = _coordinate(k, spec.coordinates, axis, result.cast(F32))
    most = k.ops.max(k.dim(axis.size) - 1, 0)

    def place(where: Val) -> Val:
        return k.ops.min(k.ops.max(where.cast(I64), 0), most)

    if spec.rounding:
        return [(place(_round_place(k, spec.rounding, at)), None)]
    low = k.ops.floor(at)
    ratio = at - low
    return [(place(low), 1.0 - ratio), (place(low + 1.0), ratio)]


def _round_place(k: Kernel, rounding: str, at: Val) -> Val:
    match rounding:
        case "round_prefer_floor":
            return k.ops.ceil(at - 0.5)
        case "round_prefer_ceil":
            return k.ops.floor(at + 0.5)
        case "ceil":
            return k.ops.ceil(at)
    return k.ops.floor(at)


def _coordinate(k: Kernel, mode: str, axis: DynamicAxis, result: Val) -> Val:
    """The coordinate along `axis` of the image, as float32, that belongs to result number `result`.

    `mode` is ONNX's `coordinate_transformation_mode`, see `lathe.core.ops.image.resize`.
    """
    size, count = (k.dim(each).cast(F32) for each in (axis.size, axis.count))
    scale = k.constant(axis.scale, F32) if axis.scale is not None else count / size
    zero, several = k.constant(0.0, F32), k.dim(axis.count) > 1
    if mode == "asymmetric":
        return result / scale
    if mode == "align_corners":
        exact = scale * size
        length = k.ops.select(exact > count * _ROUNDED, exact, count)
        return k.ops.select(several, result * (size - 1.0) / (length - 1.0), zero)
    half = (result + 0.5) / scale - 0.5
    return half if mode == "half_pixel" else k.ops.select(several, half, zero)
