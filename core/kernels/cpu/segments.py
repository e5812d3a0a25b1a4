"""Where the sequences are whose tokens lie one after the other."""

from __future__ import annotations

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer

_HALVINGS = 40  # no run has 2**40 tokens


def segment_count(k: Kernel, offsets: Pointer) -> Val:
    """How many sequences begin before the end, which is n: the first place of `offsets` that holds n."""
    with k.fold(0, _HALVINGS, [k.index(0), k.n]) as fold:
        low, high = fold.values
        middle = (low + high) // 2
        before = offsets.load(middle) < k.n
        fold.values = [k.ops.select(before, middle + 1, low), k.ops.select(before, high, middle)]
    return fold.values[0]
