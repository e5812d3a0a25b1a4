"""ScatterElements on a GPU: a thread owns a line along the axis of the indices, and applies its updates in order."""

from __future__ import annotations

from lathe.core.ir.types import DType
from lathe.core.kernels.call import Status
from lathe.core.kernels.cuda.nest import split
from lathe.core.kernels.cuda.source import Source, Writer, text_of
from lathe.core.kernels.indexing.scatter_cuda import from_front, join
from lathe.core.kernels.indexing.scatter_cuda_spec import ScatterElementsSpec
from lathe.core.kernels.target import GpuTarget


def generate(spec: ScatterElementsSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    for name, dtype in (("indices", spec.index), ("updates", spec.dtype), ("y", spec.dtype)):
        w.operand(name, dtype)
    if not spec.cleared:
        w.operand("x", spec.dtype)
    w.operand("flag", DType.INT32)
    inner, extent = text_of(spec.inner), text_of(spec.extent)
    line = w.let(f"tl.program_id(0) * {spec.lines} + tl.arange(0, {spec.lines})", "line")
    inside = w.let(f"{line} < {text_of(spec.outer * spec.inner)}", "inside")
    outer, column = split(w, line, (spec.outer, spec.inner))
    each = w.let(f"{column} + {line} * 0", "each")  # a block, even for one line
    base = w.let(f"{outer} * ({extent} * {inner}) + {each}", "base")
    source = w.let(f"{outer} * ({text_of(spec.count)} * {inner}) + {each}", "source")
    with w.block(f"for k in range(0, {extent})"):
        old = "0" if spec.cleared else f"tl.load(x + {base} + k * {inner}, {inside})"
        w.line(f"tl.store(y + {base} + k * {inner}, {old}, {inside})")
    with w.block(f"for k in range(0, {text_of(spec.count)})"):
        index = w.let(f"tl.load(indices + {source} + k * {inner}, {inside}, other=0)", "index")
        front, good = from_front(w, index, extent)
        bad = w.let(f"tl.reduce(({inside} & (~{good})).to(tl.int32), 0, tl.standard._elementwise_max)", "bad")
        w.line(f"tl.store(flag, {Status.INDEX_OUT_OF_RANGE.value}, {bad} > 0)")
        valid = w.let(f"{inside} & {good}", "valid")
        at = w.let(f"{base} + {front}.to(tl.int32) * {inner}", "at")
        new = w.let(f"tl.load(updates + {source} + k * {inner}, {valid})", "new")
        old = w.let(f"tl.load(y + {at}, {valid})", "old")
        w.line(f"tl.store(y + {at}, {join(spec.reduction, spec.dtype, old, new)}, {valid})")
    return w.source(spec.warps)
