"""The gradient of MaxPool on a GPU: for each window over a place, the first maximum is searched again."""

from __future__ import annotations

from lathe.core.kernels.cuda.algebra import Algebra, Reg
from lathe.core.kernels.cuda.image import CoveringWindows
from lathe.core.kernels.cuda.nest import Place, split
from lathe.core.kernels.cuda.product import ProgramTile, join_masks, program_tile, zero_sums
from lathe.core.kernels.cuda.source import Source, Writer, scaled, total
from lathe.core.kernels.pool.gradient_cuda_spec import PoolGradientSpec
from lathe.core.kernels.shared.cuda_product_tiles import ProductTile
from lathe.core.kernels.target import GpuTarget


def generate(spec: PoolGradientSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    for name in ("x", "dy", "dx"):
        w.operand(name, spec.image.dtype)
    size = ProductTile(spec.rows, spec.columns, 1, spec.warps, 1)
    tile = program_tile(w, size, spec.image.reached, spec.channels)
    batch, *places = split(w, tile.rows, (spec.image.batch, *spec.image.sizes))
    reach = CoveringWindows(w, spec.results, tile.rows)
    sums = zero_sums(w, size)
    with w.block(f"for place in range(0, {spec.image.places})"):
        windows, inside = reach.windows_at("place")
        mask = join_masks(tile.row_mask, tile.column_mask, inside)
        first = _first_greatest(w, spec, size, tile, (batch, *windows), mask)
        at = total([reach.offset(windows), scaled(tile.columns, spec.results.channel_step)])
        given = Algebra(w).load("dy", at, spec.image.dtype, mask, "0.0").name
        w.line(f"{sums} = {sums} + tl.where({first} == place, {given}, 0.0)")
    here = Place((batch, *places, tile.columns), (None,) * (len(places) + 2))
    at = f"{here.offset(spec.to)} + {tile.rows} * 0 + {tile.columns} * 0"
    Algebra(w).store("dx", at, Reg(sums, spec.image.dtype), join_masks(tile.row_mask, tile.column_mask))
    return w.source(spec.warps)


def _first_greatest(
    w: Writer, spec: PoolGradientSpec, size: ProductTile, tile: ProgramTile, window: tuple[str, ...], mask: str | None
) -> str:
    """The variable of a block with the row-major place of the first maximum in each window. NaN exceeds all numbers.

    The place is -1 where there is no window. `window` are the batch index and the window's number along each axis,
    `mask` is true where there is a window.
    """
    image, shape = spec.image, f"({size.rows}, {size.columns})"
    best = w.let(f'tl.full({shape}, float("-inf"), tl.float32)', "best")
    first = w.let(f"tl.full({shape}, -1, tl.int32)", "first")
    with w.block(f"for other in range(0, {image.places})"):
        offsets, masks = [scaled(window[0], image.batch_step)], [mask]
        steps = split(w, "other", image.kernel)
        for number, step, each, stride in zip(window[1:], steps, image.windows, image.steps, strict=True):
            moved = total([scaled(number, each.stride), scaled(step, each.dilation)])
            index = w.let(f"{moved} - {each.before} + {tile.rows} * 0", "at")  # a block, even of one window
            offsets.append(scaled(index, stride))
            masks.append(f"({index} >= 0) & ({index} < {each.size})")
        inside = w.let(join_masks(*masks) or "True", "inside")
        at = total([*offsets, scaled(tile.columns, image.channel_step)])
        value = Algebra(w).load("x", at, image.dtype, inside, "0.0").name
        greater = f"({value} > {best}) | (({value} != {value}) & ({best} == {best}))"
        better = w.let(f"({inside}) & (({first} < 0) | {greater})", "better")
        w.line(f"{best} = tl.where({better}, {value}, {best})")
        w.line(f"{first} = tl.where({better}, other, {first})")
    return first
