"""Gather: every result looks up its own index; neighbours share it, so it comes from a cache."""

from __future__ import annotations

from core.ir.types import Dim, DType
from core.kernels.catalog.base import Status
from core.kernels.catalog.cuda.gather import GatherSpec
from core.kernels.cuda.copy import UNSIGNED
from core.kernels.cuda.nest import split
from core.kernels.cuda.source import Source, Writer, scaled, text_of, total
from core.kernels.target import GpuTarget


def generate(spec: GatherSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    for name, dtype in (("x", UNSIGNED[spec.itemsize]), ("indices", spec.index), ("y", UNSIGNED[spec.itemsize])):
        w.operand(name, dtype)
    w.operand("flag", DType.INT32)
    here = w.let(f"tl.program_id(0) * {spec.size} + tl.arange(0, {spec.size})", "i")
    inside = w.let(f"{here} < {text_of(spec.results)}", "inside")
    outer, place, inner = split(w, here, (spec.outer, spec.count, spec.inner))
    each = w.let(f"{here} * 0", "each")  # what makes addresses a block, where there is one index or one element
    index = w.let(f"tl.load(indices + {place} + {each}, {inside}, other=0)", "index")
    row, valid = checked(w, index, spec.extent, inside)
    start = scaled(outer, spec.extent * spec.inner)
    at = total([start, scaled(row, spec.inner), inner, each])
    w.line(f"tl.store(y + {here}, tl.load(x + {at}, {valid}), {valid})")
    return w.source(spec.warps)


def checked(w: Writer, index: str, extent: Dim, inside: str) -> tuple[str, str]:
    """An index from the front as int32, and where it is good; one that is not raises the flag. Negative ones count from
    the end."""
    wrapped = w.let(f"tl.where({index} < 0, {index} + {text_of(extent)}, {index})", "index")
    good = w.let(f"({wrapped} >= 0) & ({wrapped} < {text_of(extent)})", "good")
    bad = w.let(f"tl.reduce(({inside} & (~{good})).to(tl.int32), 0, tl.standard._elementwise_max)", "bad")
    w.line(f"tl.store(flag, {Status.INDEX_OUT_OF_RANGE.value}, {bad} > 0)")
    return w.let(f"{wrapped}.to(tl.int32)", "row"), w.let(f"{inside} & {good}", "valid")
