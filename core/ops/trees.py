"""TreeEnsemble: sums over decision trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from core.ir.graph import Array
from core.ir.types import TensorType, ValueType
from core.ops.common import FLOAT, check_kind, rows_beside
from core.ops.ml import DOMAIN
from core.ops.registry import Call, Infer, Mixes, NodeView, OpDef, Required, RowAxis, register

_COMPARE: tuple[Callable[[Array, Array], Array], ...] = (
    np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal,
)  # fmt: skip
_MEMBER = len(_COMPARE)

_PER_NODE = (
    "nodes_featureids", "nodes_splits", "nodes_truenodeids", "nodes_falsenodeids", "nodes_trueleafs",
    "nodes_falseleafs",
)  # fmt: skip

_AVERAGE, _SUM, _MIN, _MAX = range(4)


@register
class TreeEnsemble(OpDef):
    """Scores of each row of X: from every root down to a leaf, whose weight counts for the leaf's target.

    A node compares one feature with its split (or looks it up among members) and says which node or leaf follows.
    """

    inputs = "X"
    outputs = "Y"
    attrs = {
        "aggregate_function": _SUM,
        "leaf_targetids": Required("integers"),
        "leaf_weights": Required("tensor"),
        "membership_values": None,
        "n_targets": Required("integer"),
        "nodes_falseleafs": Required("integers"),
        "nodes_falsenodeids": Required("integers"),
        "nodes_featureids": Required("integers"),
        "nodes_hitrates": None,
        "nodes_missing_value_tracks_true": None,
        "nodes_modes": Required("tensor"),
        "nodes_splits": Required("tensor"),
        "nodes_trueleafs": Required("integers"),
        "nodes_truenodeids": Required("integers"),
        "post_transform": 0,
        "tree_roots": Required("integers"),
    }
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = check_kind(c, 0, FLOAT)
        _check(c)
        shape = c.shape(0)
        if shape is None:
            return [TensorType(dtype, None)]
        if len(shape) != 2:
            c.fail(f"X is {c.tensor(0)}, expected [N,F]")
        return [TensorType(dtype, (shape[0], c.attr("n_targets")))]

    def reference(self, c: Call, x: Array) -> Array:
        features = c.attr("nodes_featureids")
        if max(features) >= x.shape[1]:
            c.fail(f"X has {x.shape[1]} features, expected at least {max(features) + 1}")
        members = _members(c)
        leaves = [_leaf_of(c, x, root, members) for root in c.attr("tree_roots")]
        scores = _aggregated(c, np.array(leaves, np.int64).reshape(-1, len(x)))
        return _POST_TRANSFORMS[c.attr("post_transform")](scores).astype(x.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        return rows_beside(c, axes, {1})


def _check(c: Infer) -> None:
    """ModelError for attributes of different lengths, for links out of range, and for trees that have a cycle."""
    nodes, leaves = len(c.attr("nodes_modes")), len(c.attr("leaf_weights"))
    for name in _PER_NODE:
        if len(c.attr(name)) != nodes:
            c.fail(f"{name} has {len(c.attr(name))} items, expected one for each of the {nodes} nodes")
    targets = c.attr("leaf_targetids")
    if len(targets) != leaves or not all(0 <= target < c.attr("n_targets") for target in targets):
        c.fail(f"leaf_targetids is {targets[:8]}, expected {leaves} numbers below {c.attr('n_targets')}")
    if not 0 <= c.attr("aggregate_function") <= _MAX or not 0 <= c.attr("post_transform") < len(_POST_TRANSFORMS):
        c.fail("aggregate_function or post_transform is out of range")
    if int(np.max(c.attr("nodes_modes"), initial=0)) > _MEMBER or min(c.attr("nodes_featureids"), default=0) < 0:
        c.fail("nodes_modes or nodes_featureids is out of range")
    if not all(0 <= root < nodes for root in c.attr("tree_roots")):
        c.fail(f"tree_roots is {c.attr('tree_roots')[:8]}, expected numbers below {nodes}")
    links = _links(c)
    for side, is_leaf in links:
        if np.any(side < 0) or np.any(side >= np.where(is_leaf, leaves, nodes)):
            c.fail("a branch leads to a node or leaf that does not exist")
    _check_depth(c, links, nodes)
    _members(c)


def _check_depth(c: Infer, links: Sequence[tuple[Array, Array]], nodes: int) -> None:
    """No walk from a root is longer than there are nodes."""
    level = np.unique(np.array(c.attr("tree_roots"), np.int64))
    for _ in range(nodes):
        if not level.size:
            return
        level = np.unique(np.concatenate([side[level][~leaf[level]] for side, leaf in links]))
    if level.size:
        c.fail("its trees have a cycle")


def _links(c: NodeView) -> list[tuple[Array, Array]]:
    """For the false and the true branch: which node or leaf follows each node, and whether it is a leaf."""
    return [
        (np.array(c.attr(f"nodes_{side}nodeids"), np.int64), np.array(c.attr(f"nodes_{side}leafs"), np.bool_))
        for side in ("false", "true")
    ]


def _members(c: NodeView) -> dict[int, Array]:
    """The values that each node of membership looks in; they are stored in the nodes' order, separated by NaN."""
    wanted = np.flatnonzero(np.asarray(c.attr("nodes_modes")) == _MEMBER)
    values = c.attr("membership_values")
    if values is None:
        return {} if not wanted.size else c.fail("has nodes of membership, but no membership_values")
    groups = np.split(values, np.flatnonzero(np.isnan(values)))
    sets = [group[~np.isnan(group)] for group in groups]
    if len(sets) < wanted.size:
        c.fail(f"membership_values has {len(sets)} sets, expected {wanted.size}")
    return dict(zip(wanted.tolist(), sets, strict=False))


