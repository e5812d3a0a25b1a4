"""Gradients of convolutions with respect to weights, on a GPU: matrix products with the pixels as depth."""

from __future__ import annotations

from lathe.core.kernels.conv.gradient_cuda_spec import ConvGradientSpec
from lathe.core.kernels.cuda.algebra import Algebra, Reg
from lathe.core.kernels.cuda.image import Windows, pixel_offset
from lathe.core.kernels.cuda.product import (
    ProgramTile,
    depth_range,
    edge_mask,
    join_masks,
    last_program_of_tile,
    load_factors,
    multiply,
    program_tile,
    split_pointers,
    zero_sums,
)
from lathe.core.kernels.cuda.source import Source, Writer, scaled, total
from lathe.core.kernels.target import GpuTarget


def generate(spec: ConvGradientSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    dtype = spec.image.dtype
    for name in ("x", "dy", "dw"):
        w.operand(name, dtype)
    split_pointers(w, spec.parts)
    tile = program_tile(w, spec.tile, spec.rows, spec.columns)
    channel, place = (w.let(f"{tile.columns} {sign} {spec.image.places}", "c") for sign in ("//", "%"))
    sums = zero_sums(w, spec.tile)
    with w.block(f"for k in range({depth_range(w, spec.image.pixels, spec.tile.depth, spec.parts)})"):
        _step(w, spec, tile, channel, place, sums)
    with last_program_of_tile(w, spec.tile, spec.programs, spec.parts, sums) as whole:
        at = f"({tile.batch} * {spec.rows} + {tile.rows}) * {spec.columns} + {tile.columns}"
        Algebra(w).store("dw", at, Reg(whole, dtype), join_masks(tile.row_mask, tile.column_mask))
    return w.source(spec.tile.warps, spec.tile.stages)


def _step(w: Writer, spec: ConvGradientSpec, tile: ProgramTile, channel: str, place: str, sums: str) -> None:
    """Write code that adds the products of `spec.tile.depth` consecutive pixels, from `k` on, to the block `sums`.

    `channel` and `place` are variables with the input channel and the window place of each column.
    """
    size, pixels = spec.tile.depth, spec.image.pixels
    across, down = (w.let(f"k + tl.arange(0, {size})[{ways}]", "pixel") for ways in ("None, :", ":, None"))
    left, right = (edge_mask(w, each, pixels, size) for each in (across, down))
    row = f"({tile.batch} * {spec.rows} + {tile.rows})"
    at = total([pixel_offset(w, spec.results, across), scaled(row, spec.results.channel_step)])
    results = load_factors(w, "dy", at, spec.image.dtype, spec.image.dtype, tile.row_mask, left)
    taps = Windows(w, spec.image, down).at(place)
    column = f"({tile.batch} * {spec.channels} + {channel})"
    at = total([taps.offset, scaled(column, spec.image.channel_step)])
    seen = load_factors(w, "x", at, spec.image.dtype, spec.image.dtype, right, taps.mask, tile.column_mask)
    multiply(w, sums, results, seen, spec.precision)
