"""Gather on a GPU: each result loads its own index; adjacent results share it, so it comes from a cache."""

from __future__ import annotations

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import Status
from lathe.core.kernels.copy.cuda import UNSIGNED
from lathe.core.kernels.cuda.nest import split
from lathe.core.kernels.cuda.source import Source, Writer, scaled, text_of, total
from lathe.core.kernels.indexing.gather_cuda_spec import GatherSpec
from lathe.core.kernels.target import GpuTarget


def generate(spec: GatherSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    for name, dtype in (("x", UNSIGNED[spec.itemsize]), ("indices", spec.index), ("y", UNSIGNED[spec.itemsize])):
        w.operand(name, dtype)
    w.operand("flag", DType.INT32)
    here = w.let(f"tl.program_id(0) * {spec.size} + tl.arange(0, {spec.size})", "i")
    inside = w.let(f"{here} < {text_of(spec.results)}", "inside")
    outer, place, inner = split(w, here, (spec.outer, spec.count, spec.inner))
    each = w.let(f"{here} * 0", "each")  # turns addresses into a block, if there is only one index or one element
    index = w.let(f"tl.load(indices + {place} + {each}, {inside}, other=0)", "index")
    row, valid = check_index(w, index, spec.extent, inside)
    start = scaled(outer, spec.extent * spec.inner)
    at = total([start, scaled(row, spec.inner), inner, each])
    w.line(f"tl.store(y + {here}, tl.load(x + {at}, {valid}), {valid})")
    return w.source(spec.warps)


def check_index(w: Writer, index: str, extent: Dim, inside: str) -> tuple[str, str]:
    """The names of the indices from the front as int32, and of a mask of those that are `inside` and valid.

    `inside` is a mask. Negative indices count from the end of `extent`. An invalid index where `inside` is true sets
    the status flag.
    """
    wrapped = w.let(f"tl.where({index} < 0, {index} + {text_of(extent)}, {index})", "index")
    good = w.let(f"({wrapped} >= 0) & ({wrapped} < {text_of(extent)})", "good")
    bad = w.let(f"tl.reduce(({inside} & (~{good})).to(tl.int32), 0, tl.standard._elementwise_max)", "bad")
    w.line(f"tl.store(flag, {Status.INDEX_OUT_OF_RANGE.value}, {bad} > 0)")
    return w.let(f"{wrapped}.to(tl.int32)", "row"), w.let(f"{inside} & {good}", "valid")
