"""How the programs of a GPU's kernel share the elements of a loop nest."""

from __future__ import annotations

from dataclasses import dataclass

from core.ir.dim import floor_div, product
from core.ir.types import Dim
from core.kernels.catalog.nest import Nest

_SIDE = 32  # of a square tile: a line of it is 64 bytes or more
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """`loops` of the nest are cut into pieces of `sizes` (powers of two), of which a program has one, at one place of
    all other loops. No loops: a program has `sizes[0]` neighbours of all elements in order."""

    loops: tuple[int, ...]
    sizes: tuple[int, ...]
    warps: int = 4


def blocks(extent: Dim, size: int) -> Dim:
    """How many pieces of `size` cover `extent`."""
    return floor_div(extent + (size - 1), size)


def programs(nest: Nest, tiling: Tiling) -> Dim:
    """Programs that cover the nest."""
    if not tiling.loops:
        return blocks(product(nest.extents), tiling.sizes[0])
    cut = dict(zip(tiling.loops, tiling.sizes, strict=True))
    return product(blocks(extent, cut[k]) if k in cut else extent for k, extent in enumerate(nest.extents))


def tilings(nest: Nest) -> tuple[Tiling, ...]:
    """Ways to cover a nest, the likeliest best first.

    Neighbouring threads should read and write neighbours. Where an operand runs along another loop than the last one, a
    square of both loops is read by lines of the one and written by lines of the other.
    """
    flat = tuple(Tiling((), (size,), warps) for size, warps in ((_BLOCK, 4), (_BLOCK // 2, 4), (2 * _BLOCK, 8)))
    across = _across(nest)
    if across is None:
        return flat
    sizes = ((_SIDE, _SIDE), (2 * _SIDE, _SIDE), (_SIDE, 2 * _SIDE))
    squares = tuple(Tiling((across, nest.rank - 1), size) for size in sizes)
    return (*squares, *flat) if _is_long(nest.extents[across]) and _is_long(nest.extents[-1]) else (*flat, *squares)


def _across(nest: Nest) -> int | None:
    """The loop, other than the last, along which an operand's elements are neighbours."""
    for strides in nest.strides:
        if strides[-1] in (0, 1):
            continue
        for k in range(nest.rank - 1):
            if strides[k] == 1:
                return k
    return None


def _is_long(extent: Dim) -> bool:
    return not isinstance(extent, int) or extent >= _SIDE // 4
