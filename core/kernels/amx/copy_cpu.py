"""Copies of bands of images and rows in the layout for matrix tiles: see `lathe.core.kernels.amx.spec`."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer, register_type
from lathe.core.ir.types import DType
from lathe.core.kernels.amx.spec import LARGEST, TILE, AmxSpec

WORD = DType.INT32  # the type of a word, whatever elements it holds


def copy_rows(k: Kernel, spec: AmxSpec, source: Pointer, target: Pointer, first: Val, count: Val) -> None:
    """Copy `count` rows of the matrix at `source`, from row `first` on, to rows 0, 1, ... of the layout at `target`."""
    with k.loop(0, count) as row:
        _copy_pixel(k, spec, source.at((first + row) * k.dim(spec.row_step)), target.at(row * spec.step))


def copy_band(k: Kernel, spec: AmxSpec, source: Pointer, target: Pointer, number: Val, images: Val) -> tuple[Val, Val]:
    """Copy band `number` of the images at `source` to `target` in the layout `spec.flat`.

    `images` is the number of images in the batch. Returns the index of the band's first result (output pixel) in the
    whole batch, and its number of results.
    """
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
    """Copy the lines of an image that one band's results need, which begin at line `first`, plane by plane.

    Lines outside the image are filled with padding, and so is one more line at the end of each plane.
    """
    flat, y = spec.flat, spec.windows[0]
    for number, remainder in enumerate(flat.planes):
        plane = target.at(number * flat.plane_pixels * spec.depth)
        with k.loop(0, flat.image_lines) as i:
            line, at = plane.at(i * (flat.pitch * spec.step)), (first + i) * y.stride + (remainder[0] - y.before)
            inside = (at >= 0) & (at < y.size)
            with k.when(inside):
                _copy_line(k, spec, image.at(at * (spec.windows[1].size * _words(spec))), line, remainder[1])
            with k.when(~inside):
                _fill(k, spec, line, 0, flat.pitch)
        end = plane.at(flat.image_lines * flat.pitch * spec.step)
        _fill(k, spec, end, 0, flat.pitch)


def _copy_line(k: Kernel, spec: AmxSpec, source: Pointer, target: Pointer, remainder: int) -> None:
    """Copy the pixels of a line whose padded coordinate is `remainder` modulo the stride, with padding on both sides.

    They go to a whole line of a plane, `spec.flat.pitch` pixels from `target` on.
    """
    x, pitch = spec.windows[1], spec.flat.pitch
    begin = min(max(-((remainder - x.before) // x.stride), 0), pitch)
    end = max(min((x.size - 1 + x.before - remainder) // x.stride + 1, pitch), begin)
    _fill(k, spec, target, 0, begin)
    with k.loop(begin, end) as j:
        pixel = source.at((j * x.stride + (remainder - x.before)) * _words(spec))
        _copy_pixel(k, spec, pixel, target.at(j * spec.step))
    _fill(k, spec, target, end, pitch)


def _copy_pixel(k: Kernel, spec: AmxSpec, pixel: Pointer, place: Pointer) -> None:
    """Copy the words of a pixel; those of each step of the depth go to a plane of their own."""
    for step in range(spec.steps):
        if spec.parts == 1:
            mask = k.lane_mask(spec.step, TILE) if spec.step < TILE else None
            parts = [pixel.load(step * spec.step, TILE, mask)]
        else:
            pairs = k.lane_mask(2 * spec.step, 2 * TILE) if spec.step < TILE else None
            parts = _split(k, pixel.load(2 * step * spec.step, 2 * TILE, pairs), spec.parts)
        _store(k, spec, parts, place, step)


def _split(k: Kernel, values: Val, count: int) -> list[Val]:
    """`count` vectors of bfloat16 pairs, as words, whose sum approximates the float32 `values`."""
    parts = []
    for number in range(count):
        narrow = k.ops.cast(values if number else _clamped(k, values), DType.BFLOAT16)
        words = k.builder.convert("bitcast", narrow.ir, register_type(WORD, TILE))
        parts.append(Val(k, words, WORD, TILE))
        values = values - narrow.cast(DType.FLOAT32)
    return parts


def _clamped(k: Kernel, values: Val) -> Val:
    """`values` clamped to the range of finite bfloat16. NaN stays. In this order each select is one instruction."""
    most = float(LARGEST)
    below = k.ops.select(k.ops.lt(most, values), most, values)
    return k.ops.select(k.ops.lt(below, -most), -most, below)


def _store(k: Kernel, spec: AmxSpec, parts: list[Val], place: Pointer, step: int) -> None:
    mask = k.lane_mask(spec.step, TILE) if spec.step < TILE else None
    for number, words in enumerate(parts):
        place.store(words, step * spec.plane_pixels * spec.step + number * spec.part_words, mask)


def _words(spec: AmxSpec) -> int:
    """Elements per pixel of A in memory: `depth` words, or twice as many float32 if these are split into parts."""
    return spec.depth if spec.parts == 1 else 2 * spec.depth


def _fill(k: Kernel, spec: AmxSpec, line: Pointer, begin: int, end: int) -> None:
    """Fill the pixels `begin` to `end` of a line with the padding word."""
    word = k.constant(spec.fill, WORD, TILE)
    with k.loop(begin, end) as j:
        for step in range(spec.steps):
            _store(k, spec, [word] * spec.parts, line.at(j * spec.step), step)
