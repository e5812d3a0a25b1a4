"""How many rows the kernels of a GPU reach: they count elements, and programs, in numbers of limited size."""

from __future__ import annotations

from collections.abc import Iterable

from core.ir.dim import evaluate
from core.ir.types import Dim

ELEMENTS = (1 << 31) - 1  # of one tensor: kernels index by int32
PROGRAMS = (1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1  # along x, y and z, by CUDA
_MANY = 1 << 31  # rows that no batch has


def most_rows(sizes: Iterable[tuple[Dim, int]]) -> int:
    """The largest n for which no size (which never shrinks as n grows) goes beyond its limit; 0 where one row does."""
    return min((_largest(size, limit) for size, limit in dict.fromkeys(sizes)), default=_MANY)


def _largest(size: Dim, limit: int) -> int:
    low, high = 0, _MANY
    while low < high:
        middle = (low + high + 1) // 2
        if evaluate(size, {"n": middle}) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
