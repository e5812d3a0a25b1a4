"""Softmax: rows that fit the registers are read once; longer ones in three passes; other axes by columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from core.codegen.lang import Kernel, Pointer, Val
from core.ir.types import Dim
from core.kernels.catalog.softmax import SoftmaxSpec
from core.kernels.cpu.lanes import Chains, larger, parts_of, tree
from core.kernels.cpu.nest import cover, even_chunks, grain, has_masks
from core.kernels.target import Target

_COST = 14  # operations for one element


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
    """The whole row in registers."""
    parts = parts_of(k, length)
    lowest = k.constant(-math.inf, spec.dtype)
    row = [k.ops.select(p.mask, v, lowest) if p.mask else v for p in parts for v in [x.load(p.start, p.lanes, p.mask)]]
    most = k.ops.reduce(tree(row, lambda a, b: larger(k, a, b)), lambda a, b: larger(k, a, b))
    moved = [v - most for v in row]
    powers = [k.ops.exp(v) for v in moved]
    total = k.ops.sum(tree(powers, k.ops.add))
    results = _finish(k, spec, moved if spec.log else powers, total)
    for part, value in zip(parts, results, strict=True):
        y.store(value, part.start, part.mask)


def _finish(k: Kernel, spec: SoftmaxSpec, values: Sequence[Val], total: Val) -> list[Val]:
    last = _last_operand(k, spec, total)
    return [_result(k, spec, value, last) for value in values]


def _last_operand(k: Kernel, spec: SoftmaxSpec, total: Val) -> Val:
    """What `_result` takes besides each element, given the sum of the powers."""
    return k.ops.log(total) if spec.log else 1.0 / total


def _result(k: Kernel, spec: SoftmaxSpec, value: Val, last: Val) -> Val:
    """`value`: a power, or where the logarithm is wanted its exponent. The sum is no number where a power is none."""
    if spec.log:
        return value - last
    share = value * last
    return k.ops.select(k.ops.is_nan(share), k.zeros(spec.dtype, share.lanes), share) if spec.guarded else share


def _long_row(k: Kernel, spec: SoftmaxSpec, length: Val, x: Pointer, y: Pointer) -> None:
    """Greatest element; exponentials and their sum; scaling. The row stays in the cache meanwhile."""
    greatest = Chains(k, spec.dtype, -math.inf, lambda a, b: larger(k, a, b))
    sums = Chains(k, spec.dtype, 0, k.ops.add, count=2)

    def raise_(most: Val, i: Val, lanes: int, mask: Val | None) -> Val:
        return larger(k, greatest.masked(x.load(i, lanes, mask), mask), most)

    most = greatest.over(length, raise_)

    def add(total: Val, i: Val, lanes: int, mask: Val | None) -> Val:
        moved = x.load(i, lanes, mask) - most
        power = k.ops.exp(moved)
        y.store(moved if spec.log else power, i, mask)
        return total + sums.masked(power, mask)

    total = sums.over(length, add)
    last = _last_operand(k, spec, total)

    def finish(i: Val, lanes: int, mask: Val | None) -> None:
        y.store(_result(k, spec, y.load(i, lanes, mask), last), i, mask)

    cover(k, length, finish, k.lanes, has_masks(k.target, [spec.dtype.itemsize]), unroll=4)


def _columns(k: Kernel, spec: SoftmaxSpec, x: Pointer, y: Pointer) -> None:
    """Neighbouring columns side by side in a vector."""
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
        fold.values = [larger(k, x.load(fold.index * inner, k.lanes, mask), fold.values[0])]
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
