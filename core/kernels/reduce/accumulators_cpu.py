"""The reductions: what each does with an element, with two partial results, and with the total."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.reduction import highest, lowest


@dataclass(frozen=True, slots=True)
class Reduction:
    """One pass over the elements: each becomes `prepare(value, i)`, and `combine` reduces them from `identity` on.

    A pass computes several results at once; i is the index of the result that the element belongs to.
    """

    identity: float
    combine: Callable[[Val, Val], Val]
    prepare: Callable[[Val, int], Val] = lambda value, _: value


def passes(k: Kernel, kind: str, dtype: DType, count: Val, sweep: Callable[[Reduction], list[Val]]) -> list[Val]:
    """The results of the reduction operator `kind`, each of `count` elements.

    `sweep(reduction)` generates one pass over the elements and returns one partial result per result.
    """
    if kind == "ReduceLogSumExp":
        return _log_sum_exp(k, dtype, sweep)
    totals = sweep(_REDUCTIONS[kind](k, dtype))
    return [_finish(k, kind, total, count) for total in totals]


def _log_sum_exp(k: Kernel, dtype: DType, sweep: Callable[[Reduction], list[Val]]) -> list[Val]:
    """log(sum(exp(x - m))) + m for the maximum m; an infinite m is replaced by 0, so that infinities stay right."""
    greatest = sweep(_max(k, dtype))
    shifts = [k.ops.select(k.ops.lt(k.ops.abs(value), highest(dtype)), value, 0.0) for value in greatest]
    sums = sweep(Reduction(0, k.ops.add, lambda value, i: k.ops.exp(value - shifts[i])))
    return [k.ops.log(total) + shift for total, shift in zip(sums, shifts, strict=True)]


def _finish(k: Kernel, kind: str, total: Val, count: Val) -> Val:
    match kind:
        case "ReduceMean":
            return total / count.cast(total.dtype)
        case "ReduceL2":
            return k.ops.sqrt(total)
        case "ReduceLogSum":
            return k.ops.log(total)
    return total


def _sum(k: Kernel, dtype: DType) -> Reduction:
    return Reduction(0, k.ops.add)


def _absolute_sum(k: Kernel, dtype: DType) -> Reduction:
    return Reduction(0, k.ops.add, lambda value, _: k.ops.abs(value))


def _square_sum(k: Kernel, dtype: DType) -> Reduction:
    return Reduction(0, k.ops.add, lambda value, _: value * value)


def _product(k: Kernel, dtype: DType) -> Reduction:
    return Reduction(1, k.ops.mul)


def _max(k: Kernel, dtype: DType) -> Reduction:
    return Reduction(lowest(dtype), k.ops.max)


def _min(k: Kernel, dtype: DType) -> Reduction:
    return Reduction(highest(dtype), k.ops.min)


_REDUCTIONS: dict[str, Callable[[Kernel, DType], Reduction]] = {
    "ReduceSum": _sum, "ReduceMean": _sum, "ReduceMax": _max, "ReduceMin": _min, "ReduceProd": _product,
    "ReduceL1": _absolute_sum, "ReduceL2": _square_sum, "ReduceSumSquare": _square_sum, "ReduceLogSum": _sum,
}  # fmt: skip
