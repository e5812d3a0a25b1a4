"""Tilings that split the elements of a loop nest among the programs of a GPU kernel."""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.ir.dim import floor_div, product
from lathe.core.ir.types import Dim
from lathe.core.kernels.shared.nest import Nest

_SIDE = 32  # of a square tile: a row of it has at least 64 bytes
_BLOCK = 1024  # elements of a program


@dataclass(frozen=True, slots=True)
class Tiling:
    """`loops` of the nest are cut into blocks of `sizes` (powers of two); a program handles one block.

    Of all other loops a program handles one iteration. Without loops, a program handles `sizes[0]` consecutive elements
    of the nest in row-major order.
    """

    loops: tuple[int, ...]
    sizes: tuple[int, ...]
    warps: int = 4


def blocks(extent: Dim, size: int) -> Dim:
    """The number of blocks of `size` that cover `extent`: the quotient rounded up."""
    return floor_div(extent + (size - 1), size)


def programs(nest: Nest, tiling: Tiling) -> Dim:
    """The number of programs that cover all elements of the nest with this tiling."""
    if not tiling.loops:
        return blocks(product(nest.extents), tiling.sizes[0])
    cut = dict(zip(tiling.loops, tiling.sizes, strict=True))
    return product(blocks(extent, cut[k]) if k in cut else extent for k, extent in enumerate(nest.extents))


def tilings(nest: Nest) -> tuple[Tiling, ...]:
    """Tilings of a nest; the one expected to be fastest comes first.

    Adjacent threads should read and write adjacent elements. If an operand is contiguous along a loop other than the
    last, a tile of both loops is read along one of them and written along the other.
    """
    flat = tuple(Tiling((), (size,), warps) for size, warps in ((_BLOCK, 4), (_BLOCK // 2, 4), (2 * _BLOCK, 8)))
    across = _across(nest)
    if across is None:
        return flat
    sizes = ((_SIDE, _SIDE), (2 * _SIDE, _SIDE), (_SIDE, 2 * _SIDE))
    squares = tuple(Tiling((across, nest.rank - 1), size) for size in sizes)
    return (*squares, *flat) if _is_long(nest.extents[across]) and _is_long(nest.extents[-1]) else (*flat, *squares)


def _across(nest: Nest) -> int | None:
    """The loop before the last along which an operand has stride 1, while it has neither 0 nor 1 along the last loop.

    None if there is no such operand.
    """
    for strides in nest.strides:
        if strides[-1] in (0, 1):
            continue
        for k in range(nest.rank - 1):
            if strides[k] == 1:
                return k
    return None


def _is_long(extent: Dim) -> bool:
    return not isinstance(extent, int) or extent >= _SIDE // 4
