"""Normalization of lines on a GPU: mean, then variance around it, then results. Each step reads long lines again."""

from __future__ import annotations

from lathe.core.ir.types import DType
from lathe.core.kernels.cuda.algebra import Reg
from lathe.core.kernels.cuda.lines import LineChunk, LineWriter
from lathe.core.kernels.cuda.source import Source, Writer
from lathe.core.kernels.norm.cuda_spec import NormSpec
from lathe.core.kernels.reduce.cuda import divisor
from lathe.core.kernels.target import GpuTarget

_X, _VECTOR = 0, 1  # operands of the nests
F32 = DType.FLOAT32


def generate(spec: NormSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    x, scale = w.operand("x", spec.dtype), w.operand("scale", spec.vector)
    bias = w.operand("bias", spec.vector) if spec.bias else None
    y = w.operand("y", spec.dtype)
    statistics = [w.operand(name, F32) for name, given in (("m", spec.mean), ("d", spec.deviation)) if given]
    lines = LineWriter(w, spec.lines)
    mean = _mean(lines, spec, x, "{}") if spec.centered else "0.0"
    variance = _mean(lines, spec, x, f"({{0}} - {mean}) * ({{0}} - {mean})")
    inverse = w.let(f"1.0 / tl.sqrt({variance} + {spec.epsilon!r})")
    with lines.pieces() as piece:
        value = f"({lines.load(x, _X, spec.dtype, piece).name} - {mean}) * {inverse}"
        lines.store(y, _X, Reg(_affine_result(lines, spec, value, scale, bias, piece), spec.dtype), piece)
    results = [mean] * spec.mean + [inverse] * spec.deviation
    for pointer, result in zip(statistics, results, strict=True):
        lines.store_result(pointer, Reg(result, F32))
    return w.source(spec.lines.tile.warps)


def _mean(lines: LineWriter, spec: NormSpec, x: str, form: str) -> str:
    """Write code that computes the mean over each line of an expression of its elements; returns its variable.

    `form` is a format string that takes the variable of an element, such as "({} - mean)"; `x` is the data's pointer.
    """
    w = lines.w
    total = lines.start("0.0", F32)
    with lines.pieces() as piece:
        value = form.format(lines.load(x, _X, spec.dtype, piece).name)
        w.line(f"{total} = {total} + {lines.within(value, piece, '0.0')}")
    return w.let(f"{lines.sum(total).name} / {divisor(spec.lines.length, F32)}")


def _affine_result(
    lines: LineWriter, spec: NormSpec, value: str, scale: str, bias: str | None, piece: LineChunk
) -> str:
    factor = lines.load(scale, _VECTOR, spec.vector, piece).name
    if bias is None:
        return lines.w.let(f"{value} * {factor}")
    return lines.w.let(f"tl.fma({value}, {factor}, {lines.load(bias, _VECTOR, spec.vector, piece).name})")