def _leaf_of(c: NodeView, x: Array, root: int, members: dict[int, Array]) -> Array:
    """The leaf that each row reaches: all rows go down one step at a time."""
    links = _links(c)
    features = np.array(c.attr("nodes_featureids"), np.int64)
    at, walking = np.full(len(x), root, np.int64), np.ones(len(x), np.bool_)
    while walking.any():
        rows = np.flatnonzero(walking)
        nodes = at[rows]
        goes = _decisions(c, x[rows, features[nodes]], nodes, members)
        at[rows] = np.where(goes, links[1][0][nodes], links[0][0][nodes])
        walking[rows] = ~np.where(goes, links[1][1][nodes], links[0][1][nodes])
    return at


def _decisions(c: NodeView, values: Array, nodes: Array, members: dict[int, Array]) -> Array:
    """Whether each value takes the true branch of its node."""
    modes, splits = np.asarray(c.attr("nodes_modes"))[nodes], np.asarray(c.attr("nodes_splits"))[nodes]
    goes = np.zeros(len(values), np.bool_)
    for mode, compare in enumerate(_COMPARE):
        goes |= (modes == mode) & compare(values, splits)
    for node in np.unique(nodes[modes == _MEMBER]).tolist():
        goes |= (nodes == node) & np.isin(values, members[node])
    missing = c.attr("nodes_missing_value_tracks_true")
    if missing is not None:
        goes |= np.isnan(values) & np.array(missing, np.bool_)[nodes]
    return goes


def _aggregated(c: NodeView, leaves: Array) -> Array:
    """Scores [rows, targets] from the leaf of each tree and row."""
    weights, targets = np.asarray(c.attr("leaf_weights")), np.array(c.attr("leaf_targetids"), np.int64)
    how, shape = c.attr("aggregate_function"), (leaves.shape[1], c.attr("n_targets"))
    rows = np.broadcast_to(np.arange(shape[0]), leaves.shape)
    place = (rows.ravel(), targets[leaves].ravel())
    if how in (_AVERAGE, _SUM):
        scores: Array = np.zeros(shape, weights.dtype)
        np.add.at(scores, place, weights[leaves].ravel())
        return scores / max(len(leaves), 1) if how == _AVERAGE else scores
    start, combine = (np.inf, np.minimum) if how == _MIN else (-np.inf, np.maximum)
    scores = np.full(shape, start, weights.dtype)
    combine.at(scores, place, weights[leaves].ravel())
    return np.where(np.isinf(scores), 0, scores)


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=1, keepdims=True)


def _softmax_zero(scores: Array) -> Array:
    """Softmax over the scores that are not zero."""
    powers = np.where(scores == 0, 0, np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf)))
    return powers / np.maximum(powers.sum(axis=1, keepdims=True), np.finfo(powers.dtype).tiny)


def _probit(scores: Array) -> Array:
    """The quantile of the normal distribution."""
    quantile = NormalDist().inv_cdf
    items: list[Any] = [quantile(float(p)) if 0 < p < 1 else np.nan for p in scores.ravel()]
    return np.array(items, scores.dtype).reshape(scores.shape)


def _logistic(scores: Array) -> Array:
    return 1 / (1 + np.exp(-scores))


_POST_TRANSFORMS: tuple[Callable[[Array], Array], ...] = (
    lambda scores: scores, _softmax, _logistic, _softmax_zero, _probit,
)  # fmt: skip
