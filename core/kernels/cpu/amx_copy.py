"""Bands of images copied for matrix tiles: see `core.kernels.catalog.amx.Flat`."""

from __future__ import annotations

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.types import DType
from core.kernels.catalog.amx import TILE, AmxSpec

WORD = DType.INT32  # whatever it holds


def copy_band(k: Kernel, spec: AmxSpec, source: Pointer, target: Pointer, number: Val, images: Val) -> tuple[Val, Val]:
    """Copy band `number`; gives its first result in the whole batch, and how many it has."""
    flat, height = spec.flat, spec.windows[0].count
    results = spec.windows[1].count
    if flat.parts > 1:
        image, line = number // flat.parts, number % flat.parts * flat.lines
        _copy_image(k, spec, source.at(image * k.dim(spec.row_step)), target, line)
        return (image * height + line) * results, k.ops.min(k.index(height) - line, flat.lines) * results
    first = number * flat.images
    count = k.ops.min(images - first, flat.images)
    with k.loop(0, count) as image:
        pixels = target.at(image * (flat.image_pitch * spec.step))
        _copy_image(k, spec, source.at((first + image) * k.dim(spec.row_step)), pixels, k.index(0))
    return first * (height * results), count * (height * results)


def _copy_image(k: Kernel, spec: AmxSpec, image: Pointer, target: Pointer, first: Val) -> None:
    """What the lines of results from `first` on meet of an image, plane by plane."""
    flat, y = spec.flat, spec.windows[0]
    for number, remainder in enumerate(flat.planes):
        plane = target.at(number * flat.plane_pixels * spec.depth)
        with k.loop(0, flat.image_lines) as i:
            line, at = plane.at(i * (flat.pitch * spec.step)), (first + i) * y.stride + (remainder[0] - y.before)
            inside = (at >= 0) & (at < y.size)
            with k.when(inside):
                _copy_line(k, spec, image.at(at * (spec.windows[1].size * spec.depth)), line, remainder[1])
            with k.when(~inside):
                _fill(k, spec, line, 0, flat.pitch)
        end = plane.at(flat.image_lines * flat.pitch * spec.step)
        _fill(k, spec, end, 0, flat.pitch)


def _copy_line(k: Kernel, spec: AmxSpec, source: Pointer, target: Pointer, remainder: int) -> None:
    """Every stride-th pixel of a line, with what is outside on either side."""
    x, pitch = spec.windows[1], spec.flat.pitch
    begin = min(max(-((remainder - x.before) // x.stride), 0), pitch)
    end = max(min((x.size - 1 + x.before - remainder) // x.stride + 1, pitch), begin)
    _fill(k, spec, target, 0, begin)
    with k.loop(begin, end) as j:
        pixel, place = source.at((j * x.stride + (remainder - x.before)) * spec.depth), target.at(j * spec.step)
        mask = k.lane_mask(spec.step, TILE) if spec.step < TILE else None
        for step in range(spec.steps):
            value = pixel.load(step * spec.step, TILE, mask)
            place.store(value, step * spec.flat.plane_pixels * spec.step, mask)
    _fill(k, spec, target, end, pitch)


def _fill(k: Kernel, spec: AmxSpec, line: Pointer, begin: int, end: int) -> None:
    """Pixels of what lies outside the image."""
    word = k.constant(spec.fill, WORD, TILE)
    mask = k.lane_mask(spec.step, TILE) if spec.step < TILE else None
    with k.loop(begin, end) as j:
        for step in range(spec.steps):
            line.store(word, j * spec.step + step * spec.flat.plane_pixels * spec.step, mask)
