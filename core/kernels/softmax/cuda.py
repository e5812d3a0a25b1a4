"""Softmax of lines on a GPU.

A line that does not fit into registers is read twice. The first pass finds its maximum and its sum, which is rescaled
whenever a greater element appears (M. Milakov, N. Gimelshein 2018, "Online normalizer calculation for softmax").
"""

from __future__ import annotations

from lathe.core.ir.types import DType
from lathe.core.kernels.cuda.algebra import Reg
from lathe.core.kernels.cuda.lines import GREATEST, LineWriter
from lathe.core.kernels.cuda.source import Source, Writer
from lathe.core.kernels.softmax.cuda_spec import SoftmaxSpec
from lathe.core.kernels.target import GpuTarget

_NONE = 'float("-inf")'


def generate(spec: SoftmaxSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    x, y = w.operand("x", spec.dtype), w.operand("y", spec.dtype)
    lines = LineWriter(w, spec.lines)
    greatest, total = _in_registers(w, lines, spec, x) if spec.lines.whole else _online(w, lines, spec, x)
    logarithm = w.let(f"tl.log({total})") if spec.log else ""
    with lines.pieces() as piece:
        value = lines.load(x, 0, spec.dtype, piece).name
        shifted = f"({value} - {greatest})"
        result = w.let(f"{shifted} - {logarithm}" if spec.log else f"tl.exp({shifted}) / {total}")
        result = w.let(f"tl.where({result} == {result}, {result}, 0.0)") if spec.guarded else result
        lines.store(y, 0, Reg(result, spec.dtype), piece)
    return w.source(spec.lines.tile.warps)


def _in_registers(w: Writer, lines: LineWriter, spec: SoftmaxSpec, x: str) -> tuple[str, str]:
    """The variables of the maximum and the sum of exponentials of each line, for lines that registers hold."""
    with lines.pieces() as piece:
        value = lines.within(lines.load(x, 0, spec.dtype, piece).name, piece, _NONE)
        greatest = _finite(w, lines.reduce(value, GREATEST, DType.FLOAT32).name)
        return greatest, lines.sum(f"tl.exp({value} - {greatest})").name


def _online(w: Writer, lines: LineWriter, spec: SoftmaxSpec, x: str) -> tuple[str, str]:
    rows = spec.lines.tile.rows
    greatest = w.let(f"tl.full(({rows}, 1), {_NONE}, tl.float32)", "greatest")
    total = w.let(f"tl.full(({rows}, 1), 0.0, tl.float32)", "total")
    with lines.pieces() as piece:
        value = lines.within(lines.load(x, 0, spec.dtype, piece).name, piece, _NONE)
        best = w.let(f"tl.maximum({greatest}, {lines.reduce(value, GREATEST, DType.FLOAT32).name})")
        shift = _finite(w, best)
        added = lines.sum(f"tl.exp({value} - {shift})").name
        w.line(f"{total} = {total} * tl.exp({greatest} - {shift}) + {added}")
        w.line(f"{greatest} = {best}")
    return _finite(w, greatest), total


def _finite(w: Writer, greatest: str) -> str:
    """The variable of the number to subtract from each line: its maximum, or 0 if all elements are minus infinity.

    In that case the sum is 0, so that results become NaN.
    """
    return w.let(f"tl.where({greatest} == {_NONE}, 0.0, {greatest})", "greatest")
