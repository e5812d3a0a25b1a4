"""TopK: the first elements of each line, in a binary heap of as many keys as there are results.

A key holds an element's rank in the order of its type in the upper bits and its index in the lower bits, so that no two
keys are equal. The root of the heap is the least key; a greater key replaces it. Most elements of a long line are less
than the root, which one comparison shows for a whole vector.
"""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks
from lathe.core.kernels.target import Target
from lathe.core.kernels.topk.spec import TopKSpec

F32, I32, I64 = DType.FLOAT32, DType.INT32, DType.INT64

_NO_KEY, _EVERY_KEY = -(2**63), 2**63 - 1  # below and above all keys
_LAST_INDEX = 2**32 - 1
_WORK = 1 << 12  # elements per task


def generate(spec: TopKSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, values = (k.operand(index, spec.dtype) for index in range(2))
    indices = k.operand(2, I64) if spec.indices else None
    heap = Heap(k, k.scratch(3 if spec.indices else 2, spec.count * 8, I64), spec.count)
    length, inner = k.dim(spec.length), k.dim(spec.inner)
    lines = k.dim(spec.outer) * inner
    with even_chunks(k, lines, k.index(_WORK) // k.ops.max(length, 1)) as (start, stop), k.loop(start, stop) as line:
        before, beside = line // inner, line % inner
        source, first = x.at(before * inner * length + beside), before * inner * spec.count + beside
        heap.clear()
        _select(k, spec, source, heap, length, inner)
        with k.loop(0, spec.count) as taken:
            place = k.index(spec.count - 1) - taken
            index = k.index(_LAST_INDEX) - k.ops.bit_and(heap.take(), _LAST_INDEX)
            values.store(source.load(index * inner), first + place * inner)
            if indices is not None:
                indices.store(index, first + place * inner)
    return k


@dataclass(frozen=True)
class Heap:
    """A binary heap of `count` keys, whose root is the least."""

    k: Kernel
    keys: Pointer
    count: int

    def clear(self) -> None:
        with self.k.loop(0, self.count) as i:
            self.keys.store(self.k.index(_NO_KEY), i)

    def least(self) -> Val:
        return self.keys.load(0)

    def replace(self, key: Val) -> None:
        """Replace the least key by `key`, which sinks below the keys that are less."""
        k, last = self.k, self.k.index(self.count - 1)
        levels = self.count.bit_length() - 1
        with k.fold(0, levels, [k.index(0)]) as fold:
            hole = fold.values[0]
            left = hole * 2 + 1
            ahead = k.ops.min(left, last)
            right = k.ops.min(left + 1, last)
            first, second = self.keys.load(ahead), self.keys.load(right)
            child, lesser = k.ops.select(second < first, right, ahead), k.ops.min(first, second)
            sinks = (left <= last) & (lesser < key)
            self.keys.store(k.ops.select(sinks, lesser, key), hole)
            fold.values = [k.ops.select(sinks, child, hole)]
        self.keys.store(key, fold.values[0])

    def take(self) -> Val:
        """Return the least key and replace it by a key greater than all, so that it is not returned again."""
        key = self.least()
        self.replace(self.k.index(_EVERY_KEY))
        return key


def _select(k: Kernel, spec: TopKSpec, source: Pointer, heap: Heap, length: Val, step: Val) -> None:
    """Put the keys of the elements that come first in a line into the heap.

    The line has `length` elements from `source` on, `step` apart.
    """

    def one(index: Val) -> None:
        place = _order(k, spec, _load(spec, source, index * step, 1))
        key = place.cast(I64) * (_LAST_INDEX + 1) + (k.index(_LAST_INDEX) - index)
        with k.when(key > heap.least()):
            heap.replace(key)

    lanes, done = k.lanes, k.index(0)
    if spec.inner == 1 and lanes > 1:
        done = length // lanes * lanes
        with k.loop(0, done, lanes) as at:
            least = k.ops.shift_right(heap.least(), 32).cast(I32)
            some = _order(k, spec, _load(spec, source, at, lanes)) >= least.splat(lanes)
            with k.when(k.ops.any(some)), k.loop(at, at + lanes) as index:
                one(index)
    with k.loop(done, length) as index:
        one(index)


def _load(spec: TopKSpec, source: Pointer, offset: Val, lanes: int) -> Val:
    return source.load(offset, lanes).cast(F32 if spec.dtype.is_float else I32)


def _order(k: Kernel, spec: TopKSpec, value: Val) -> Val:
    """An int32 that is greater for elements that come first: the greatest, or the least if `spec.least`.

    The bits of floats, read as integers, are in order, except that those of negative numbers run backwards. Zeros are
    equal, and NaN is the greatest.
    """
    if value.dtype is F32:
        bits = k.ops.bitcast(value + 0.0, I32)  # -0 becomes +0
        ordered = k.ops.bit_xor(bits, k.ops.bit_and(k.ops.shift_right(bits, 31), 0x7FFFFFFF))
        value = k.ops.select(k.ops.is_nan(value), k.constant(0x7FFFFFFF, I32, value.lanes), ordered)
    return k.ops.bit_not(value) if spec.least else value
