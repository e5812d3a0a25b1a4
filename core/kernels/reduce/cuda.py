"""Reductions of lines on a GPU: each element of a block accumulates separately; lines are reduced at the end."""

from __future__ import annotations

from collections.abc import Callable

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.cuda.algebra import Reg
from lathe.core.kernels.cuda.lines import GREATEST, LEAST, PRODUCT, SUM, LineWriter, highest, lowest, register_dtype
from lathe.core.kernels.cuda.product import last_program_of_tile, split_pointers
from lathe.core.kernels.cuda.source import Source, Writer, text_of
from lathe.core.kernels.reduce.cuda_spec import SUMS, ReduceSpec
from lathe.core.kernels.shared.cuda_product_tiles import ProductTile
from lathe.core.kernels.target import GpuTarget

_TERMS = {
    "ReduceSum": "{}", "ReduceMean": "{}", "ReduceLogSum": "{}", "ReduceL1": "tl.abs({})", "ReduceL2": "{0} * {0}",
    "ReduceSumSquare": "{0} * {0}",
}  # fmt: skip


def generate(spec: ReduceSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    x, y = w.operand("x", spec.dtype), w.operand("y", spec.dtype)
    split_pointers(w, spec.parts)
    lines = LineWriter(w, spec.lines, spec.parts)
    if spec.kind in SUMS:
        _sum(lines, spec, x, y)
    else:
        result = _FORMS[spec.kind](lines, spec, x)
        lines.store_result(y, Reg(result, spec.dtype), 1)
    return w.source(spec.lines.tile.warps)


def _sum(lines: LineWriter, spec: ReduceSpec, x: str, y: str) -> None:
    """Write code for a reduction by addition (sum, mean, norms) and store its results at `y`.

    Only these can be split among several programs.
    """
    w, dtype, tile = lines.w, register_dtype(spec.dtype), spec.lines.tile
    form = _TERMS[spec.kind]
    total = _accumulate(lines, spec, x, "0", lambda sofar, value: f"{sofar} + {form.format(value)}")
    size = ProductTile(tile.rows, tile.columns, tile.columns, tile.warps, 1)
    with last_program_of_tile(w, size, spec.lines.programs, spec.parts, total) as whole:
        added = lines.reduce(whole, SUM, dtype).name
        match spec.kind:
            case "ReduceMean":
                count = Reg(w.let(divisor(spec.count, dtype)), dtype)
                added = lines.e.div(Reg(added, dtype), count).name
            case "ReduceL2":
                added = lines.e.sqrt(Reg(added, dtype)).name
            case "ReduceLogSum":
                added = w.let(f"tl.log({added})")
        lines.store_result(y, Reg(added, spec.dtype), 1)


def _product(lines: LineWriter, spec: ReduceSpec, x: str) -> str:
    total = _accumulate(lines, spec, x, "1", lambda sofar, value: f"{sofar} * {value}")
    return lines.reduce(total, PRODUCT, register_dtype(spec.dtype)).name


def divisor(count: Dim, dtype: DType) -> str:
    """The expression of `count`, a number of elements, as a float of type `dtype`."""
    return f"{float(count)!r}" if isinstance(count, int) else f"{text_of(count)}.to(tl.{dtype})"


def _extreme(lines: LineWriter, spec: ReduceSpec, x: str) -> str:
    greatest, dtype = spec.kind == "ReduceMax", register_dtype(spec.dtype)
    other = lowest(dtype) if greatest else highest(dtype)
    name, combine = ("maximum", GREATEST) if greatest else ("minimum", LEAST)
    nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_float else ""
    best = _accumulate(lines, spec, x, other, lambda sofar, value: f"tl.{name}({sofar}, {value}{nan})")
    return lines.extreme(best, combine, dtype).name


def _log_sum_exp(lines: LineWriter, spec: ReduceSpec, x: str) -> str:
    """The variable of log(sum(exp(x - m))) + m of each line, for its greatest element m, so that nothing overflows.

    An infinite m is replaced by 0.
    """
    w, dtype = lines.w, register_dtype(spec.dtype)
    none = lowest(dtype)
    best = _accumulate(lines, spec, x, none, lambda sofar, value: f"tl.maximum({sofar}, {value})")
    greatest = lines.reduce(best, GREATEST, dtype).name
    infinite = f"({greatest} == {none}) | ({greatest} == {highest(dtype)})"
    shift = w.let(f"tl.where({infinite}, 0.0, {greatest})")
    form = f"tl.exp({{}} - {shift})"
    total = _accumulate(lines, spec, x, "0", lambda sofar, value: f"{sofar} + {form.format(value)}", none)
    return w.let(f"tl.log({lines.sum(total, dtype).name}) + {shift}")


def _accumulate(
    lines: LineWriter, spec: ReduceSpec, x: str, first: str, combine: Callable[[str, str], str], outside: str = ""
) -> str:
    """The variable of a block of accumulators, one per line and column, after all chunks of the lines.

    They begin as `first`, and `combine(total, value)` gives the text of the next ones. Elements outside the lines count
    as `outside`, or as `first` if that is "".
    """
    w = lines.w
    total = lines.start(first, register_dtype(spec.dtype))
    with lines.pieces() as piece:
        value = lines.load(x, 0, spec.dtype, piece).name
        w.line(f"{total} = {combine(total, lines.within(value, piece, outside or first))}")
    return total


_FORMS = {"ReduceProd": _product, "ReduceMax": _extreme, "ReduceMin": _extreme, "ReduceLogSumExp": _log_sum_exp}
