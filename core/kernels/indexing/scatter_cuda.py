"""ScatterND on a GPU: a program holds its rows in registers, reads all indices, and loads the updates of its rows."""

from __future__ import annotations

from lathe.core.ir.types import DType
from lathe.core.kernels.call import Status
from lathe.core.kernels.cuda.algebra import Algebra, Reg
from lathe.core.kernels.cuda.source import Source, Writer, text_of
from lathe.core.kernels.indexing.scatter_cuda_spec import ScatterRowsSpec
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.target import GpuTarget

_JOINS = {"add": "{} + {}", "mul": "{} * {}", "max": "tl.maximum({}, {}{nan})", "min": "tl.minimum({}, {}{nan})"}


def generate(spec: ScatterRowsSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    for name, dtype in (("indices", spec.index), ("updates", spec.dtype), ("y", spec.dtype)):
        w.operand(name, dtype)
    if not spec.cleared:
        w.operand("x", spec.dtype)
    w.operand("flag", DType.INT32)
    wide = text_of(blocks(spec.inner, spec.columns))
    start = w.let(f"(tl.program_id(0) // {wide}) * {spec.rows}", "start")
    row = w.let(f"{start} + tl.arange(0, {spec.rows})[:, None]", "row")
    column = w.let(f"(tl.program_id(0) % {wide}) * {spec.columns} + tl.arange(0, {spec.columns})[None, :]", "column")
    across = w.let(f"{column} < {text_of(spec.inner)}", "inside")
    inside = w.let(f"({row} < {text_of(spec.height)}) & {across}", "inside")
    at = w.let(f"{row} * {text_of(spec.inner)} + {column}", "at")
    rows = w.let(_old_rows(spec, at, inside), "rows")
    with w.block(f"for i in range(0, {text_of(spec.count)})"):
        named, good = _selected_row(w, spec)
        w.line(f"tl.store(flag, {Status.INDEX_OUT_OF_RANGE.value}, ~({good}))")
        with w.block(f"if ({good}) & ({named} >= {start}) & ({named} < {start} + {spec.rows})"):
            update = w.let(f"tl.load(updates + i * {text_of(spec.inner)} + {column}, {across})", "update")
            w.line(f"{rows} = tl.where({row} == {named}, {join(spec.reduction, spec.dtype, rows, update)}, {rows})")
    Algebra(w).store("y", at, Reg(rows, spec.dtype), inside)
    return w.source(spec.warps)


def _old_rows(spec: ScatterRowsSpec, at: str, inside: str) -> str:
    """The expression of a block of rows before the updates: loaded from x at offsets `at`, or zeros if `cleared`."""
    if spec.cleared:
        return f"tl.full(({spec.rows}, {spec.columns}), 0, tl.{spec.dtype})"
    return f"tl.load(x + {at}, {inside})"


def _selected_row(w: Writer, spec: ScatterRowsSpec) -> tuple[str, str]:
    """Expressions of the row-major number of the row that the i-th coordinates select, and of whether it exists."""
    depth, number, goods = len(spec.extents), "", []
    for axis, extent in enumerate(spec.extents):
        index = w.let(f"tl.load(indices + i * {depth} + {axis})", "index")
        front, good = from_front(w, index, text_of(extent))
        goods.append(good)
        number = w.let(f"{number} * {text_of(extent)} + {front}" if number else front, "named")
    return number, " & ".join(goods)


def from_front(w: Writer, index: str, extent: str) -> tuple[str, str]:
    """The variables of the index counted from the front, and of whether it is in range of `extent`.

    A negative index counts from the end.
    """
    front = w.let(f"tl.where({index} < 0, {index} + {extent}, {index})", "front")
    return front, w.let(f"({front} >= 0) & ({front} < {extent})", "good")


def join(reduction: str, dtype: DType, old: str, new: str) -> str:
    """The expression that combines `old` and the update `new` by a `reduction` of ONNX ("none": just `new`)."""
    if reduction == "none":
        return new
    nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_float else ""
    return _JOINS[reduction].format(old, new, nan=nan)
