"""Finds integer tensors whose elements are a linear function of their coordinates, for any extents.

PyTorch's exporters index masks by such tensors: `mask[arange(batch), arange(length)]` becomes Range, Unsqueeze, Expand,
Mul and Add over whole extents. `simplify/indexed_views.py` turns gathers by them into views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lathe.core.ir.dim import Dim, SymDim, product
from lathe.core.ir.graph import Array, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.passes.rewrite.base import shape_of

# Larger constants are data: comparing all of their elements would only cost time.
_LARGEST_CONSTANT = 1 << 16


@dataclass(frozen=True)
class Positions:
    """A tensor of integers: the element at [i, j, ...] is offset + steps[0] * i + steps[1] * j + ...

    The step along an axis of extent 1 is 0.
    """

    shape: tuple[Dim, ...]
    offset: Dim
    steps: tuple[Dim, ...]

    def lowest(self) -> int | None:
        """The smallest element; None if the offset is symbolic, or some step is negative or symbolic."""
        if not isinstance(self.offset, int) or not all(isinstance(step, int) and step >= 0 for step in self.steps):
            return None
        return self.offset

    def axis(self) -> int | None:
        """The axis along which the elements count 0, 1, 2, ..., being equal along all others; None if there is none."""
        along = [axis for axis, step in enumerate(self.steps) if step != 0]
        return along[0] if len(along) == 1 and self.offset == 0 and self.steps[along[0]] == 1 else None

    def counts_all(self) -> bool:
        """Whether the elements in row-major order are 0, 1, 2, ..."""
        return self.offset == 0 and all(step == wanted for step, wanted in self.strides())

    def strides(self) -> list[tuple[Dim, Dim]]:
        """For each axis of an extent other than 1, last axis first: its step, and its row-major stride in elements."""
        pairs: list[tuple[Dim, Dim]] = []
        stride: Dim = 1
        for extent, step in zip(reversed(self.shape), reversed(self.steps), strict=True):
            if extent != 1:
                pairs.append((step, stride))
                stride = stride * extent
        return pairs


class PositionFinder:
    """Finds the `Positions` among the values of a graph. `known`: the values that inference knows (`infer_graph`)."""

    def __init__(self, known: Mapping[Value, Array]) -> None:
        self._known = known
        self._found: dict[Value, Positions | None] = {}

    def of(self, value: Value | None) -> Positions | None:
        """The `Positions` that a value equals; None if it is no int32 or int64 tensor, or not known to be linear."""
        if value is None or not _is_integer(value):
            return None
        if value not in self._found:
            self._found[value] = None  # ends the recursion in a broken graph with a cycle
            self._found[value] = self._find(value)
        return self._found[value]

    def _find(self, value: Value) -> Positions | None:
        array = self._known.get(value)
        if array is not None and (found := _of_array(array)) is not None:
            return found
        node = value.producer
        rule = _RULES.get(node.op) if node is not None else None
        found = rule(self, node) if node is not None and rule is not None else None
        return found if found is not None and found.shape == shape_of(value) else None

    def number(self, value: Value | None) -> Dim | None:
        """The number, or symbolic dimension, that a value of one element is; None if that is not known."""
        found = self.of(value)
        return found.offset if found is not None and all(extent == 1 for extent in found.shape) else None


def _is_integer(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.dtype in (DType.INT64, DType.INT32)


def _of_array(array: Array) -> Positions | None:
    """The `Positions` that a known array equals; None if it is not linear, or too large to check."""
    if array.size == 1:
        item = array.ravel().tolist()[0]
        return Positions(array.shape, item, (0,) * array.ndim) if isinstance(item, int | SymDim) else None
    if array.dtype == object or not 0 < array.size <= _LARGEST_CONSTANT:
        return None
    first, steps = int(array.ravel()[0]), []
    for axis, extent in enumerate(array.shape):
        second = int(array[tuple(int(i == axis) for i in range(array.ndim))]) if extent > 1 else first
        steps.append(second - first)
    grids: Sequence[Array] = np.indices(array.shape, np.int64, sparse=True)
    linear: Array = np.full(array.shape, first, np.int64)
    for grid, step in zip(grids, steps, strict=True):
        linear += grid * step
    return Positions(array.shape, first, tuple(steps)) if np.array_equal(array, linear) else None


# -- rules: the positions of a node's output from those of its inputs --------------------------------------------------


def _range(finder: PositionFinder, node: Node) -> Positions | None:
    start, delta = (finder.number(node.input(index)) for index in (0, 2))
    shape = shape_of(node.output)
    if start is None or delta is None or shape is None:
        return None
    return Positions(shape, start, (0 if shape[0] == 1 else delta,))


def _same(finder: PositionFinder, node: Node) -> Positions | None:
    return finder.of(node.input(0))


def _view(finder: PositionFinder, node: Node) -> Positions | None:
    """The positions of a view's output; None if they are not linear.

    Axes of extent 1 may come and go; any other regrouping of axes needs elements in arithmetic progression.
    """
    found, shape = finder.of(node.input(0)), shape_of(node.output)
    if found is None or shape is None:
        return None
    before = [(extent, step) for extent, step in zip(found.shape, found.steps, strict=True) if extent != 1]
    after = [extent for extent in shape if extent != 1]
    if [extent for extent, _ in before] == after:
        steps = iter([step for _, step in before])
        return Positions(shape, found.offset, tuple(0 if extent == 1 else next(steps) for extent in shape))
    return _regroup(found, before, shape)


def _regroup(found: Positions, before: Sequence[tuple[Dim, Dim]], shape: tuple[Dim, ...]) -> Positions | None:
    """The positions `found`, viewed with `shape`, if in row-major order they are an arithmetic progression; or None.

    `before` has extent and step of each axis of an extent other than 1.
    """
    if not before or product(extent for extent, _ in before) != product(shape):
        return None
    last = stride = before[-1][1]
    for extent, step in reversed(before):
        if step != stride:
            return None
        stride = step * extent
    steps: list[Dim] = []
    stride = last
    for extent in reversed(shape):
        steps.insert(0, 0 if extent == 1 else stride)
        stride = stride * extent
    return Positions(shape, found.offset, tuple(steps))


def _expand(finder: PositionFinder, node: Node) -> Positions | None:
    found, shape = finder.of(node.input(0)), shape_of(node.output)
    return _broadcast(found, shape) if found is not None and shape is not None else None


def _transpose(finder: PositionFinder, node: Node) -> Positions | None:
    found, perm = finder.of(node.input(0)), node.attrs.get("perm")
    if found is None:
        return None
    order = [int(str(axis)) for axis in perm] if isinstance(perm, tuple) else [*reversed(range(len(found.shape)))]
    shape, steps = (tuple(of[axis] for axis in order) for of in (found.shape, found.steps))
    return Positions(shape, found.offset, steps)


def _add(finder: PositionFinder, node: Node, sign: int = 1) -> Positions | None:
    pair = _pair(finder, node)
    if pair is None:
        return None
    a, b = pair
    steps = tuple(x + y * sign for x, y in zip(a.steps, b.steps, strict=True))
    return Positions(a.shape, a.offset + b.offset * sign, steps)


def _subtract(finder: PositionFinder, node: Node) -> Positions | None:
    return _add(finder, node, -1)


def _multiply(finder: PositionFinder, node: Node) -> Positions | None:
    pair = _pair(finder, node)
    if pair is None:
        return None
    a, b = pair if not any(pair[1].steps) else reversed(pair)
    if any(b.steps):
        return None
    return Positions(a.shape, a.offset * b.offset, tuple(step * b.offset for step in a.steps))


def _pair(finder: PositionFinder, node: Node) -> tuple[Positions, Positions] | None:
    """The positions of both operands, broadcast to the shape of the output; None if one is not known."""
    a, b, shape = finder.of(node.input(0)), finder.of(node.input(1)), shape_of(node.output)
    if a is None or b is None or shape is None:
        return None
    a, b = _broadcast(a, shape), _broadcast(b, shape)
    return (a, b) if a is not None and b is not None else None


def _broadcast(found: Positions, shape: tuple[Dim, ...]) -> Positions | None:
    """The positions broadcast to `shape`, with step 0 along the new axes; None if they do not broadcast."""
    added = len(shape) - len(found.shape)
    if added < 0:
        return None
    for extent, wanted in zip(found.shape, shape[added:], strict=True):
        if extent not in (1, wanted):
            return None
    return Positions(shape, found.offset, (0,) * added + found.steps)


_RULES: dict[str, Callable[[PositionFinder, Node], Positions | None]] = {
    "Range": _range,
    "Cast": _same,
    "Identity": _same,
    "Reshape": _view,
    "Flatten": _view,
    "Squeeze": _view,
    "Unsqueeze": _view,
    "Expand": _expand,
    "Transpose": _transpose,
    "Add": _add,
    "Sub": _subtract,
    "Mul": _multiply,
}
