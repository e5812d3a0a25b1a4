"""Boxes: strided parts of row-major tensors, with offsets and strides in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from lathe.core.ir.graph import Value


class Spans(NamedTuple):
    """Disjoint byte ranges of equal length, in ascending order."""

    starts: Sequence[int]
    length: int

    def moved(self, by: int) -> Spans:
        return Spans([start + by for start in self.starts], self.length) if by else self

    @property
    def hull(self) -> tuple[int, int]:
        """The start of the first range and the end of the last one; (0, 0) if there are no ranges."""
        return (self.starts[0], self.starts[-1] + self.length) if self.starts else (0, 0)

    def overlaps(self, other: Spans) -> bool:
        """Whether a byte lies in a range of this object and in a range of `other`."""
        (low, high), (first, end) = self.hull, other.hull
        if low >= end or first >= high:
            return False
        if len(self.starts) == 1 and len(other.starts) == 1:
            return True
        mine, theirs = np.asarray(self.starts), np.asarray(other.starts)
        before = np.searchsorted(theirs, mine + self.length) - 1  # the last of theirs that begins before mine ends
        found = before >= 0
        return bool(np.any(theirs[before[found]] + other.length > mine[found]))


@dataclass(frozen=True, slots=True)
class Layout:
    """A strided array: elements of `itemsize` bytes, the first at byte `start`; `strides` are in bytes."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def loops(self) -> list[tuple[int, int]]:
        """The extent and stride of each axis, outermost first, without axes of extent 1."""
        return [(extent, stride) for extent, stride in zip(self.shape, self.strides, strict=True) if extent != 1]

    @property
    def is_dense(self) -> bool:
        """Whether the elements are contiguous, in row-major order; true without elements."""
        if 0 in self.shape:
            return True
        dense = Layout(0, self.shape, dense_strides(self.shape, self.itemsize), self.itemsize)
        return self.loops == dense.loops

    def is_same_as(self, other: Layout) -> bool:
        """Whether both have the same elements in the same order at the same bytes; axes of extent 1 do not matter."""
        if 0 in self.shape:
            return other.shape == self.shape
        mine, theirs = (self.start, self.loops, self.itemsize), (other.start, other.loops, other.itemsize)
        return mine == theirs

    def broadcast(self, shape: Sequence[int]) -> Layout | None:
        """The layout broadcast to `shape` by NumPy's rules, with strides of 0; None if it does not broadcast."""
        added = len(shape) - len(self.shape)
        if added < 0:
            return None
        padded, strides = (1,) * added + self.shape, (0,) * added + self.strides
        if any(mine not in (1, whole) for mine, whole in zip(padded, shape, strict=True)):
            return None
        steps = tuple(0 if extent == 1 else stride for extent, stride in zip(padded, strides, strict=True))
        return Layout(self.start, tuple(shape), steps, self.itemsize)

    def permuted(self, perm: Sequence[int]) -> Layout:
        """The layout with its axes permuted: axis k of the result is axis `perm[k]`."""
        return replace(self, shape=tuple(self.shape[k] for k in perm), strides=tuple(self.strides[k] for k in perm))

    def spans(self) -> Spans:
        """The byte ranges of all elements, as few as possible. Elements must not overlap; strides may be negative."""
        if 0 in self.shape:
            return Spans([], 0)
        start, length = self.start, self.itemsize
        loops = []
        for extent, stride in self.loops:
            start += min(stride, 0) * (extent - 1)
            loops.append((extent, abs(stride)))
        outer: list[tuple[int, int]] = []
        for extent, stride in sorted(loops, key=lambda loop: loop[1]):
            if stride == length and not outer:
                length *= extent
            else:
                outer.append((extent, stride))
        if not outer:
            return Spans([start], length)
        starts = np.array([start])
        for extent, stride in outer:
            starts = (np.arange(extent)[:, None] * stride + starts).reshape(-1)
        if len(outer) > 1:
            starts.sort()
        return Spans(starts.tolist(), length)


@dataclass(frozen=True, slots=True)
class Box(Layout):
    """The place of a value's elements in the memory of `home`: a value that owns memory, row-major from byte 0 on."""

    home: Value

    def cut(self, axis: int, first: int, step: int, count: int) -> Box:
        """The part of the box with `count` indices along `axis`: `first`, `first + step`, ...; `step` may be < 0."""
        shape, strides = list(self.shape), list(self.strides)
        start = self.start + (first * strides[axis] if count else 0)
        shape[axis], strides[axis] = count, strides[axis] * step
        return replace(self, start=start, shape=tuple(shape), strides=tuple(strides))

    def picked(self, axis: int, place: int) -> Box:
        """The part of the box at index `place` of `axis`, with that axis removed."""
        one = self.cut(axis, place, 1, 1)
        return replace(
            one, shape=one.shape[:axis] + one.shape[axis + 1 :], strides=one.strides[:axis] + one.strides[axis + 1 :]
        )

    def reshaped(self, shape: tuple[int, ...]) -> Box | None:
        """The same elements, in row-major order, as a box of `shape`.

        None if strides cannot express it, or `shape` has another number of elements.
        """
        if prod(shape) != prod(self.shape):
            return None
        if 0 in shape:
            return replace(self, shape=shape, strides=dense_strides(shape, self.itemsize))
        groups = _groups(self.loops)
        strides: list[int] = []
        for extent in reversed(shape):
            if extent == 1:
                strides.append(0)
                continue
            if not groups:
                return None
            left, stride = groups[-1]
            if left % extent:
                return None
            strides.append(stride)
            groups[-1] = (left // extent, stride * extent)
            if groups[-1][0] == 1:
                groups.pop()
        return replace(self, shape=shape, strides=tuple(reversed(strides)))


def _groups(loops: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The loops (extent, stride), outermost first, with adjacent loops merged where one stride covers both."""
    found: list[tuple[int, int]] = []
    for extent, stride in loops:
        if found and found[-1][1] == stride * extent:
            found[-1] = (found[-1][0] * extent, stride)
        else:
            found.append((extent, stride))
    return found


def dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of a row-major array."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def whole_box(value: Value, shape: tuple[int, ...], itemsize: int) -> Box:
    """The box of a whole tensor, which owns its memory."""
    return Box(0, shape, dense_strides(shape, itemsize), itemsize, value)
