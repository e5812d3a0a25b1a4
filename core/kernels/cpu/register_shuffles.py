"""Register shuffles: transposed square tiles, sums of rows, interleaved planes."""

from __future__ import annotations

from collections.abc import Sequence

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.kernels.target import Target

_LARGEST_SIDE = 16


def tile_side(target: Target, itemsize: int) -> int:
    """The side of the largest square tile whose transposition fits the registers: at most 16 and at most a vector."""
    return min(_LARGEST_SIDE, target.vector_bytes // itemsize, target.registers // 2)


def transpose_rows(k: Kernel, rows: Sequence[Val]) -> list[Val]:
    """The rows of the transposed square tile: lane j of row i is lane i of `rows[j]`.

    In stage d = 1, 2, 4, ..., off-diagonal blocks of d x d elements are exchanged.
    """
    tile = list(rows)
    distance = 1
    while distance < len(tile):
        for i in range(len(tile)):
            if i & distance == 0:
                tile[i], tile[i + distance] = _exchange(k, tile[i], tile[i + distance], distance)
        distance *= 2
    return tile


def _exchange(k: Kernel, upper: Val, lower: Val, distance: int) -> tuple[Val, Val]:
    """Exchange the right blocks of `upper` with the left blocks of `lower`, each `distance` wide."""
    lanes = upper.lanes
    to_upper = [lane if lane & distance == 0 else lanes + lane - distance for lane in range(lanes)]
    to_lower = [lane + distance if lane & distance == 0 else lanes + lane for lane in range(lanes)]
    return shuffle(k, upper, lower, to_upper), shuffle(k, upper, lower, to_lower)


def row_sums(k: Kernel, rows: Sequence[Val]) -> Val:
    """A vector with the sum of row i in lane i. There are as many rows as lanes."""
    sums, lanes, distance = list(rows), rows[0].lanes, 1
    while len(sums) > 1:
        near = [lane if lane & distance == 0 else lanes + lane for lane in range(lanes)]
        far = [place ^ distance for place in near]
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [shuffle(k, a, b, near) + shuffle(k, a, b, far) for a, b in pairs]
        distance *= 2
    return sums[0]


def shuffle(k: Kernel, a: Val, b: Val, lanes: Sequence[int]) -> Val:
    """The vector of the elements at positions `lanes` of the concatenation of `a` and `b`."""
    return Val(k, k.builder.shuffle(a.ir, b.ir, lanes), a.dtype, len(lanes))


def interleave(k: Kernel, planes: Sequence[Val]) -> list[Val]:
    """The planes interleaved: element 0 of each plane, then element 1, ...; as many vectors as there are planes."""
    count, lanes = len(planes), planes[0].lanes
    return [_interleave_range(k, planes, range(v * lanes, (v + 1) * lanes)) for v in range(count)]


def _interleave_range(k: Kernel, planes: Sequence[Val], elements: range) -> Val:
    """A vector with the elements at positions `elements` of the interleaved planes.

    Shuffles combine two planes at a time, then their results.
    """
    count, lanes = len(planes), len(elements)
    plane = [element % count for element in elements]
    value = planes[0]
    for i in range(0, count, 2):
        other = planes[min(i + 1, count - 1)]
        places = [element // count + (lanes if element % count > i else 0) for element in elements]
        pair = shuffle(k, planes[i], other, places)
        value = pair if i == 0 else shuffle(k, value, pair, [at + lanes * (plane[at] >= i) for at in range(lanes)])
    return value
