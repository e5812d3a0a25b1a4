"""Pooling on a GPU: a program reduces the places of the window for a block of pixels and channels."""

from __future__ import annotations

import itertools

from lathe.core.kernels.cuda.algebra import Algebra, Reg
from lathe.core.kernels.cuda.image import Taps, Windows
from lathe.core.kernels.cuda.lines import lowest, register_dtype
from lathe.core.kernels.cuda.nest import Place, split
from lathe.core.kernels.cuda.product import ProgramTile, join_masks, program_tile
from lathe.core.kernels.cuda.source import Source, Writer, scaled, total
from lathe.core.kernels.pool.cuda_spec import PoolSpec
from lathe.core.kernels.shared.cuda_product_tiles import ProductTile
from lathe.core.kernels.target import GpuTarget


def generate(spec: PoolSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    dtype = spec.image.dtype
    w.operand("x", dtype)
    w.operand("y", dtype)
    tile = program_tile(w, ProductTile(spec.rows, spec.columns, 1, spec.warps, 1), spec.image.pixels, spec.channels)
    windows = Windows(w, spec.image, tile.rows)
    result = _average(w, spec, windows, tile) if spec.average else _greatest(w, spec, windows, tile)
    batch, *places = split(w, tile.rows, (spec.image.batch, *spec.image.counts))
    here = Place((batch, *places, tile.columns), (None,) * (len(places) + 2))
    at = f"{here.offset(spec.to)} + {tile.rows} * 0 + {tile.columns} * 0"
    Algebra(w).store("y", at, Reg(result, dtype), join_masks(tile.row_mask, tile.column_mask))
    return w.source(spec.warps)


def _greatest(w: Writer, spec: PoolSpec, windows: Windows, tile: ProgramTile) -> str:
    """The variable of a block of maxima, one per window. Padding is ignored; NaN is the maximum, as in NumPy."""
    dtype = spec.image.dtype
    nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_float else ""
    outside = lowest(register_dtype(dtype)) if dtype.is_float else lowest(dtype)
    best = ""
    for place in itertools.product(*map(range, spec.image.kernel)):
        value = _load(w, spec, windows.at(place), tile, outside)
        best = w.let(f"tl.maximum({best}, {value}{nan})") if best else value
    return best


def _average(w: Writer, spec: PoolSpec, windows: Windows, tile: ProgramTile) -> str:
    """The variable of a block of means, one per window, over the places that `_inside` counts."""
    sums, count = "0.0", "0.0"
    taps: list[Taps] = []
    for place in itertools.product(*map(range, spec.image.kernel)):
        taps.append(windows.at(place))
        sums = w.let(f"{sums} + {_load(w, spec, taps[-1], tile, '0.0')}")
        count = w.let(f"{count} + {_inside(spec, taps[-1], windows, place)}")
    dtype = register_dtype(spec.image.dtype)
    return Algebra(w).div(Reg(sums, dtype), Reg(count, dtype)).name


def _inside(spec: PoolSpec, taps: Taps, windows: Windows, place: tuple[int, ...]) -> str:
    """The expression of a block that is 1.0 where a window's `place` counts in the divisor, otherwise 0.0.

    It counts inside the image, or with `include_pad` inside the padded image.
    """
    mask = windows.within_padding(place) if spec.include_pad else taps.mask
    return f"({mask}).to(tl.float32)" if mask else "1.0"


def _load(w: Writer, spec: PoolSpec, taps: Taps, tile: ProgramTile, other: str) -> str:
    at = total([taps.offset, scaled(tile.columns, spec.image.channel_step)])
    mask = join_masks(tile.row_mask, taps.mask, tile.column_mask)
    return Algebra(w).load("x", at, spec.image.dtype, mask, other).name
