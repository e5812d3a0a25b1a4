"""Matrix products on a GPU: a program computes one tile of one matrix."""

from __future__ import annotations

from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.cuda.nest import Place, split
from lathe.core.kernels.cuda.product import (
    depth_range,
    edge_mask,
    finish,
    last_program_of_tile,
    load_factors,
    multiply_weights,
    program_tile,
    split_pointers,
    zero_sums,
)
from lathe.core.kernels.cuda.source import Source, Writer, scaled, total
from lathe.core.kernels.gemm.cuda_spec import GemmSpec
from lathe.core.kernels.shared.cuda_product import I8
from lathe.core.kernels.target import GpuTarget


def generate(spec: GemmSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    pointers = [w.operand("a", spec.factors[0]), w.operand("b", spec.factors[1])]
    if spec.element is I8:
        w.operand("offsets", DType.INT32)
    pointers += [w.operand(f"x{i}", dtype) for i, dtype in enumerate(spec.results.extra_dtypes)]
    pointers.append(w.operand("y", spec.results.dtype))
    split_pointers(w, spec.parts)
    tile = program_tile(w, spec.tile, product(spec.rows.extents), spec.columns)
    batch = split(w, tile.batch, spec.batch.extents)
    rows = split(w, tile.rows, spec.rows.extents)
    nothing: list[str | None] = [None] * len(batch)
    here = Place((*batch, *rows, tile.columns), (*nothing, *[tile.row_mask] * len(rows), tile.column_mask))
    moves = [(*spec.batch.strides[i], *spec.rows.strides[i]) for i in range(len(pointers))]
    a, b = (w.let(here.offset((*moves[i], 0)), "at") for i in (0, 1))
    sums = zero_sums(w, spec.tile, spec.element)
    with w.block(f"for k in range({depth_range(w, spec.depth, spec.tile.depth, spec.parts)})"):
        _step(w, spec, a, b, tile.columns, sums, (tile.row_mask, tile.column_mask))
    if spec.element is I8:
        inside = f", {tile.column_mask}, other=0" if tile.column_mask else ""
        sums = w.let(f"{sums} + tl.load(offsets + {tile.columns}{inside})", "sums")
    steps = (*spec.results.extra_steps, spec.results.y_step)
    walks = [(*m, s) for m, s in zip(moves[2:], steps, strict=True)]
    with last_program_of_tile(w, spec.tile, spec.programs, spec.parts, sums) as whole:
        finish(w, spec.results, here, walks, pointers[2:], whole, tile)
    return w.source(spec.tile.warps, spec.tile.stages)


def _step(
    w: Writer, spec: GemmSpec, a: str, b: str, columns: str, sums: str, masks: tuple[str | None, str | None]
) -> None:
    """Write code that adds the products of `spec.tile.depth` steps of the depth, from `k` on, to the block `sums`.

    `a` and `b` are expressions of the offsets of the tile's rows of A and of the matrix B; `masks` are those of rows
    and columns.
    """
    size = spec.tile.depth
    across, down = (w.let(f"k + tl.arange(0, {size})[{ways}]", "k") for ways in ("None, :", ":, None"))
    left, right = (edge_mask(w, k, spec.depth, size) for k in (across, down))
    x_at = total([a, scaled(across, spec.a_step)])
    y_at = total([b, scaled(down, spec.b_steps[0]), scaled(columns, spec.b_steps[1])])
    x = load_factors(w, "a", x_at, spec.factors[0], spec.element, masks[0], left)

    def load(offset: str | None) -> str:
        return load_factors(w, "b", total([y_at, offset]), spec.factors[1], spec.element, masks[1], right)

    multiply_weights(w, sums, x, load, spec.columns * spec.depth, spec.precision, spec.element)
