"""Converts a value to an element type and rank of which a graph has no value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fuzz.graphs.evaluate import tensor_type
from tests.fuzz.graphs.values import BF16, BOOL, F32, FLOATS, STRING, UNSIGNED, Item, UnfitNode

if TYPE_CHECKING:
    from tests.fuzz.graphs.grower import Grower


def adapted(
    f: Grower, dtypes: Sequence[np.dtype[Any]], ranks: Sequence[int] | None, where: Callable[[Item], bool]
) -> Item:
    """A float32 value converted to one of the types and ranks. UnfitNode if there is none, or if `where` is false."""
    dtype = f.of(dtypes)
    found = [v for v in f.visible() if v.dtype == F32 and v.exact and v.rank(f.alive) is not None]
    if not found or dtype in (STRING, BF16):
        raise UnfitNode(f"no value of {dtypes} and rank {ranks}")
    x = f.of(found)
    if ranks is not None:
        x = _of_rank(f, x, f.of(ranks))
    if dtype == BOOL:
        x = f.one("Less", x, f.constant(0, np.float32))
    elif dtype != F32:
        if dtype not in FLOATS:  # all results are in the range of the narrowest type
            x = f.one("Mul", f.one("Tanh", x), f.constant(f.of((3, 20, 100)), np.float32))
        x = f.one("Cast", f.one("Abs", x) if dtype in UNSIGNED else x, to=tensor_type(np.zeros(0, dtype)))
    if not where(x):
        raise UnfitNode("what was adapted does not do")
    return x


def _of_rank(f: Grower, x: Item, rank: int) -> Item:
    missing = rank - (x.rank(f.alive) or 0)
    if missing == 0:
        return x
    if missing < 0:
        if rank != 2:
            raise UnfitNode("of too many axes")
        return f.one("Flatten", x, axis=1)
    axes = [rank - 1 - index for index in range(missing)][::-1]
    return f.one("Unsqueeze", x, axes=axes) if f.opset < 13 else f.one("Unsqueeze", x, f.vector(axes))
