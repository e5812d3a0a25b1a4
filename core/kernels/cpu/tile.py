"""A square tile transposed in registers."""

from __future__ import annotations

from collections.abc import Sequence

from core.codegen.lang import Kernel, Val
from core.kernels.target import Target

_LARGEST_SIDE = 16


def tile_side(target: Target, itemsize: int) -> int:
    """The side of the tile whose rows are vectors and all of which fits the registers."""
    return min(_LARGEST_SIDE, target.vector_bytes // itemsize, target.registers // 2)


def transpose_rows(k: Kernel, rows: Sequence[Val]) -> list[Val]:
    """Element (i, j) to (j, i): in stage d, the blocks of d x d elements off the diagonal change places."""
    tile = list(rows)
    distance = 1
    while distance < len(tile):
        for i in range(len(tile)):
            if i & distance == 0:
                tile[i], tile[i + distance] = _exchange(k, tile[i], tile[i + distance], distance)
        distance *= 2
    return tile


def _exchange(k: Kernel, upper: Val, lower: Val, distance: int) -> tuple[Val, Val]:
    """The right half blocks of `upper` against the left half blocks of `lower`."""
    lanes = upper.lanes
    to_upper = [lane if lane & distance == 0 else lanes + lane - distance for lane in range(lanes)]
    to_lower = [lane + distance if lane & distance == 0 else lanes + lane for lane in range(lanes)]
    return shuffle(k, upper, lower, to_upper), shuffle(k, upper, lower, to_lower)


def sums_of(k: Kernel, rows: Sequence[Val]) -> Val:
    """The sum of each row's lanes: that of row i in lane i. As many rows as lanes."""
    sums, lanes, distance = list(rows), rows[0].lanes, 1
    while len(sums) > 1:
        near = [lane if lane & distance == 0 else lanes + lane for lane in range(lanes)]
        far = [place ^ distance for place in near]
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [shuffle(k, a, b, near) + shuffle(k, a, b, far) for a, b in pairs]
        distance *= 2
    return sums[0]


def shuffle(k: Kernel, a: Val, b: Val, lanes: Sequence[int]) -> Val:
    """Lanes chosen from `a` (0, 1, ...) and from `b` (counted on)."""
    return Val(k, k.builder.shuffle(a.ir, b.ir, lanes), a.dtype, len(lanes))


def interleave(k: Kernel, planes: Sequence[Val]) -> list[Val]:
    """Element i of every plane in turn, then element i + 1: as many vectors as there are planes."""
    count, lanes = len(planes), planes[0].lanes
    return [_interleaved(k, planes, range(v * lanes, (v + 1) * lanes)) for v in range(count)]


def _interleaved(k: Kernel, planes: Sequence[Val], elements: range) -> Val:
    """The elements of that range of the interleaved planes: two planes give a part, and parts are laid together."""
    count, lanes = len(planes), len(elements)
    plane = [element % count for element in elements]
    value = planes[0]
    for i in range(0, count, 2):
        other = planes[min(i + 1, count - 1)]
        places = [element // count + (lanes if element % count > i else 0) for element in elements]
        part = shuffle(k, planes[i], other, places)
        value = part if i == 0 else shuffle(k, value, part, [at + lanes * (plane[at] >= i) for at in range(lanes)])
    return value
