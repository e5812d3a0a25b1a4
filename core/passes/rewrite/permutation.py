"""Permutations of axes, in Transpose's convention: axis i of the result is axis perm[i] of the input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.dim import floor_div
from lathe.core.ir.graph import Array, Node
from lathe.core.ir.types import Dim
from lathe.core.passes.rewrite.base import shape_of

Perm = tuple[int, ...]
Parts = list[list[int]]


def perm_of(node: Node) -> Perm | None:
    """The permutation of a Transpose, by default the reversal of axes; None for other nodes.

    None also if a Transpose has neither the attribute `perm` nor a known rank.
    """
    if node.op != "Transpose":
        return None
    perm, shape = perm_attribute(node, "perm"), shape_of(node.inputs[0])
    if perm is not None:
        return perm
    return tuple(range(len(shape)))[::-1] if shape is not None else None


def perm_attribute(node: Node, name: str) -> Perm | None:
    """The permutation in the attribute `name` of a node, such as `perm_a` of a FusedMatMul; None if it has none."""
    perm = node.attrs.get(name)
    return tuple(int(axis) for axis in perm) if isinstance(perm, tuple) else None  # type: ignore[arg-type]


def compose(first: Sequence[int] | None, second: Sequence[int] | None) -> Perm | None:
    """The permutation that applies `first` and then `second`. None is the identity, in arguments and result."""
    if first is None or second is None:
        chosen = first if second is None else second
        return _none_if_identity(tuple(chosen)) if chosen is not None else None
    return _none_if_identity(tuple(first[axis] for axis in second))


def inverse(perm: Sequence[int]) -> Perm:
    return tuple(perm.index(axis) for axis in range(len(perm)))


def is_view(perm: Sequence[int], shape: Sequence[Dim]) -> bool:
    """Whether axes of an extent other than 1 keep their order, so that the elements keep their order in memory."""
    moved = [axis for axis in perm if shape[axis] != 1]
    return moved == sorted(moved)


def split_axes(source: Sequence[Dim], target: Sequence[Dim]) -> list[list[int]] | None:
    """For each axis of the shape `source`, the axes of the shape `target` that a view splits it into.

    None if the view joins axes, or `source` has no axes.
    """
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


def common_factors(source: Sequence[Dim], target: Sequence[Dim]) -> tuple[list[Dim], Parts, Parts] | None:
    """The common factors of two shapes of one view: [6, 4] and [2, 12] have the factors 2, 3, 4.

    Returns the factors' extents, and for each axis of `source` and of `target` the indices of its factors. An axis of
    extent 1 has none. None if one shape does not come from the other by splitting and joining axes alone, or an extent
    is 0.
    """
    extents: list[Dim] = []
    waiting, parts = ([*source], [*target]), (Parts(), Parts())
    left: list[Dim] = [1, 1]  # what remains of the current axis on each side
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


def permute_constant(array: Array, perm: Perm) -> Array:
    """A constant that broadcasts to a tensor, permuted like that tensor, without leading axes of extent 1."""
    full = array.reshape((1,) * (len(perm) - array.ndim) + array.shape)
    return without_leading_ones(np.transpose(full, perm))


def without_leading_ones(array: Array) -> Array:
    """The array without its leading axes of extent 1."""
    leading = next((axis for axis, size in enumerate(array.shape) if size != 1), array.ndim)
    return array.reshape(array.shape[leading:])


def _none_if_identity(perm: Perm) -> Perm | None:
    return None if perm == tuple(range(len(perm))) else perm
