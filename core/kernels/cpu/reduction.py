"""Reductions of contiguous elements to one value, in several independent vector accumulators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lathe.core.codegen.lang import Index, Kernel, Val
from lathe.core.codegen.registers import is_signed, register_type
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import has_masks

Combine: TypeAlias = Callable[[Val, Val], Val]
# step(accumulator, i, lanes, mask): the accumulator after `lanes` more elements, from i on, where the mask is true.
Accumulate: TypeAlias = Callable[[Val, Val, int, Val | None], Val]


@dataclass(frozen=True, slots=True)
class Part:
    """One vector of elements whose number is known at compile time; `mask` is set for an incomplete last vector."""

    start: int
    lanes: int
    mask: Val | None


def parts_of(k: Kernel, length: int, lanes: int = 0) -> list[Part]:
    """The vectors that cover `length` elements, the last one with a mask if it is incomplete.

    `lanes` are the elements per vector; 0 stands for `k.lanes`.
    """
    lanes = lanes or k.lanes
    return [
        Part(start, lanes, None if start + lanes <= length else k.lane_mask(length - start, lanes))
        for start in range(0, length, lanes)
    ]


def reduce_pairwise(values: Sequence[Val], combine: Combine) -> Val:
    """All values combined pairwise, so that rounding errors and latency grow with the logarithm of their number."""
    level = list(values)
    while len(level) > 1:
        paired = [combine(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def lowest(dtype: DType) -> float:
    """The least value of a type (minus infinity for floats), the identity of a maximum."""
    if dtype.is_float:
        return -math.inf
    return -(1 << (8 * dtype.itemsize - 1)) if is_signed(dtype) else 0


def highest(dtype: DType) -> float:
    """The greatest value of a type (infinity for floats), the identity of a minimum."""
    if dtype.is_float:
        return math.inf
    return -1 - int(lowest(dtype)) if is_signed(dtype) else (1 << (8 * dtype.itemsize)) - 1


def fast_max(k: Kernel, a: Val, b: Val) -> Val:
    """The maximum in one instruction. It may lose a NaN: use it only where another operation propagates the NaN."""
    return k.ops.select(k.ops.lt(b, a), a, b)


class ParallelAccumulators:
    """Accumulators of a reduction: `count` vectors in rotation, and a scalar for the tail if there are no masks."""

    def __init__(self, k: Kernel, dtype: DType, identity: float, combine: Combine, count: int = 4) -> None:
        self.k, self.dtype, self.identity, self.combine, self.count = k, dtype, identity, combine, count
        self.lanes = max(1, k.target.vector_bytes // dtype.itemsize)
        self.masks = has_masks(k.target, [dtype.itemsize])

    @property
    def start(self) -> list[Val]:
        """The accumulators before the first element: all hold the identity."""
        vector = self.k.constant(self.identity, self.dtype, self.lanes)
        return [vector] * self.count + ([] if self.masks else [self.k.constant(self.identity, self.dtype)])

    def extend(self, values: Sequence[Val], length: Index, step: Accumulate) -> list[Val]:
        """The accumulators, given as `values`, after `length` further elements, which `step` combines into them."""
        k, lanes, count = self.k, self.lanes, self.count
        size, done = k.index(length), k.index(0)
        current = list(values)
        if count > 1 and (size.constant is None or size.constant >= count * lanes):
            until = size // (count * lanes) * (count * lanes)
            with k.fold(done, until, current[:count], count * lanes) as fold:
                fold.values = [step(acc, fold.index + i * lanes, lanes, None) for i, acc in enumerate(fold.values)]
            current[:count], done = fold.values, until
        until = size // lanes * lanes
        with k.fold(done, until, current[:1], lanes) as fold:
            fold.values = [step(fold.values[0], fold.index, lanes, None)]
        current[0] = fold.values[0]
        return self._tail(current, until, size, step)

    def _tail(self, values: list[Val], done: Val, size: Val, step: Accumulate) -> list[Val]:
        k, rest = self.k, size - done
        if rest.constant == 0:
            return values
        if not self.masks:
            with k.fold(done, size, values[-1:]) as fold:
                fold.values = [step(fold.values[0], fold.index, 1, None)]
            return [*values[:-1], fold.values[0]]
        mask = k.lane_mask(rest, self.lanes)
        if rest.constant is not None:
            return [step(values[0], done, self.lanes, mask), *values[1:]]
        last = k.choose(rest > 0, lambda: [step(values[0], done, self.lanes, mask)], lambda: [values[0]])
        return [last[0], *values[1:]]

    def result(self, values: Sequence[Val]) -> Val:
        """All accumulators combined into one scalar."""
        total = self.k.ops.reduce(reduce_pairwise(values[: self.count], self.combine), self.combine)
        return total if self.masks else self.combine(total, values[-1])

    def over(self, length: Index, step: Accumulate) -> Val:
        """The reduction of `length` elements, which `step` loads and combines into an accumulator, to a scalar."""
        return self.result(self.extend(self.start, length, step))

    def masked(self, value: Val, mask: Val | None) -> Val:
        """`value` where the mask is true, the identity elsewhere."""
        return value if mask is None else self.k.ops.select(mask, value, self.k.constant(self.identity, self.dtype))


def whole_numbers(k: Kernel, total: Val) -> Val:
    """A float32 vector of whole numbers below 2^31 as int32."""
    return Val(
        k, k.builder.convert("fptosi", total.ir, register_type(DType.INT32, total.lanes)), DType.INT32, total.lanes
    )
