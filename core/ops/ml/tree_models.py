"""TreeEnsembleRegressor and TreeEnsembleClassifier, which exporters still use for decision trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.ml.forest import AVERAGE, COMPARE, LEAF, MAX, MIN, SUM, Forest, find_nodes, integers
from lathe.core.ops.ml.scores import (
    NUMBERS,
    apply_post_transform,
    both_classes,
    check_transform,
    class_labels,
    classifier_types,
    floats,
    label_of_largest,
    logistic,
    matrix_rows,
)
from lathe.core.ops.ml.trees import Trees
from lathe.core.ops.opdef.registry import Call, Infer, NodeView, register
from lathe.core.ops.opdef.type_rules import check_kind

_MOST_IDS = 1 << 31  # so that a node's name (tree, node) fits one int64
_MODES = {f"BRANCH_{name}": mode for mode, name in enumerate(("LEQ", "LT", "GTE", "GT", "EQ", "NEQ"))} | {"LEAF": LEAF}
assert len(_MODES) == len(COMPARE) + 1


class _NamedTrees(Trees):
    """Family base: trees with nodes named (tree, node), the format before opset 5 of ai.onnx.ml."""

    leaves: ClassVar[str]  # the prefix of the attributes with leaf weights
    node_attrs: ClassVar[dict[str, Any]] = {
        "base_values": None,
        "base_values_as_tensor": None,
        "nodes_falsenodeids": None,
        "nodes_featureids": None,
        "nodes_hitrates": None,
        "nodes_hitrates_as_tensor": None,
        "nodes_missing_value_tracks_true": None,
        "nodes_modes": None,
        "nodes_nodeids": None,
        "nodes_treeids": None,
        "nodes_truenodeids": None,
        "nodes_values": None,
        "nodes_values_as_tensor": None,
        "post_transform": "NONE",
    }

    def numbers(self, c: NodeView, name: str) -> Array:
        """A numeric attribute as a vector: `name` + "_as_tensor" if present, otherwise `name`; empty without both."""
        tensor = c.attr(f"{name}_as_tensor")
        if tensor is not None and tensor.dtype.kind != "f":
            c.fail(f"{name}_as_tensor is {DType.from_numpy(tensor.dtype)}, expected float32 or float64")
        return floats(c.attr(name)) if tensor is None else np.asarray(tensor).ravel()

    def base(self, c: NodeView) -> Array:
        given = self.numbers(c, "base_values")
        return given if given.size else np.zeros(1, np.float32)

    def read(self, c: NodeView) -> Forest:
        names, trees = np.unique(integers(c.attr("nodes_treeids")), return_inverse=True)
        ids = integers(c.attr("nodes_nodeids"))
        modes = self._modes(c, len(trees))
        nodes, span = np.arange(len(trees)), int(ids.max(initial=0)) + 1
        if ids.min(initial=0) < 0 or span > _MOST_IDS:
            c.fail(f"nodes_nodeids goes from {ids.min()} to {ids.max()}, expected 0 to {_MOST_IDS - 1}")
        keys = trees * span + ids
        if len(np.unique(keys)) < len(keys):
            c.fail("has two nodes of one name (nodes_treeids, nodes_nodeids)")
        branch = modes != LEAF
        yes, no = nodes.copy(), nodes.copy()
        for side, name in ((yes, "nodes_truenodeids"), (no, "nodes_falsenodeids")):
            named = self._per_node(c, name, len(trees))
            side[branch] = find_nodes(c, keys, trees[branch] * span + self._ids(c, named[branch], span))
        first, target, weight = self._leaf_weights(c, names, keys, span, modes)
        return Forest(
            roots=self._roots(c, trees, np.tile(nodes[branch], 2), np.concatenate([yes[branch], no[branch]])),
            mode=modes,
            feature=np.where(branch, self._per_node(c, "nodes_featureids", len(trees)), 0),
            split=self._splits(c, len(trees)),
            yes=yes,
            no=no,
            missing=self._per_node(c, "nodes_missing_value_tracks_true", len(trees), optional=True) != 0,
            first=first,
            target=target,
            weight=weight,
        )

    def _roots(self, c: NodeView, trees: Array, parents: Array, children: Array) -> Array:
        """The nodes that no branch leads to. ModelError unless each tree has one, which reaches all its nodes.

        `trees` has the tree of each node; `parents[i]` has a branch to `children[i]`.
        """
        times, above = np.bincount(children, minlength=len(trees)), np.arange(len(trees))
        above[children] = parents
        for _ in range(len(trees).bit_length()):
            above = above[above]  # pointer jumping: twice as far up
        roots = np.flatnonzero(times == 0)
        is_forest = np.all(times <= 1) and np.all(times[above] == 0)
        if not is_forest or not np.array_equal(np.sort(trees[roots]), np.unique(trees)):
            c.fail("is no forest: expected one branch to each node, and to one node of each tree none")
        return roots

    def _modes(self, c: NodeView, nodes: int) -> Array:
        names = c.attr("nodes_modes") or ()
        unknown = sorted(set(map(str, names)) - _MODES.keys())
        if not names or unknown or {len(names), len(c.attr("nodes_nodeids") or ())} != {nodes}:
            c.fail(
                f"has {len(names)} nodes_modes for {nodes} nodes_treeids and {len(c.attr('nodes_nodeids') or ())} "
                f"nodes_nodeids, of unknown kind {unknown[:3]}, expected as many of {', '.join(_MODES)}"
            )
        return np.array([_MODES[name] for name in names], np.uint8)

    def _ids(self, c: NodeView, ids: Array, span: int) -> Array:
        if np.any((ids < 0) | (ids >= span)):
            c.fail("a branch or leaf names a node that does not exist")
        return ids

    def _per_node(self, c: NodeView, name: str, nodes: int, optional: bool = False) -> Array:
        values = integers(c.attr(name))
        if optional and not values.size:
            return np.zeros(nodes, np.int64)
        if len(values) != nodes:
            c.fail(f"{name} has {len(values)} items, expected one for each of the {nodes} nodes")
        return values

    def _splits(self, c: NodeView, nodes: int) -> Array:
        splits = self.numbers(c, "nodes_values")
        if len(splits) != nodes:
            c.fail(f"nodes_values has {len(splits)} items, expected one for each of the {nodes} nodes")
        return splits

    def _leaf_weights(
        self, c: NodeView, names: Array, keys: Array, span: int, modes: Array
    ) -> tuple[Array, Array, Array]:
        """The arrays `first`, `target` and `weight` of `Forest`, with weights sorted by leaf.

        `names` are the distinct numbers of the trees. `keys` has the name of each node as a number: the index of its
        tree in `names`, times `span`, plus its own number. ModelError if a weight is not that of a leaf.
        """
        trees, ids, targets = (integers(c.attr(f"{self.leaves}_{part}")) for part in ("treeids", "nodeids", "ids"))
        weights = self.numbers(c, f"{self.leaves}_weights")
        if len({len(trees), len(ids), len(targets), len(weights)}) > 1:
            c.fail(f"{self.leaves}_treeids, _nodeids, _ids and _weights differ in length")
        leaf = find_nodes(c, keys, find_nodes(c, names, trees) * span + self._ids(c, ids, span))
        if np.any(modes[leaf] != LEAF):
            c.fail(f"{self.leaves}_nodeids names a node that is not a leaf")
        order = np.argsort(leaf, kind="stable")
        counts = np.bincount(leaf, minlength=len(keys))
        first = np.concatenate([[0], np.cumsum(counts)])
        return first, targets[order], weights[order]

    def check(self, c: Infer) -> None:
        check_kind(c, 0, NUMBERS)
        check_transform(c)
        self.forest(c)

    def as_split(self, c: Call, x: Array) -> Array:
        """X as floats to compare with splits: float64 if X or the splits are, otherwise float32."""
        wide = np.float64 in (x.dtype, self.forest(c).split.dtype)
        return x.astype(np.float64 if wide else np.float32)


_AGGREGATES = {"AVERAGE": AVERAGE, "SUM": SUM, "MIN": MIN, "MAX": MAX}


@register
class TreeEnsembleRegressor(_NamedTrees):
    """The leaf weights of all trees, aggregated per target, plus `base_values`, then the post-transform."""

    outputs = "Y"
    leaves = "target"
    attrs = {
        **_NamedTrees.node_attrs,
        "aggregate_function": "SUM",
        "n_targets": 1,
        "target_ids": None,
        "target_nodeids": None,
        "target_treeids": None,
        "target_weights": None,
        "target_weights_as_tensor": None,
    }

    def targets(self, c: NodeView) -> int:
        return int(c.attr("n_targets"))

    def infer(self, c: Infer) -> Sequence[ValueType]:
        self.check(c)
        if c.attr("aggregate_function") not in _AGGREGATES:
            c.fail(f"aggregate_function is {c.attr('aggregate_function')!r}, expected one of {', '.join(_AGGREGATES)}")
        if len(self.numbers(c, "base_values")) not in (0, 1, self.targets(c)):
            c.fail(f"has {len(self.numbers(c, 'base_values'))} base_values, expected one for each target")
        rows = matrix_rows(c)
        return [TensorType(DType.FLOAT32, None if rows is None else (rows, c.attr("n_targets")))]

    def reference(self, c: Call, x: Array) -> Array:
        found = self.scores(c, self.as_split(c, x), _AGGREGATES[c.attr("aggregate_function")])
        return apply_post_transform(c, found + self.base(c))


@register
class TreeEnsembleClassifier(_NamedTrees):
    """The label of the largest score, and the scores.

    If all leaves of a model of two classes weigh one class, the second label wins if the score of that class is above
    0.5, or above 0 if a weight is negative. Without a post-transform, the scores are then as in ONNX Runtime:
    [0, score] if the leaves weigh the second class. If they weigh the first class, [1 - score, score], or
    [-score, score] if a weight is negative.
    """

    outputs = "Y, Z"
    leaves = "class"
    attrs = {
        **_NamedTrees.node_attrs,
        "class_ids": None,
        "class_nodeids": None,
        "class_treeids": None,
        "class_weights": None,
        "class_weights_as_tensor": None,
        "classlabels_int64s": None,
        "classlabels_strings": None,
    }

    def targets(self, c: NodeView) -> int:
        return len(self.labels(c))

    def labels(self, c: NodeView) -> Array:
        return class_labels(c, "classlabels_int64s")

    def infer(self, c: Infer) -> Sequence[ValueType]:
        self.check(c)
        labels = self.labels(c)
        if len(self.numbers(c, "base_values")) not in (0, 1, len(labels)):
            c.fail(f"has {len(self.numbers(c, 'base_values'))} base_values, expected one for each class")
        return classifier_types(c, labels, len(labels))

    def reference(self, c: Call, x: Array) -> tuple[Array, Array]:
        labels = self.labels(c)
        found = self.scores(c, self.as_split(c, x), SUM) + self.base(c)
        weighed = np.unique(self.forest(c).target)
        if len(labels) == 2 and weighed.size == 1:
            return self._binary(c, labels, found[:, weighed[0]], bool(weighed[0]))
        return label_of_largest(labels, found), apply_post_transform(c, found)

    def _binary(self, c: Call, labels: Array, score: Array, is_second: bool) -> tuple[Array, Array]:
        """The labels and scores if the leaves weigh only one of two classes, of which `score` [rows] is the score.

        `is_second`: whether the leaves weigh the second class. The post-transforms follow ONNX Runtime.
        """
        positive = bool(self.forest(c).weight.min() >= 0)
        label = labels[(score > (0.5 if positive else 0)).astype(np.intp)]
        if is_second:
            return label, apply_post_transform(c, np.stack([np.zeros_like(score), score], axis=1))
        match c.attr("post_transform"):
            case "LOGISTIC":
                return label, np.stack([logistic(-score), logistic(score)], axis=1).astype(np.float32)
            case "PROBIT":
                return label, apply_post_transform(c, np.stack([score, score], axis=1))
        return label, both_classes(score, complement=positive).astype(np.float32)
