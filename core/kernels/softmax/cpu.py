"""Softmax: rows that fit the registers are read once, longer rows in three passes; other axes go by columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import Dim
from lathe.core.kernels.cpu.nest import even_chunks, for_each_vector, grain, has_masks
from lathe.core.kernels.cpu.reduction import ParallelAccumulators, fast_max, parts_of, reduce_pairwise
from lathe.core.kernels.softmax.spec import SoftmaxSpec
from lathe.core.kernels.target import Target

_COST = 14  # operations per element


def generate(spec: SoftmaxSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, y = k.operand(0, spec.dtype), k.operand(1, spec.dtype)
    if spec.inner == 1:
        _rows(k, spec, x, y)
    else:
        _columns(k, spec, x, y)
    return k


def _rows(k: Kernel, spec: SoftmaxSpec, x: Pointer, y: Pointer) -> None:
    length = k.dim(spec.length)
    room = k.target.vector_bytes * k.target.registers // 2
    short = isinstance(spec.length, int) and spec.length * spec.dtype.itemsize <= room
    steps = k.index(grain(8, _COST)) // k.ops.max(length, 1)
    with even_chunks(k, k.dim(spec.outer), steps) as (start, stop), k.loop(start, stop) as row:
        source, target = x.at(row * length), y.at(row * length)
        if short and isinstance(spec.length, int):
            _short_row(k, spec, spec.length, source, target)
        else:
            _long_row(k, spec, length, source, target)


def _short_row(k: Kernel, spec: SoftmaxSpec, length: int, x: Pointer, y: Pointer) -> None:
    """Compute the softmax of a row of `length` elements that fits the registers, from `x` to `y`."""
    parts = parts_of(k, length)
    lowest = k.constant(-math.inf, spec.dtype)
    row = [k.ops.select(p.mask, v, lowest) if p.mask else v for p in parts for v in [x.load(p.start, p.lanes, p.mask)]]
    most = k.ops.reduce(reduce_pairwise(row, lambda a, b: fast_max(k, a, b)), lambda a, b: fast_max(k, a, b))
    moved = [v - most for v in row]
    powers = [k.ops.exp(v) for v in moved]
    total = k.ops.sum(reduce_pairwise(powers, k.ops.add))
    results = _finish(k, spec, moved if spec.log else powers, total)
    for part, value in zip(parts, results, strict=True):
        y.store(value, part.start, part.mask)


def _finish(k: Kernel, spec: SoftmaxSpec, values: Sequence[Val], total: Val) -> list[Val]:
    last = _last_operand(k, spec, total)
    return [_result(k, spec, value, last) for value in values]


def _last_operand(k: Kernel, spec: SoftmaxSpec, total: Val) -> Val:
    """The last argument of `_result`, given `total`, the sum of the exponentials.

    It is the logarithm of the sum if `spec.log`, otherwise the inverse of the sum.
    """
    return k.ops.log(total) if spec.log else 1.0 / total


def _result(k: Kernel, spec: SoftmaxSpec, value: Val, last: Val) -> Val:
    """The result for the exponential `value` (for LogSoftmax its exponent), given the result `last` of `_last_operand`.

    If any exponential is NaN, so is the sum, and with it each result; a guarded softmax gives 0 instead.
    """
    if spec.log:
        return value - last
    share = value * last
    return k.ops.select(k.ops.is_nan(share), k.zeros(spec.dtype, share.lanes), share) if spec.guarded else share


def _long_row(k: Kernel, spec: SoftmaxSpec, length: Val, x: Pointer, y: Pointer) -> None:
    """Compute a row in three passes: maximum; exponentials and their sum; scaling. The row stays in the cache."""
    greatest = ParallelAccumulators(k, spec.dtype, -math.inf, lambda a, b: fast_max(k, a, b))
    sums = ParallelAccumulators(k, spec.dtype, 0, k.ops.add, count=2)

    def raise_maximum(most: Val, i: Val, lanes: int, mask: Val | None) -> Val:
        return fast_max(k, greatest.masked(x.load(i, lanes, mask), mask), most)

    most = greatest.over(length, raise_maximum)

    def add(total: Val, i: Val, lanes: int, mask: Val | None) -> Val:
        moved = x.load(i, lanes, mask) - most
        power = k.ops.exp(moved)
        y.store(moved if spec.log else power, i, mask)
        return total + sums.masked(power, mask)

    total = sums.over(length, add)
    last = _last_operand(k, spec, total)

    def finish(i: Val, lanes: int, mask: Val | None) -> None:
        y.store(_result(k, spec, y.load(i, lanes, mask), last), i, mask)

    for_each_vector(k, length, finish, k.lanes, has_masks(k.target, [spec.dtype.itemsize]), unroll=4)


def _columns(k: Kernel, spec: SoftmaxSpec, x: Pointer, y: Pointer) -> None:
    """Compute the softmax along the middle axis, with adjacent columns in a vector."""
    length, inner = k.dim(spec.length), k.dim(spec.inner)
    blocks = (inner + (k.lanes - 1)) // k.lanes
    steps = k.index(grain(8, _COST)) // k.ops.max(length * k.lanes, 1)
    with even_chunks(k, k.dim(spec.outer) * blocks, steps) as (start, stop), k.loop(start, stop) as item:
        place, block = item // blocks, item % blocks
        first = block * k.lanes
        begin = place * length * inner + first
        mask = None if _divides(k.lanes, spec.inner) else k.lane_mask(inner - first, k.lanes)
        _column_block(k, spec, x.at(begin), y.at(begin), mask)


def _divides(lanes: int, extent: Dim) -> bool:
    return isinstance(extent, int) and extent % lanes == 0


def _column_block(k: Kernel, spec: SoftmaxSpec, x: Pointer, y: Pointer, mask: Val | None) -> None:
    length, inner = k.dim(spec.length), k.dim(spec.inner)
    lowest, zero = k.constant(-math.inf, spec.dtype, k.lanes), k.zeros(spec.dtype, k.lanes)
    with k.fold(0, length, [lowest]) as fold:
        fold.values = [fast_max(k, x.load(fold.index * inner, k.lanes, mask), fold.values[0])]
    most = fold.values[0]
    with k.fold(0, length, [zero]) as fold:
        moved = x.load(fold.index * inner, k.lanes, mask) - most
        power = k.ops.exp(moved)
        y.store(moved if spec.log else power, fold.index * inner, mask)
        fold.values = [fold.values[0] + power]
    total = fold.values[0]
    last = _last_operand(k, spec, total)
    with k.loop(0, length) as j:
        y.store(_result(k, spec, y.load(j * inner, k.lanes, mask), last), j * inner, mask)
