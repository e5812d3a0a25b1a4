"""Resize on a GPU: each result loads the indices and weights of its row and its column from tables."""

from __future__ import annotations

from lathe.core.ir.types import DType
from lathe.core.kernels.cuda.nest import split
from lathe.core.kernels.cuda.source import Source, Writer, text_of
from lathe.core.kernels.resize.cuda_spec import ResizeSpec
from lathe.core.kernels.target import GpuTarget


def generate(spec: ResizeSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    for name in ("x", "y"):
        w.operand(name, DType.FLOAT32)
    for name in ("rows", "columns"):
        w.operand(f"{name}_at", DType.INT32)
        w.operand(f"{name}_weights", DType.FLOAT32)
    here = w.let(f"tl.program_id(0) * {spec.size} + tl.arange(0, {spec.size})", "i")
    inside = w.let(f"{here} < {text_of(spec.results)}", "inside")
    each = w.let(f"{here} * 0", "each")  # turns addresses into a block, if an axis has only one result
    image, row, column, channel = split(w, here, (spec.batch, *spec.counts, spec.channels))
    start = w.let(f"{image} * {spec.sizes[0]}", "image")
    sums = w.let(f"tl.full(({spec.size},), 0.0, tl.float32)", "sums")
    with w.block(f"for a in range(0, {spec.taps[0]})"):
        high, weight = _tap(w, "rows", f"{row} * {spec.taps[0]} + a + {each}", inside)
        line = w.let(f"({start} + {high}) * {spec.sizes[1]}", "line")
        with w.block(f"for b in range(0, {spec.taps[1]})"):
            wide, factor = _tap(w, "columns", f"{column} * {spec.taps[1]} + b + {each}", inside)
            at = f"({line} + {wide}) * {spec.channels} + {channel}"
            w.line(f"{sums} = tl.fma({weight} * {factor}, tl.load(x + {at}, {inside}), {sums})")
    w.line(f"tl.store(y + {here}, {sums}, {inside})")
    return w.source(spec.warps)


def _tap(w: Writer, axis: str, place: str, inside: str) -> tuple[str, str]:
    """Load the indices and weights of taps from the tables of `axis` at `place`; returns the two variables."""
    at = w.let(f"tl.load({axis}_at + {place}, {inside}, other=0)", "tap")
    return at, w.let(f"tl.load({axis}_weights + {place}, {inside})", "weight")
