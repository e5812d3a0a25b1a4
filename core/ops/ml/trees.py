"""TreeEnsemble: scores of decision trees. The operators that it replaced in opset 5 are in tree_models.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from lathe.core.ir.graph import Array, Node
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.ml.forest import LEAF, MAX, MEMBER, SUM, Forest, check_forest, integers, scores, split_sets
from lathe.core.ops.ml.scores import DOMAIN, POST_TRANSFORMS
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.type_rules import FLOAT, check_kind, untouched_rows

_FORESTS: WeakKeyDictionary[Node, Forest] = WeakKeyDictionary()  # built once: tables may have millions of nodes


class Trees(OpDef):
    """Family base: builds and checks the forest of a node once, and computes its scores."""

    zero_gradient = "trees are piecewise constant"
    inputs = "X"
    domain = DOMAIN

    def forest(self, c: NodeView) -> Forest:
        """The forest of a node, built and checked at the first call; ModelError if its attributes define none."""
        if c.node not in _FORESTS:
            forest = self.read(c)
            _FORESTS[c.node] = replace(forest, depth=check_forest(c, forest, self.targets(c)))
        return _FORESTS[c.node]

    def read(self, c: NodeView) -> Forest:
        """The forest from the attributes, with unchecked links and depth 0; subclasses define it."""
        raise NotImplementedError

    def targets(self, c: NodeView) -> int:
        """The number of scores per row, one for each target; subclasses define it."""
        raise NotImplementedError

    def base(self, c: NodeView) -> Array:
        """The numbers to add to the scores: one for all targets, or one per target. By default a single 0."""
        return np.zeros(1, np.float32)

    def scores(self, c: Call, x: Array, how: int) -> Array:
        """Scores [rows, targets] without `base`, aggregated by `how`, in the element type of the leaf weights.

        FeedError if x has too few features.
        """
        forest, x = self.forest(c), np.atleast_2d(x)
        if forest.features > x.shape[1]:
            c.fail(f"X has {x.shape[1]} features, expected at least {forest.features}")
        return scores(forest, x, self.targets(c), how).astype(forest.weight.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return untouched_rows(c, axes, {c.tensor(0).rank - 1})


_PER_NODE = (
    "nodes_featureids", "nodes_splits", "nodes_truenodeids", "nodes_falsenodeids", "nodes_trueleafs",
    "nodes_falseleafs",
)  # fmt: skip
_TRANSFORMS = tuple(POST_TRANSFORMS.values())


@register
class TreeEnsemble(Trees):
    """Scores [N, targets] of the rows of X: in each tree, a row reaches one leaf, which has a weight for one target.

    A node compares one feature with its split (or tests its membership in a set) and selects the next node or leaf.
    `aggregate_function` combines the weights of each target over the trees, then the post-transform is applied.
    """

    outputs = "Y"
    attrs = {
        "aggregate_function": SUM,
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

    def targets(self, c: NodeView) -> int:
        return int(c.attr("n_targets"))

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = check_kind(c, 0, FLOAT)
        if not 0 <= c.attr("aggregate_function") <= MAX or not 0 <= c.attr("post_transform") < len(_TRANSFORMS):
            c.fail("aggregate_function or post_transform is out of range")
        self.forest(c)
        shape = c.shape(0)
        if shape is None:
            return [TensorType(dtype, None)]
        if len(shape) != 2:
            c.fail(f"X is {c.tensor(0)}, expected [N,F]")
        return [TensorType(dtype, (shape[0], c.attr("n_targets")))]

    def read(self, c: NodeView) -> Forest:
        """The forest from the attributes: inner nodes first, then leaves. ModelError if attributes differ in length."""
        nodes, leaves = len(c.attr("nodes_modes")), len(c.attr("leaf_weights"))
        for name in _PER_NODE:
            if len(c.attr(name)) != nodes:
                c.fail(f"{name} has {len(c.attr(name))} items, expected one for each of the {nodes} nodes")
        targets = integers(c.attr("leaf_targetids"))
        if len(targets) != leaves:
            c.fail(f"leaf_targetids has {len(targets)} items, expected one for each of the {leaves} leaves")
        if (mode := int(np.max(c.attr("nodes_modes"), initial=0))) > MEMBER:
            c.fail(f"nodes_modes has {mode}, expected 0 to {MEMBER}")
        own = np.arange(nodes, nodes + leaves)
        return Forest(
            roots=self._roots(c, nodes),
            mode=np.concatenate([np.asarray(c.attr("nodes_modes"), np.uint8), np.full(leaves, LEAF, np.uint8)]),
            feature=np.concatenate([integers(c.attr("nodes_featureids")), np.zeros(leaves, np.int64)]),
            split=np.concatenate([c.attr("nodes_splits"), np.zeros(leaves, c.attr("nodes_splits").dtype)]),
            yes=np.concatenate([self._branches(c, "true", nodes, leaves), own]),
            no=np.concatenate([self._branches(c, "false", nodes, leaves), own]),
            missing=np.concatenate([self._missing(c, nodes), np.zeros(leaves, np.bool_)]),
            first=np.maximum(np.arange(nodes + leaves + 1) - nodes, 0),
            target=targets,
            weight=np.asarray(c.attr("leaf_weights")),
            members=self._members(c),
        )

    def _missing(self, c: NodeView, nodes: int) -> Array:
        """Whether NaN goes to the true branch, for each node: nowhere without `nodes_missing_value_tracks_true`."""
        given = integers(c.attr("nodes_missing_value_tracks_true"))
        if given.size and len(given) != nodes:
            c.fail(
                f"nodes_missing_value_tracks_true has {len(given)} items, expected one for each of the {nodes} nodes"
            )
        return given != 0 if given.size else np.zeros(nodes, np.bool_)

    def _roots(self, c: NodeView, nodes: int) -> Array:
        roots = integers(c.attr("tree_roots"))
        if not roots.size or roots.min() < 0 or roots.max() >= nodes:
            c.fail(f"tree_roots is {c.attr('tree_roots')[:8]}, expected numbers below {nodes}")
        return roots

    def _branches(self, c: NodeView, side: str, nodes: int, leaves: int) -> Array:
        """The node that the branch `side` ("true" or "false") of each node leads to; leaves are numbered after nodes.

        -1 where that does not exist.
        """
        link, is_leaf = integers(c.attr(f"nodes_{side}nodeids")), integers(c.attr(f"nodes_{side}leafs")) != 0
        outside = (link < 0) | (link >= np.where(is_leaf, leaves, nodes))
        return np.where(outside, -1, link + np.where(is_leaf, nodes, 0))

    def _members(self, c: NodeView) -> dict[int, Array]:
        """The set of values for each node of mode membership, by node, from `membership_values`.

        The sets are stored in the order of the nodes, separated by NaN. ModelError if there are too few.
        """
        wanted, values = np.flatnonzero(np.asarray(c.attr("nodes_modes")) == MEMBER), c.attr("membership_values")
        if values is None:
            return {} if not wanted.size else c.fail("has nodes of membership, but no membership_values")
        if values.dtype.kind != "f":
            c.fail(f"membership_values is {DType.from_numpy(values.dtype)}, expected floating-point numbers")
        sets = list(split_sets(values))
        if len(sets) < wanted.size:
            c.fail(f"membership_values has {len(sets)} sets, expected {wanted.size}")
        return dict(zip(wanted.tolist(), sets, strict=False))

    def reference(self, c: Call, x: Array) -> Array:
        found = self.scores(c, x, c.attr("aggregate_function"))
        return _TRANSFORMS[c.attr("post_transform")](found).astype(x.dtype)
