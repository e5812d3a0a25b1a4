"""The end of attention's first product: the scores of a tile of keys, with a query per lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.kernels.cpu.reduction import fast_max


def store_scores(
    k: Kernel,
    grid: Sequence[Sequence[Val]],
    place: Pointer,
    width: int,
    most: list[Val],
    epilogue: Callable[[Val, int, int], Val],
) -> list[Val]:
    """Store the scores grid[r][v], after the epilogue, in row r at `place`; rows are `width` elements apart.

    Vector number v has one query per lane, and row r is a key. `epilogue(score, r, v)` is the epilogue of a vector.
    Returns the greatest score of each query, with `most`, those over the keys before, included.
    """
    for r, row in enumerate(grid):
        finished = [epilogue(value, r, v) for v, value in enumerate(row)]
        for v, value in enumerate(finished):
            place.store(value, r * width + v * value.lanes)
        most = [fast_max(k, value, before) for value, before in zip(finished, most, strict=True)]
    return most
