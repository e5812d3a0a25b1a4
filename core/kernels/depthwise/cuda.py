"""Depthwise convolutions on a GPU: a program adds up the places of the window for a block of pixels and channels."""

from __future__ import annotations

import itertools

from lathe.core.kernels.cuda.algebra import Algebra
from lathe.core.kernels.cuda.image import CoveringWindows, Windows
from lathe.core.kernels.cuda.nest import Place, split
from lathe.core.kernels.cuda.product import finish, join_masks, program_tile, zero_sums
from lathe.core.kernels.cuda.source import Source, Writer, scaled, total
from lathe.core.kernels.depthwise.cuda_spec import DepthwiseSpec
from lathe.core.kernels.shared.cuda_product_tiles import ProductTile
from lathe.core.kernels.target import GpuTarget


def generate(spec: DepthwiseSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    w.operand("image", spec.image.dtype)
    w.operand("weights", spec.weight)
    pointers = [w.operand(f"x{i}", dtype) for i, dtype in enumerate(spec.results.extra_dtypes)]
    pointers.append(w.operand("y", spec.results.dtype))
    size = ProductTile(spec.height, spec.width, 1, spec.warps, 1)
    tile = program_tile(w, size, spec.rows, spec.channels)
    windows, e = (CoveringWindows if spec.transposed else Windows)(w, spec.image, tile.rows), Algebra(w)
    sums = zero_sums(w, size)
    for number, place in enumerate(itertools.product(*map(range, spec.image.kernel))):
        taps = windows.at(place)
        at = total([taps.offset, scaled(tile.columns, spec.image.channel_step)])
        mask = join_masks(tile.row_mask, taps.mask, tile.column_mask)
        x = e.load("image", at, spec.image.dtype, mask, "0.0")
        at = total([str(number * spec.weight_steps[0]), scaled(tile.columns, spec.weight_steps[1])])
        factors = e.load("weights", at, spec.weight, tile.column_mask)
        w.line(f"{sums} = tl.fma({x.name}, {factors.name}, {sums})")
    rows = split(w, tile.rows, spec.pixels.extents)
    here = Place((*rows, tile.columns), (*[tile.row_mask] * len(rows), tile.column_mask))
    steps = (*spec.results.extra_steps, spec.results.y_step)
    moves = [(*walk, step) for walk, step in zip(spec.pixels.strides, steps, strict=True)]
    finish(w, spec.results, here, moves, pointers, sums, tile)
    return w.source(spec.warps)
