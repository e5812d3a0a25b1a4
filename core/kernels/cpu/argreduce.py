"""ArgMax and ArgMin."""

from __future__ import annotations

from core.codegen.lang import Kernel, Pointer, Val
from core.ir.types import DType
from core.kernels.catalog.reduce import ArgReduceSpec
from core.kernels.cpu.lanes import Chains, highest, lowest
from core.kernels.cpu.nest import even_chunks, grain
from core.kernels.target import Target

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
    """Two passes along a row: the value, then where it first (or last) is. A NaN counts as the extreme, as in NumPy."""
    length = k.dim(spec.length)
    best = k.ops.min if spec.least else k.ops.max
    values = Chains(k, spec.dtype, highest(spec.dtype) if spec.least else lowest(spec.dtype), best)
    earlier = k.ops.max if spec.last else k.ops.min
    places = Chains(k, _I64, -1 if spec.last else _NOWHERE, earlier, count=2)
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
    """Down the middle axis with neighbouring columns in the lanes of a vector."""
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
            better = _better(k, spec, value, fold.values[0])
            fold.values = [
                k.ops.select(better, value, fold.values[0]), k.ops.select(better, fold.index, fold.values[1])
            ]  # fmt: skip
        y.store(fold.values[1], place * inner + first, mask)


def _better(k: Kernel, spec: ArgReduceSpec, value: Val, best: Val) -> Val:
    beats = k.ops.lt(value, best) if spec.least else k.ops.lt(best, value)
    if spec.last:
        beats = beats | k.ops.eq(value, best) | (_is_nan(k, value) & _is_nan(k, best))
    return (beats | _is_nan(k, value)) & (~_is_nan(k, best) | _is_nan(k, value) if spec.last else ~_is_nan(k, best))
