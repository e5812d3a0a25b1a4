"""Cumulative sums on a GPU: all threads of a program scan a chunk of a line, and add the sum of the chunks before."""

from __future__ import annotations

from lathe.core.ir.types import DType
from lathe.core.kernels.cuda.algebra import Algebra, Reg, register_name
from lathe.core.kernels.cuda.lines import SUM, register_dtype
from lathe.core.kernels.cuda.nest import split
from lathe.core.kernels.cuda.source import Source, Writer, scaled, text_of, total
from lathe.core.kernels.cumulative.cuda_spec import CumulativeSpec
from lathe.core.kernels.target import GpuTarget


def generate(spec: CumulativeSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    x, y = w.operand("x", spec.dtype), w.operand("y", spec.dtype)
    e, tile, wide = Algebra(w), spec.tile, _sum_dtype(spec.dtype)
    line = w.let(f"tl.program_id(0) * {tile.rows} + tl.arange(0, {tile.rows})[:, None]", "line")
    inside = w.let(f"{line} < {text_of(spec.outer * spec.inner)}", "inside")
    outer, inner = split(w, line, (spec.outer, spec.inner))
    base = w.let(total([scaled(outer, spec.length * spec.inner), inner, f"{line} * 0"]), "base")
    before = w.let(f"tl.full(({tile.rows}, 1), 0, {register_name(wide)})", "before")
    with w.block(f"for start in range(0, {text_of(spec.length)}, {tile.columns})"):
        k = w.let(f"start + tl.arange(0, {tile.columns})[None, :]", "k")
        source = w.let(f"{k} - 1", "source") if spec.exclusive else k
        there = f"({k} < {text_of(spec.length)})"
        given = f"{inside} & {there}" + (f" & ({source} >= 0)" if spec.exclusive else "")
        loaded = e.load(x, _at(spec, base, source), spec.dtype, given, "0")
        value = w.let(f"{loaded.name}.to({register_name(wide)})")
        summed = w.let(f"tl.associative_scan({value}, 1, {SUM}) + {before}", "sums")
        e.store(y, _at(spec, base, k), Reg(summed, spec.dtype), f"{inside} & {there}")
        w.line(f"{before} = {before} + tl.reduce({value}, 1, {SUM})[:, None]")
    return w.source(tile.warps)


def _at(spec: CumulativeSpec, base: str, k: str) -> str:
    """The expression of the offset of the `k`-th element in the order of summation, in a line that begins at `base`."""
    place = f"({text_of(spec.length)} - 1 - {k})" if spec.reverse else k
    return total([base, scaled(place, spec.inner)])


def _sum_dtype(dtype: DType) -> DType:
    """The type of sums. Integers are summed in 64 bits; the store truncates, so they wrap around."""
    if dtype.is_float:
        return register_dtype(dtype)
    return DType.INT64 if dtype.label.startswith("int") else DType.UINT64
