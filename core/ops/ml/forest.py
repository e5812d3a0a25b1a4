"""Decision trees as flat tables, and their evaluation for all rows and trees at once.

The three tree operators of ai.onnx.ml store trees in two formats. Both are converted to a `Forest`, which the reference
evaluates, and which holds the constants of the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ops.opdef.registry import NodeView

LEQ, LT, GTE, GT, EQ, NEQ, MEMBER, LEAF = range(8)

COMPARE: tuple[Callable[[Array, Array], Array], ...] = (
    np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal,
)  # fmt: skip

AVERAGE, SUM, MIN, MAX = range(4)
_WALKERS = 1 << 20  # the most (row, tree) pairs that are evaluated at once


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees in one table of nodes. A leaf is a node whose two branches lead to itself.

    A row goes to node `yes` if the comparison `mode` of its feature with the node's split is true, otherwise to `no`.
    Leaf i adds `weight[k]` to `target[k]` for k in range(first[i], first[i + 1]).
    """

    roots: Array  # int64 [trees]
    mode: Array  # uint8 [nodes]
    feature: Array  # int64 [nodes]
    split: Array  # float [nodes]
    yes: Array  # int64 [nodes]
    no: Array  # int64 [nodes]
    missing: Array  # bool [nodes]: whether NaN goes to yes
    first: Array  # int64 [nodes + 1]
    target: Array  # int64 [weights]
    weight: Array  # float [weights]
    members: Mapping[int, Array] = field(default_factory=dict)  # by node of mode membership: the values that go to yes
    depth: int = 0  # the number of steps from a root to the deepest leaf

    @property
    def features(self) -> int:
        """The number of features that a row must have at least: the largest index plus 1."""
        return int(self.feature.max(initial=-1)) + 1

    @property
    def modes(self) -> list[int]:
        """The comparison modes that occur in inner nodes (`LEQ` to `MEMBER`), sorted."""
        found: list[int] = np.unique(self.mode).tolist()
        return [mode for mode in found if mode != LEAF]


def check_forest(c: NodeView, forest: Forest, targets: int) -> int:
    """Checks a forest of `targets` targets; returns its depth.

    ModelError for a forest without trees, or with nodes or targets out of range, negative feature indices, or cycles.
    """
    nodes = len(forest.mode)
    if not len(forest.roots) or np.any(_outside(forest.roots, nodes)):
        c.fail(f"its trees begin at {forest.roots[:8].tolist()}, expected nodes below {nodes}")
    if np.any(_outside(forest.yes, nodes) | _outside(forest.no, nodes)):
        c.fail("a branch leads to a node or leaf that does not exist")
    if forest.feature.min(initial=0) < 0:
        c.fail(f"nodes_featureids has {forest.feature.min()}, expected numbers from 0 on")
    if np.any(_outside(forest.target, targets)):
        c.fail(f"its leaves weigh targets {np.unique(forest.target)[-3:].tolist()}, expected numbers below {targets}")
    return _depth(c, forest)


def _outside(numbers: Array, end: int) -> Array:
    return (numbers < 0) | (numbers >= end)


def _depth(c: NodeView, forest: Forest) -> int:
    """The depth of the deepest leaf. ModelError for a cycle: a path longer than the number of nodes."""
    level = np.unique(forest.roots)
    for depth in range(len(forest.mode) + 1):
        level = level[forest.mode[level] != LEAF]
        if not level.size:
            return depth
        level = np.unique(np.concatenate([forest.yes[level], forest.no[level]]))
    return c.fail("its trees have a cycle")


def scores(forest: Forest, x: Array, targets: int, how: int) -> Array:
    """Scores [rows, targets] in float64 for the rows `x` [rows, features].

    The weights of the leaves that a row reaches in all trees are aggregated by `how`: `SUM`, `AVERAGE` (the sum divided
    by the number of trees), `MIN` or `MAX`. A target without weights gets 0.
    """
    step = max(1, _WALKERS // max(len(forest.roots), 1))
    parts = [_scores(forest, x[at : at + step], targets, how) for at in range(0, len(x), step)]
    return np.concatenate(parts) if parts else np.zeros((0, targets))


def _scores(forest: Forest, x: Array, targets: int, how: int) -> Array:
    leaves = _leaves(forest, x)
    starts, sizes = forest.first[leaves].ravel(), (forest.first[leaves + 1] - forest.first[leaves]).ravel()
    entries = np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
    rows = np.repeat(np.repeat(np.arange(len(x)), leaves.shape[1]), sizes)
    places, weights = rows * targets + forest.target[entries], forest.weight[entries]
    size = len(x) * targets
    if how in (SUM, AVERAGE):
        sums = np.bincount(places, weights, size).reshape(len(x), targets)
        return sums / leaves.shape[1] if how == AVERAGE else sums
    start, combine = (np.inf, np.minimum) if how == MIN else (-np.inf, np.maximum)
    best = np.full(size, start)
    combine.at(best, places, weights)
    return np.where(np.bincount(places, minlength=size) > 0, best, 0).reshape(len(x), targets)


def _leaves(forest: Forest, x: Array) -> Array:
    """The leaf [rows, trees] that each row reaches in each tree; all rows advance one level at a time."""
    at = np.broadcast_to(forest.roots, (len(x), len(forest.roots)))
    rows, modes, has_missing = np.arange(len(x))[:, None], forest.modes, bool(forest.missing.any())
    for _ in range(forest.depth):
        values = x[rows, forest.feature[at]]
        goes = _decisions(forest, values, at, modes)
        if has_missing:
            goes |= np.isnan(values) & forest.missing[at]
        at = np.where(goes, forest.yes[at], forest.no[at])
    return at


def _decisions(forest: Forest, values: Array, at: Array, modes: Sequence[int]) -> Array:
    """Whether each value goes to the `yes` branch of its node `at`; `modes` are the comparison modes that occur."""
    splits = forest.split[at]
    if len(modes) == 1 and modes[0] != MEMBER:
        return COMPARE[modes[0]](values, splits)
    goes, mode_at = np.zeros(values.shape, np.bool_), forest.mode[at]
    for mode in modes:
        if mode != MEMBER:
            goes |= (mode_at == mode) & COMPARE[mode](values, splits)
    for node in np.unique(at[mode_at == MEMBER]).tolist():
        goes |= (at == node) & np.isin(values, forest.members[node])
    return goes


def split_sets(values: Array) -> Iterator[Array]:
    """Yield the sets of numbers that are stored one after the other in `values`, separated by NaN."""
    for group in np.split(values, np.flatnonzero(np.isnan(values))):
        yield group[~np.isnan(group)]


def find_nodes(c: NodeView, keys: Array, wanted: Array) -> Array:
    """The indices of `wanted` in `keys`, which are distinct. ModelError if one is missing."""
    order = np.argsort(keys, kind="stable")
    places = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    if np.any(keys[places] != wanted):
        c.fail("a branch or leaf names a node that does not exist")
    return places


def integers(values: Sequence[Any] | None) -> Array:
    return np.array(values if values is not None else (), np.int64)
