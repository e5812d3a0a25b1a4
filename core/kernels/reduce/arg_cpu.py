"""ArgMax and ArgMin."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks, grain
from lathe.core.kernels.cpu.reduction import ParallelAccumulators, highest, lowest
from lathe.core.kernels.reduce.spec import ArgReduceSpec
from lathe.core.kernels.target import Target

_I64 = DType.INT64
_NOWHERE = 1 << 62


def generate(spec: ArgReduceSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, y = k.operand(0, spec.dtype), k.operand(1, _I64)
    if spec.inner == 1:
        _rows(k, spec, x, y)
    else:
        _columns(k, spec, x, y)
    return k


def _rows(k: Kernel, spec: ArgReduceSpec, x: Pointer, y: Pointer) -> None:
    """Two passes along a row: the extreme value, then its first (or last) place. NaN is the extreme, as in NumPy."""
    length = k.dim(spec.length)
    best = k.ops.min if spec.least else k.ops.max
    values = ParallelAccumulators(k, spec.dtype, highest(spec.dtype) if spec.least else lowest(spec.dtype), best)
    earlier = k.ops.max if spec.last else k.ops.min
    places = ParallelAccumulators(k, _I64, -1 if spec.last else _NOWHERE, earlier, count=2)
    steps = k.index(grain(spec.dtype.itemsize, 4)) // k.ops.max(length, 1)
    with even_chunks(k, k.dim(spec.outer), steps) as (start, stop), k.loop(start, stop) as row:
        source = x.at(row * length)
        winner = values.over(
            length, lambda acc, i, lanes, mask: best(acc, values.masked(source.load(i, lanes, mask), mask))
        )

        def step(acc: Val, i: Val, lanes: int, mask: Val | None) -> Val:
            value = source.load(i, lanes, mask)
            found = k.ops.eq(value, winner) | _is_nan(k, value)
            place = k.lane_numbers(lanes) + i if lanes > 1 else i
            return earlier(acc, places.masked(k.ops.select(found, place, places.identity), mask))

        y.store(places.over(length, step), row)


def _is_nan(k: Kernel, value: Val) -> Val:
    if value.dtype.is_float:
        return k.ops.is_nan(value)
    return k.constant(False, DType.BOOL, value.lanes)


def _columns(k: Kernel, spec: ArgReduceSpec, x: Pointer, y: Pointer) -> None:
    """Reduce along the middle axis, with adjacent columns in the lanes of a vector."""
    length, inner = k.dim(spec.length), k.dim(spec.inner)
    lanes = max(1, k.target.vector_bytes // 8)
    blocks = (inner + (lanes - 1)) // lanes
    steps = k.index(grain(spec.dtype.itemsize * lanes, 4)) // k.ops.max(length, 1)
    with even_chunks(k, k.dim(spec.outer) * blocks, steps) as (start, stop), k.loop(start, stop) as item:
        place, first = item // blocks, item % blocks * lanes
        mask = k.lane_mask(inner - first, lanes)
        source = x.at(place * length * inner + first)
        init = [source.load(0, lanes, mask), k.zeros(_I64, lanes)]
        with k.fold(1, length, init) as fold:
            value = source.load(fold.index * inner, lanes, mask)
            better = _is_better(k, spec, value, fold.values[0])
            fold.values = [
                k.ops.select(better, value, fold.values[0]), k.ops.select(better, fold.index, fold.values[1])
            ]  # fmt: skip
        y.store(fold.values[1], place * inner + first, mask)


def _is_better(k: Kernel, spec: ArgReduceSpec, value: Val, best: Val) -> Val:
    """A mask of the lanes where a later element `value` replaces `best`, the best one so far.

    Equal elements replace it if the spec wants the last one. NaN is better than all numbers.
    """
    beats = k.ops.lt(value, best) if spec.least else k.ops.lt(best, value)
    if spec.last:
        beats = beats | k.ops.eq(value, best) | (_is_nan(k, value) & _is_nan(k, best))
    return (beats | _is_nan(k, value)) & (~_is_nan(k, best) | _is_nan(k, value) if spec.last else ~_is_nan(k, best))
