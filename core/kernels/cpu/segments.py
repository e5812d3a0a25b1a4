"""Bounds of packed sequences, whose tokens lie one after the other."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer

_HALVINGS = 40  # no run has 2**40 tokens


def segment_count(k: Kernel, offsets: Pointer) -> Val:
    """The number of sequences that begin before token n, the end of all tokens.

    A binary search for the first of the n + 1 `offsets` that is n or more: the offset of sequence s is its first token,
    and the offsets after the last sequence are n.
    """
    with k.fold(0, _HALVINGS, [k.index(0), k.n]) as fold:
        low, high = fold.values
        middle = (low + high) // 2
        before = offsets.load(middle) < k.n
        fold.values = [k.ops.select(before, middle + 1, low), k.ops.select(before, high, middle)]
    return fold.values[0]
