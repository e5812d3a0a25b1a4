"""ArgMax and ArgMin on a GPU: each element of a block holds its best value and place; lines are reduced at the end."""

from __future__ import annotations

from lathe.core.ir.types import DType
from lathe.core.kernels.cuda.algebra import Reg
from lathe.core.kernels.cuda.lines import GREATEST, LEAST, LineWriter, highest, lowest, register_dtype
from lathe.core.kernels.cuda.source import Source, Writer
from lathe.core.kernels.reduce.cuda_spec import ArgReduceSpec
from lathe.core.kernels.target import GpuTarget

_NOWHERE = (1 << 31) - 1


def generate(spec: ArgReduceSpec, target: GpuTarget) -> Source:
    """The source of a kernel for ArgMax or ArgMin of lines; NaN counts as the extreme, as in NumPy."""
    w = Writer(spec.symbol)
    x, y = w.operand("x", spec.dtype), w.operand("y", DType.INT64)
    lines, dtype = LineWriter(w, spec.lines), register_dtype(spec.dtype)
    best = lines.start(highest(dtype) if spec.least else lowest(dtype), dtype)
    place = lines.start("-1", DType.INT32)
    with lines.pieces() as piece:
        value = lines.load(x, 0, spec.dtype, piece).name
        better = w.let(f"(({place} < 0) | {_is_better(spec, value, best)}) & {lines.both(piece)}")
        w.line(f"{best} = tl.where({better}, {value}, {best})")
        w.line(f"{place} = tl.where({better}, {piece.index}, {place})")
    found = lines.extreme(best, LEAST if spec.least else GREATEST, dtype).name
    equal = f"({best} == {found})" + (f" | (({best} != {best}) & ({found} != {found}))" if dtype.is_float else "")
    outside, combine = ("-1", GREATEST) if spec.last else (str(_NOWHERE), LEAST)
    places = w.let(f"tl.where(({equal}) & ({place} >= 0), {place}, {outside})")
    lines.store_result(y, Reg(lines.reduce(places, combine, DType.INT32).name, DType.INT64))
    return w.source(spec.lines.tile.warps)


def _is_better(spec: ArgReduceSpec, value: str, best: str) -> str:
    """The expression of whether a later element `value` replaces `best`, the best one so far.

    Equal elements replace it if the spec wants the last one. NaN is better than all numbers.
    """
    relation = ("<" if spec.least else ">") + ("=" if spec.last else "")
    text = f"({value} {relation} {best})"
    if not spec.dtype.is_float:
        return text
    again = f"({value} != {value})" if spec.last else f"(({value} != {value}) & ({best} == {best}))"
    return f"({text} & ({best} == {best})) | {again}"
