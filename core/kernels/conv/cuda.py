"""Convolutions on a GPU as implicit matrix products: rows of the left factor are windows, read from the image."""

from __future__ import annotations

from lathe.core.ir.types import DType
from lathe.core.kernels.conv.cuda_spec import ConvSpec
from lathe.core.kernels.cuda.image import CoveringWindows, Windows
from lathe.core.kernels.cuda.nest import Place, split
from lathe.core.kernels.cuda.product import (
    ProgramTile,
    edge_mask,
    finish,
    load_factors,
    multiply_weights,
    program_tile,
    zero_sums,
)
from lathe.core.kernels.cuda.source import Source, Writer, scaled, total
from lathe.core.kernels.shared.cuda_product import I8
from lathe.core.kernels.target import GpuTarget


def generate(spec: ConvSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    w.operand("image", spec.image.dtype)
    w.operand("weights", spec.weight)
    if spec.element is I8:
        w.operand("offsets", DType.INT32)
    pointers = [w.operand(f"x{i}", dtype) for i, dtype in enumerate(spec.results.extra_dtypes)]
    pointers.append(w.operand("y", spec.results.dtype))
    tile = program_tile(w, spec.tile, spec.rows, spec.columns)
    windows = (CoveringWindows if spec.transposed else Windows)(w, spec.image, tile.rows)
    sums = zero_sums(w, spec.tile, spec.element)
    with w.block(f"for k in range(0, {spec.depth}, {spec.tile.depth})"):
        _step(w, spec, windows, tile, sums)
    if spec.element is I8:
        place = total([scaled(tile.batch, spec.columns) if spec.groups > 1 else None, tile.columns])
        inside = f", {tile.column_mask}, other=0" if tile.column_mask else ""
        sums = w.let(f"{sums} + tl.load(offsets + {place}{inside})", "sums")
    _finish(w, spec, tile, pointers, sums)
    return w.source(spec.tile.warps, spec.tile.stages)


def _step(w: Writer, spec: ConvSpec, windows: CoveringWindows | Windows, tile: ProgramTile, sums: str) -> None:
    """Write code that adds the products of one step of the depth, from `k` on, to the block `sums`.

    A step covers `spec.tile.depth` channels at one place of the window, or as many pairs (place, channel).
    """
    size = spec.tile.depth
    blocks = [w.let(f"k + tl.arange(0, {size})[{ways}]", "k") for ways in ("None, :", ":, None")]
    inside = [edge_mask(w, block, spec.depth, size) for block in blocks]
    if spec.by_channels:
        place = w.let(f"k // {spec.channels}", "place")
        places = [place, place]
        channels = [w.let(f"{block} - {place} * {spec.channels}", "channel") for block in blocks]
    else:
        places = [w.let(f"{block} // {spec.channels}", "place") for block in blocks]
        channels = [w.let(f"{block} % {spec.channels}", "channel") for block in blocks]
    taps = windows.at(places[0])
    step = spec.image.channel_step
    at_image = [taps.offset, scaled(channels[0], step)]
    at_weights = [
        scaled(index, stride)
        for index, stride in zip((places[1], channels[1], tile.columns), spec.weight_steps[1:], strict=True)
    ]
    if spec.groups > 1:
        at_image.append(f"{tile.batch} * {spec.channels} * {step}")
        at_weights.append(scaled(tile.batch, spec.weight_steps[0]))
    masks = (tile.row_mask, taps.mask, inside[0])
    left = load_factors(w, "image", total(at_image), spec.image.dtype, spec.element, *masks, outside=spec.fill)

    def load(offset: str | None) -> str:
        at = total([*at_weights, offset])
        return load_factors(w, "weights", at, spec.weight, spec.element, inside[1], tile.column_mask)

    size = spec.groups * spec.columns * spec.depth
    multiply_weights(w, sums, left, load, size, spec.precision, spec.element)


def _finish(w: Writer, spec: ConvSpec, tile: ProgramTile, pointers: list[str], sums: str) -> None:
    rows = split(w, tile.rows, spec.pixels.extents)
    here = Place((*rows, tile.batch, tile.columns), (*[tile.row_mask] * len(rows), None, tile.column_mask))
    steps = (*spec.results.extra_steps, spec.results.y_step)
    moves = [(*walk, step * spec.columns, step) for walk, step in zip(spec.pixels.strides, steps, strict=True)]
    finish(w, spec.results, here, moves, pointers, sums, tile)
