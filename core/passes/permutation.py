"""Permutations of axes, as Transpose has them: axis i of the result is axis perm[i] of the input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.ir.dim import floor_div
from core.ir.graph import Array, Node
from core.ir.types import Dim
from core.passes.base import shape_of

Perm = tuple[int, ...]


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


def refined(source: Sequence[Dim], target: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """The shape with the fewest axes that `source` is split into and that are joined to `target`; None where extents do
    not divide each other."""
    fine: list[Dim] = []
    left, right = ([dim for dim in reversed(shape) if dim != 1] for shape in (source, target))
    while left and right:
        a, b = left.pop(), right.pop()
        for one, other, rest in ((a, b, right), (b, a, left)):
            if other != 0 and one != 0 and floor_div(other, one) * one == other:
                fine.append(one)
                rest += [floor_div(other, one)] if one != other else []
                break
        else:
            return None
    return tuple(fine) if not left and not right else None


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
