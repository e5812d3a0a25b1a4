"""What each reduction does to an element, to two partial results, and to the last one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.codegen.lang import Kernel, Val
from core.ir.types import DType
from core.kernels.cpu.lanes import highest, lowest


@dataclass(frozen=True, slots=True)
class Reduction:
    """One pass over the elements: `prepare(value, i)` each (of the i-th result side by side), then `combine` them."""

    identity: float
    combine: Callable[[Val, Val], Val]
    prepare: Callable[[Val, int], Val] = lambda value, _: value


def passes(k: Kernel, kind: str, dtype: DType, count: Val, sweep: Callable[[Reduction], list[Val]]) -> list[Val]:
    """The results of an operator, given `sweep`, which makes one pass and answers one partial result for each."""
    if kind == "ReduceLogSumExp":
        return _log_sum_exp(k, dtype, sweep)
    totals = sweep(_REDUCTIONS[kind](k, dtype))
    return [_finished(k, kind, total, count) for total in totals]


def _log_sum_exp(k: Kernel, dtype: DType, sweep: Callable[[Reduction], list[Val]]) -> list[Val]:
    """Relative to the greatest element, or to 0 where that is infinite: infinities then come out as they should."""
    greatest = sweep(_max(k, dtype))
    shifts = [k.ops.select(k.ops.lt(k.ops.abs(value), highest(dtype)), value, 0.0) for value in greatest]
    sums = sweep(Reduction(0, k.ops.add, lambda value, i: k.ops.exp(value - shifts[i])))
    return [k.ops.log(total) + shift for total, shift in zip(sums, shifts, strict=True)]


def _finished(k: Kernel, kind: str, total: Val, count: Val) -> Val:
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
