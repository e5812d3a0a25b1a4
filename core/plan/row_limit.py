"""The largest batch that GPU kernels can index: elements are indexed by int32, and grids have limited sizes."""

from __future__ import annotations

from collections.abc import Iterable

from lathe.core.ir.dim import evaluate
from lathe.core.ir.types import Dim

MAX_ELEMENTS = (1 << 31) - 1  # the most elements of one tensor: kernels index by int32
MAX_GRID = (1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1  # the largest grid of CUDA along x, y and z
_UNLIMITED = 1 << 31  # rows: more than any batch has


def max_rows(sizes: Iterable[tuple[Dim, int]]) -> int:
    """The largest n for which every size is within its limit, at most 2**31; 0 if n = 1 is too large.

    `sizes` are pairs of a dimension over `n`, which must not decrease as n grows, and its limit.
    """
    return min((_largest_batch(size, limit) for size, limit in dict.fromkeys(sizes)), default=_UNLIMITED)


def _largest_batch(size: Dim, limit: int) -> int:
    """The largest n up to 2**31 with `size` <= `limit`, by binary search; `size` is a dimension over `n`."""
    low, high = 0, _UNLIMITED
    while low < high:
        middle = (low + high + 1) // 2
        if evaluate(size, {"n": middle}) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
