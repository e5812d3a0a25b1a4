"""`AxisLabels`: which positions along the axes of a graph's values belong together, found by union-find."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lathe.core.ir.graph import Node, Value

Labels = NDArray[np.int64]


class AxisLabels:
    """A label for each position along each axis of known extent.

    Positions with equal `roots` must be removed together: each of them exists only with the others. Positions whose
    root `is_frozen` must stay.

    A reshape may merge several axes into one, or split one into several. Positions can be removed along one of these
    several axes only. `chosen` is its number for each such node, counted from the outermost one; 0 by default. The
    analysis fills, for each such node, `merges` with the labels of the chosen axis, and `choices` with the number of
    axes.
    """

    def __init__(self, chosen: Mapping[Node, int] | None = None) -> None:
        self.chosen = chosen or {}
        self.merges: dict[Node, Labels] = {}
        self.choices: dict[Node, int] = {}
        self._labels: dict[tuple[Value, int], Labels] = {}
        self._parents: list[int] = []
        self._frozen: set[int] = set()
        self._resolved: Labels | None = None  # the root of each label, until labels change

    def of(self, value: Value, axis: int) -> Labels | None:
        """The labels of an axis, new ones at first; None if the extent is not a number."""
        extent = value.shape[axis]
        if not isinstance(extent, int):
            return None
        axis %= len(value.shape)
        if (value, axis) not in self._labels:
            self._labels[value, axis] = self.fresh(extent)
        return self._labels[value, axis]

    def fresh(self, count: int) -> Labels:
        """New labels that belong to no others."""
        start, self._resolved = len(self._parents), None
        self._parents += range(start, start + count)
        return np.arange(start, start + count)

    def tie(self, first: Labels | None, second: Labels | None) -> None:
        """Join the labels of two axes, position by position; both are frozen if the axes do not correspond."""
        if first is None or second is None or len(first) != len(second):
            self.freeze(first)
            self.freeze(second)
            return
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            self._join(a, b)

    def freeze(self, labels: Labels | None) -> None:
        for label in () if labels is None else labels.tolist():
            self._frozen.add(self._root(label))

    def freeze_value(self, value: Value) -> None:
        """Freeze all axes of a value of known rank; a value of unknown rank has no labels."""
        if getattr(value.type, "shape", None) is not None:
            for axis in range(len(value.shape)):
                self.freeze(self.of(value, axis))

    def roots(self, labels: Labels) -> Labels:
        if self._resolved is None:
            self._resolved = np.array([self._root(label) for label in range(len(self._parents))], np.int64)
        return self._resolved[labels]

    def is_frozen(self, root: int) -> bool:
        return root in self._frozen

    def _root(self, label: int) -> int:
        parents = self._parents
        while parents[label] != label:
            parents[label] = parents[parents[label]]
            label = parents[label]
        return label

    def _join(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        if a == b:
            return
        self._parents[b], self._resolved = a, None
        if b in self._frozen:
            self._frozen.add(a)
