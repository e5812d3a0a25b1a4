"""Permutations of axes, as Transpose has them: axis i of the result is axis perm[i] of the input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.ir.dim import floor_div
from core.ir.graph import Array, Node
from core.ir.types import Dim
from core.passes.base import shape_of

Perm = tuple[int, ...]
Parts = list[list[int]]


def perm_of(node: Node) -> Perm | None:
    """The permutation of a Transpose; None for other nodes, or when the rank is not known."""
    if node.op != "Transpose":
        return None
    perm, shape = perm_attribute(node, "perm"), shape_of(node.inputs[0])
    if perm is not None:
        return perm
    return tuple(range(len(shape)))[::-1] if shape is not None else None


def perm_attribute(node: Node, name: str) -> Perm | None:
    """The permutation that an operand of a fused node is taken by; None when it is taken as it is."""
    perm = node.attrs.get(name)
    return tuple(int(axis) for axis in perm) if isinstance(perm, tuple) else None  # type: ignore[arg-type]


def compose(first: Sequence[int] | None, second: Sequence[int] | None) -> Perm | None:
    """One permutation for `first` followed by `second`; None stands for the identity, in arguments and answer."""
    if first is None or second is None:
        chosen = first if second is None else second
        return _reduced(tuple(chosen)) if chosen is not None else None
    return _reduced(tuple(first[axis] for axis in second))


def inverse(perm: Sequence[int]) -> Perm:
    return tuple(perm.index(axis) for axis in range(len(perm)))


def is_view(perm: Sequence[int], shape: Sequence[Dim]) -> bool:
    """Whether only axes of extent 1 change their place among the others: the elements keep their order."""
    moved = [axis for axis in perm if shape[axis] != 1]
    return moved == sorted(moved)


def split_axes(source: Sequence[Dim], target: Sequence[Dim]) -> list[list[int]] | None:
    """For each axis of `source` the axes of `target` that it is split into; None when a view joins axes."""
    parts: list[list[int]] = []
    at = 0
    for size in source:
        part: list[int] = []
        extent: Dim = 1
        while extent != size and at < len(target):
            extent = extent * target[at]
            part.append(at)
            at += 1
        if extent != size:
            return None
        parts.append(part)
    rest = range(at, len(target))
    if not parts or any(target[axis] != 1 for axis in rest):
        return None
    parts[-1] += rest
    return parts


def common_axes(source: Sequence[Dim], target: Sequence[Dim]) -> tuple[list[Dim], Parts, Parts] | None:
    """The axes that both the axes of `source` and those of `target` consist of: their extents, and which of them each
    axis of `source`, and of `target`, consists of. One of extent 1 consists of none. None for a view that does more
    than split axes and join them."""
    extents: list[Dim] = []
    waiting, parts = ([*source], [*target]), (Parts(), Parts())
    left: list[Dim] = [1, 1]  # of the axis under way on either side
    while 0 not in (*source, *target):
        for side in (0, 1):
            while left[side] == 1 and waiting[side]:
                left[side] = waiting[side].pop(0)
                parts[side].append([])
        if left == [1, 1]:
            return extents, *parts
        common = next((dim for dim in left if all(floor_div(each, dim) * dim == each for each in left)), 1)
        if common == 1:
            return None
        for side in (0, 1):
            left[side] = floor_div(left[side], common)
            parts[side][-1].append(len(extents))
        extents.append(common)
    return None


def permuted(array: Array, perm: Perm) -> Array:
    """A constant that broadcasts to a tensor, for that tensor transposed; without needless leading axes."""
    full = array.reshape((1,) * (len(perm) - array.ndim) + array.shape)
    return trimmed_axes(np.transpose(full, perm))


def trimmed_axes(array: Array) -> Array:
    """The array without its leading axes of extent 1."""
    leading = next((axis for axis, size in enumerate(array.shape) if size != 1), array.ndim)
    return array.reshape(array.shape[leading:])


def _reduced(perm: Perm) -> Perm | None:
    return None if perm == tuple(range(len(perm))) else perm
