"""Which integers say nothing but where they stand, such as those that exporters of PyTorch index masks by.

`mask[arange(batch), arange(length)]` becomes Range, Unsqueeze, Expand, Mul and Add over whole extents. What they
compute is linear in the place of each element, whatever the extents are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from core.ir.dim import Dim, SymDim, product
from core.ir.graph import Array, Node, Value
from core.ir.types import DType, TensorType
from core.passes.base import shape_of

# Larger constants are tables, and comparing each of their elements would take longer than reading them.
_LARGEST_CONSTANT = 1 << 16


@dataclass(frozen=True)
class Positions:
    """Integers of a shape: the one at [i, j, ...] is offset + steps[0] * i + steps[1] * j + ... The step along an axis
    of extent 1 is 0."""

    shape: tuple[Dim, ...]
    offset: Dim
    steps: tuple[Dim, ...]

    def lowest(self) -> int | None:
        """A bound from below for every element, where one is known."""
        if not isinstance(self.offset, int) or not all(isinstance(step, int) and step >= 0 for step in self.steps):
            return None
        return self.offset

    def axis(self) -> int | None:
        """The one axis along which the elements count 0, 1, 2, ...; None where they do otherwise."""
        along = [axis for axis, step in enumerate(self.steps) if step != 0]
        return along[0] if len(along) == 1 and self.offset == 0 and self.steps[along[0]] == 1 else None

    def counts_all(self) -> bool:
        """Whether the elements, in their order, are 0, 1, 2, ..."""
        return self.offset == 0 and all(step == wanted for step, wanted in self.strides())

    def strides(self) -> list[tuple[Dim, Dim]]:
        """The steps along all axes but those of extent 1, each with what it would be if the elements, in their order,
        were 0, 1, 2, ..."""
        pairs: list[tuple[Dim, Dim]] = []
        behind: Dim = 1
        for extent, step in zip(reversed(self.shape), reversed(self.steps), strict=True):
            if extent != 1:
                pairs.append((step, behind))
                behind = behind * extent
        return pairs


class Finder:
    """The positions among the values of a graph. `known`: the values that inference knows (`infer_graph`)."""

    def __init__(self, known: Mapping[Value, Array]) -> None:
        self._known = known
        self._found: dict[Value, Positions | None] = {}

    def of(self, value: Value | None) -> Positions | None:
        """What a value is, if its elements are linear in their place."""
        if value is None or not _is_integer(value):
            return None
        if value not in self._found:
            self._found[value] = None  # a value that depends on itself, in a broken graph, ends here
            self._found[value] = self._look(value)
        return self._found[value]

    def _look(self, value: Value) -> Positions | None:
        array = self._known.get(value)
        if array is not None and (found := _of_array(array)) is not None:
            return found
        node = value.producer
        rule = _RULES.get(node.op) if node is not None else None
        found = rule(self, node) if node is not None and rule is not None else None
        return found if found is not None and found.shape == shape_of(value) else None

    def number(self, value: Value | None) -> Dim | None:
        """The one number of a value, where it is known."""
        found = self.of(value)
        return found.offset if found is not None and all(extent == 1 for extent in found.shape) else None


def _is_integer(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.dtype in (DType.INT64, DType.INT32)


def _of_array(array: Array) -> Positions | None:
    """The positions that a known value is."""
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


# -- what nodes make of positions --------------------------------------------------------------------------------------


def _range(finder: Finder, node: Node) -> Positions | None:
    start, delta = (finder.number(node.input(index)) for index in (0, 2))
    shape = shape_of(node.output)
    if start is None or delta is None or shape is None:
        return None
    return Positions(shape, start, (0 if shape[0] == 1 else delta,))


def _same(finder: Finder, node: Node) -> Positions | None:
    return finder.of(node.input(0))


def _viewed(finder: Finder, node: Node) -> Positions | None:
    """Of a view: its axes are those before, but for axes of extent 1, or all of them as one."""
    found, shape = finder.of(node.input(0)), shape_of(node.output)
    if found is None or shape is None:
        return None
    before = [(extent, step) for extent, step in zip(found.shape, found.steps, strict=True) if extent != 1]
    after = [extent for extent in shape if extent != 1]
    if [extent for extent, _ in before] == after:
        steps = iter([step for _, step in before])
        return Positions(shape, found.offset, tuple(0 if extent == 1 else next(steps) for extent in shape))
    return _regrouped(found, before, shape)


def _regrouped(found: Positions, before: Sequence[tuple[Dim, Dim]], shape: tuple[Dim, ...]) -> Positions | None:
    """Of a view of elements that, in their order, are `step` apart."""
    if not before or product(extent for extent, _ in before) != product(shape):
        return None
    last = behind = before[-1][1]
    for extent, step in reversed(before):
        if step != behind:
            return None
        behind = step * extent
    steps: list[Dim] = []
    behind = last
    for extent in reversed(shape):
        steps.insert(0, 0 if extent == 1 else behind)
        behind = behind * extent
    return Positions(shape, found.offset, tuple(steps))


def _expanded(finder: Finder, node: Node) -> Positions | None:
    found, shape = finder.of(node.input(0)), shape_of(node.output)
    return _broadcast(found, shape) if found is not None and shape is not None else None


def _transposed(finder: Finder, node: Node) -> Positions | None:
    found, perm = finder.of(node.input(0)), node.attrs.get("perm")
    if found is None:
        return None
    order = [int(str(axis)) for axis in perm] if isinstance(perm, tuple) else [*reversed(range(len(found.shape)))]
    shape, steps = (tuple(of[axis] for axis in order) for of in (found.shape, found.steps))
    return Positions(shape, found.offset, steps)


def _added(finder: Finder, node: Node, sign: int = 1) -> Positions | None:
    pair = _pair(finder, node)
    if pair is None:
        return None
    a, b = pair
    steps = tuple(x + y * sign for x, y in zip(a.steps, b.steps, strict=True))
    return Positions(a.shape, a.offset + b.offset * sign, steps)


def _subtracted(finder: Finder, node: Node) -> Positions | None:
    return _added(finder, node, -1)


def _multiplied(finder: Finder, node: Node) -> Positions | None:
    pair = _pair(finder, node)
    if pair is None:
        return None
    a, b = pair if not any(pair[1].steps) else reversed(pair)
    if any(b.steps):
        return None
    return Positions(a.shape, a.offset * b.offset, tuple(step * b.offset for step in a.steps))


def _pair(finder: Finder, node: Node) -> tuple[Positions, Positions] | None:
    """Both operands, as they broadcast to the output."""
    a, b, shape = finder.of(node.input(0)), finder.of(node.input(1)), shape_of(node.output)
    if a is None or b is None or shape is None:
        return None
    a, b = _broadcast(a, shape), _broadcast(b, shape)
    return (a, b) if a is not None and b is not None else None


def _broadcast(found: Positions, shape: tuple[Dim, ...]) -> Positions | None:
    """The same elements, repeated along the axes that they lack."""
    added = len(shape) - len(found.shape)
    if added < 0:
        return None
    for extent, wanted in zip(found.shape, shape[added:], strict=True):
        if extent not in (1, wanted):
            return None
    return Positions(shape, found.offset, (0,) * added + found.steps)


_RULES: dict[str, Callable[[Finder, Node], Positions | None]] = {
    "Range": _range,
    "Cast": _same,
    "Identity": _same,
    "Reshape": _viewed,
    "Flatten": _viewed,
    "Squeeze": _viewed,
    "Unsqueeze": _viewed,
    "Expand": _expanded,
    "Transpose": _transposed,
    "Add": _added,
    "Sub": _subtracted,
    "Mul": _multiplied,
}
