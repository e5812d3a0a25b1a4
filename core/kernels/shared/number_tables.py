"""Tables of the numbers that codes of a few bits stand for."""

from __future__ import annotations

from collections.abc import Sequence


def first_of_count(numbers: Sequence[float]) -> int | None:
    """The first of one or more numbers that are integers a, a + 1, a + 2 and so on; None for other numbers."""
    first = numbers[0]
    counts_up = first.is_integer() and all(number == first + i for i, number in enumerate(numbers))
    return int(first) if counts_up else None
