"""Rewrites ai.onnx.ml (classical ML) operators as operators with kernels: products, trees, SVMs, table lookups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.ml.labels import LabelEncoder
from lathe.core.ops.ml.linear import LinearClassifier, LinearRegressor
from lathe.core.ops.ml.scores import class_labels
from lathe.core.ops.ml.svm import SVMClassifier
from lathe.core.ops.ml.tree_models import TreeEnsembleClassifier
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.base import PassResult, has_ranks, shape_of
from lathe.core.passes.rewrite.editor import Editor

_MOST_KEYS = 1 << 16  # the largest range of keys that becomes a dense lookup table
_OF_ANY_RANK = ("ArrayFeatureExtractor", "LabelEncoder", "OneHotEncoder")

# Nodes with another transform (SOFTMAX_ZERO, PROBIT) run on their reference.
_TRANSFORMS = {"NONE": None, "LOGISTIC": "Sigmoid", "SOFTMAX": "Softmax"}


@dataclass(frozen=True)
class ExpandClassicML:
    """Rewrites models and transforms of numeric rows [N,C], and label lookups of any rank.

    There is a rule per operator, which returns the values that replace the node's outputs; a node whose rule returns an
    empty list stays as it is.
    """

    name: str = "classic_ml"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op in _RULES and (_takes_rows(node) or node.op in _OF_ANY_RANK):
                results = _RULES[node.op](_Writer(editor, node))
                for old, new in zip(node.outputs, results, strict=False):
                    editor.replace(old, new)
        return editor.finish()


def _takes_rows(node: Node) -> bool:
    x = node.inputs[0]
    return x is not None and len(shape_of(x) or ()) == 2 and x.dtype.numpy.kind in "fi"


class _Writer:
    """Emits nodes before `node`, the node that a rule replaces."""

    def __init__(self, editor: Editor, node: Node) -> None:
        self.editor, self.node = editor, node
        self.view = registry.NodeView(registry.get(node.op), node)

    @property
    def x(self) -> Value:
        value = self.node.inputs[0]
        assert value is not None
        return value

    def __call__(self, op: str, *inputs: Value | Array | float, **attrs: Attr) -> Value:
        """Emits a node; arrays and numbers among the inputs become constants (numbers as float32)."""
        values = [each if isinstance(each, Value) else self.constant(each) for each in inputs]
        return self.editor.emit(self.node, op, *values, attrs=attrs)

    def constant(self, value: Array | float) -> Value:
        return self.editor.constant(np.asarray(value, np.float32) if isinstance(value, int | float) else value)

    def floats(self) -> Value:
        """X as float32, the type in which these operators compute."""
        return self.x if self.x.dtype is DType.FLOAT32 else self("Cast", self.x, to=DType.FLOAT32.onnx_code)

    def integers(self) -> Value:
        return self.x if self.x.dtype is DType.INT64 else self("Cast", self.x, to=DType.INT64.onnx_code)

    def vector(self, name: str, default: float) -> Array:
        """A numeric attribute as float32[k]; [default] if it is absent or empty."""
        return np.array(self.view.attr(name) or (default,), np.float32)

    def post_transform(self, scores: Value) -> Value:
        """The scores after the node's attribute `post_transform`, which must be NONE, LOGISTIC or SOFTMAX."""
        op = _TRANSFORMS[self.view.attr("post_transform")]
        return scores if op is None else self(op, scores, **({"axis": -1} if op == "Softmax" else {}))

    def look_up(self, labels: Array, indices: Value) -> Value:
        return self("Gather", self.constant(labels), indices, axis=0)


Rule: TypeAlias = Callable[[_Writer], "list[Value]"]


def _scaler(at: _Writer) -> list[Value]:
    return [at("Mul", at("Sub", at.floats(), at.vector("offset", 0)), at.vector("scale", 1))]


def _normalizer(at: _Writer) -> list[Value]:
    op = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}[at.view.attr("norm")]
    x = at.floats()
    divisor = at(op, x, axes=(-1,), keepdims=1)
    return [at("Div", x, at("Where", at("Equal", divisor, 0.0), 1.0, divisor))]


def _imputer(at: _Writer) -> list[Value]:
    if at.x.dtype is not DType.FLOAT32:
        return []
    wanted, imputed = at.view.attr("replaced_value_float"), at.vector("imputed_value_floats", 0)
    found = at("IsNaN", at.x) if np.isnan(wanted) else at("Equal", at.x, wanted)
    return [at("Where", found, imputed, at.x)]


def _binarizer(at: _Writer) -> list[Value]:
    if at.x.dtype is not DType.FLOAT32:
        return []
    return [at("Cast", at("Greater", at.x, at.view.attr("threshold")), to=DType.FLOAT32.onnx_code)]


def _index_in(at: _Writer, x: Value, table: Array, least: int) -> Value:
    """The indices (int64, shape of x) of the elements of x in a table for the integers from `least` on.

    x is int64 or float32. The last element of the table is the default: numbers outside the range, or with a fraction,
    get its index.
    """
    default = len(table) - 1
    first, last = (np.array(number, x.dtype.numpy) for number in (least, least + default - 1))
    in_table = at("And", at("GreaterOrEqual", x, first), at("LessOrEqual", x, last))
    index = at("Sub", x, first)
    if x.dtype is DType.FLOAT32:
        in_table = at("And", in_table, at("Equal", x, at("Floor", x)))
        index = at("Cast", index, to=DType.INT64.onnx_code)
    return at("Where", in_table, index, np.array(default, np.int64))


def _dense_table(keys: Sequence[int], values: Sequence[Any], default: Any, dtype: Any) -> Array | None:
    """The values of all integers from the least key to the greatest, and then the default.

    Integers without a key get the default. None if the range of keys exceeds `_MOST_KEYS`.
    """
    least, greatest = min(keys), max(keys)
    if greatest - least >= _MOST_KEYS:
        return None
    table: Array = np.full(greatest - least + 2, default, dtype)
    for key, value in zip(keys, values, strict=True):  # the last value of a repeated key wins
        table[key - least] = value
    return table


def _label_encoder(at: _Writer) -> list[Value]:
    """LabelEncoder as a table lookup, if all keys are integers within a range of `_MOST_KEYS`; otherwise []."""
    op = registry.get(at.node.op)
    assert isinstance(op, LabelEncoder)
    keys, values, default = op.table(at.view)
    whole = keys.dtype.kind == "i" or (keys.dtype == np.float32 and np.isfinite(keys).all() and not np.any(keys % 1))
    if not whole or not keys.size or not has_ranks(at.node):
        return []
    numbers = [int(key) for key in keys.ravel().tolist()]
    table = _dense_table(numbers, values.ravel().tolist(), default.item(), values.dtype)
    if table is None:
        return []
    x = at.x if at.x.dtype is DType.FLOAT32 else at.integers()
    return [at.look_up(table, _index_in(at, x, table, min(numbers)))]


def _one_hot_encoder(at: _Writer) -> list[Value]:
    """OneHotEncoder of integer categories as a comparison (`zeros` = 1) or a lookup (`zeros` = 0); otherwise [].

    In the lookup an unknown category is an error in the run: its index is out of range of the Gather. [] also for a
    lookup of repeated categories, or of categories beyond a range of `_MOST_KEYS`.
    """
    numbers = at.view.attr("cats_int64s")
    if at.x.dtype.numpy.kind not in "fi" or not numbers or not has_ranks(at.node):
        return []
    if at.view.attr("zeros"):
        hot = at("Equal", at("Unsqueeze", at.integers(), axes=(-1,)), np.array(numbers, np.int64))
        return [at("Cast", hot, to=DType.FLOAT32.onnx_code)]
    table = _dense_table(numbers, range(len(numbers)), len(numbers), np.int64)
    if table is None or len(set(numbers)) < len(numbers):
        return []
    categories = at.look_up(table, _index_in(at, at.integers(), table, min(numbers)))
    return [at.look_up(np.eye(len(numbers), dtype=np.float32), categories)]


def _feature_extractor(at: _Writer) -> list[Value]:
    """ArrayFeatureExtractor as a Gather of constant columns, or of constant labels by the indices that a node found.

    [] otherwise: then an index might be out of range. The labels have the shape of the indices before they become one
    row, [1, labels], so that rows stay apart if a Reshape follows that divides them again.
    """
    indices, columns, labels = at.node.inputs[1], at.editor.array(at.node.inputs[1]), at.editor.array(at.x)
    extent = at.x.shape[-1] if has_ranks(at.node) else None
    if indices is None or not isinstance(extent, int):
        return []
    if labels is not None and labels.size == extent and _are_indices(indices, extent):
        return [at("Reshape", at.look_up(labels.reshape(-1), indices), shape=(1, -1))]
    if columns is None or np.any((columns < 0) | (columns >= extent)) or len(at.x.shape) < 2:
        return []
    return [at("Gather", at.x, columns.reshape(-1), axis=-1)]


def _are_indices(value: Value, extent: int) -> bool:
    """Whether ArgMax, ArgMin or TopK found a value's elements along an axis of this extent: they are valid indices."""
    node = value.producer
    while node is not None and node.op in ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"):
        value = node.required_input(0)
        node = value.producer
    if node is None or node.op not in ("ArgMax", "ArgMin", "TopK"):
        return False
    if node.op == "TopK" and value is node.outputs[0]:
        return False  # the largest elements themselves
    axis = registry.NodeView(registry.get(node.op), node).attr("axis")
    shape = shape_of(node.required_input(0))
    return isinstance(axis, int) and shape is not None and shape[axis] == extent


def _linear_scores(at: _Writer, op: LinearRegressor | LinearClassifier, columns: int) -> Value:
    coefficients, intercepts = op.weights(at.view, columns)
    return at("Add", at("MatMul", at.floats(), np.ascontiguousarray(coefficients.T)), intercepts)


def _linear_regressor(at: _Writer) -> list[Value]:
    assert isinstance(at.view.op, LinearRegressor)
    if at.view.attr("post_transform") not in _TRANSFORMS:
        return []
    return [at.post_transform(_linear_scores(at, at.view.op, at.view.attr("targets")))]


def _linear_classifier(at: _Writer) -> list[Value]:
    op, labels = at.view.op, class_labels(at.view)
    assert isinstance(op, LinearClassifier)
    if op.columns(at.view, len(labels)) != len(labels) or at.view.attr("post_transform") not in _TRANSFORMS:
        return []
    return _classify(at, labels, _linear_scores(at, op, len(labels)))


def _classify(at: _Writer, labels: Array, scores: Value) -> list[Value]:
    """The outputs of a classifier with scores [N,C]: the label [N] of the largest score, and the transformed scores."""
    return [at.look_up(labels, at("ArgMax", scores, axis=1, keepdims=0)), at.post_transform(scores)]


def _tree_classifier(at: _Writer) -> list[Value]:
    """TreeEnsembleClassifier as a TreeEnsembleRegressor that sums the trees, and a lookup of labels.

    Two classes with weights for one class alone are a special case: the label depends on the sign of one score, or,
    without negative weights, on whether it is above 0.5. [] for a `post_transform` that is not in `_TRANSFORMS`.
    """
    op = at.view.op
    assert isinstance(op, TreeEnsembleClassifier)
    labels, weighted = op.labels(at.view), np.unique(op.forest(at.view).target)
    if at.view.attr("post_transform") not in _TRANSFORMS:
        return []
    if len(labels) != 2 or weighted.size != 1:
        return _classify(at, labels, _tree_scores(at, op, len(labels), at.view.attr("class_ids")))
    zeros = (0,) * len(at.view.attr("class_ids"))
    score = _tree_scores(at, op, 1, zeros, np.broadcast_to(op.base(at.view), 2)[weighted])
    positive = bool(op.forest(at.view).weight.min() >= 0)
    wins = at("Greater", at("Squeeze", score, axes=(1,)), 0.5 if positive else 0.0)
    label = at.look_up(labels, at("Cast", wins, to=DType.INT64.onnx_code))
    return [label, _both_scores(at, score, bool(weighted[0]), positive)]


def _both_scores(at: _Writer, score: Value, is_second: bool, positive: bool) -> Value:
    """The scores [N,2] of both classes, from `score` [N,1], s, of the only class that has weights.

    `is_second`: that is the second class. Then the scores are 0 and s, transformed by `post_transform`. Otherwise they
    are sigmoid(-s) and sigmoid(s) for LOGISTIC; other transforms are not applied, and the scores are 1 - s and s if
    `positive` (no weight of the trees is negative), otherwise -s and s.
    """
    if is_second:
        return at.post_transform(at("Pad", score, pads=(0, 1, 0, 0)))
    if at.view.attr("post_transform") == "LOGISTIC":
        return at("Concat", at("Sigmoid", at("Neg", score)), at("Sigmoid", score), axis=1)
    other = at("Sub", 1.0, score) if positive else at("Neg", score)
    return at("Concat", other, score, axis=1)


def _tree_scores(at: _Writer, op: TreeEnsembleClassifier, targets: int, ids: Attr, base: Array | None = None) -> Value:
    """The sums over the trees, [N,targets], computed by a TreeEnsembleRegressor with the classifier's attributes.

    `ids`: the target of each weight. `base`: the initial values of the sums; None for those of the classifier.
    """
    renamed = {name.replace("class_", "target_", 1): value for name, value in at.node.attrs.items()}
    attrs: dict[str, Attr] = {name: value for name, value in renamed.items() if not name.startswith("classlabels_")}
    base = op.base(at.view) if base is None else base
    attrs |= {"n_targets": targets, "target_ids": ids, "post_transform": "NONE"}
    attrs.pop("base_values_as_tensor", None)
    return at("TreeEnsembleRegressor", at.x, **attrs | {"base_values": tuple(base.tolist())})


def _svm_regressor(at: _Writer) -> list[Value]:
    if not _needs_plain_svm(at, False):
        return []
    y = at("SVMRegressor", at.floats(), **at.node.attrs | {"post_transform": "NONE"})
    return [y if at.view.attr("one_class") else at.post_transform(y)]


def _svm_classifier(at: _Writer) -> list[Value]:
    """SVMClassifier as one with integer labels and raw scores, followed by a lookup and the transform.

    Without support vectors it becomes a linear classifier. [] if the kernel covers the node as it is, or cannot.
    """
    labels, view = class_labels(at.view), at.view
    if not sum(view.attr("vectors_per_class") or ()):
        return _linear_svm(at, labels)
    named = labels.dtype == object
    if not _needs_plain_svm(at, named):
        return []
    attrs: dict[str, Attr] = {name: value for name, value in at.node.attrs.items() if name != "classlabels_strings"}
    attrs |= {
        "post_transform": "NONE",
        "classlabels_ints": tuple(range(len(labels))) if named else tuple(labels.tolist()),
    }
    label, scores = at.editor.emit_many(at.node, at.node.op, [at.floats()], 2, attrs)
    if len(labels) == 2 and not view.attr("prob_a"):  # the two scores are one decision and its negative:
        scores = at("Sigmoid", scores) if view.attr("post_transform") == "LOGISTIC" else scores  # no SOFTMAX for these
    else:
        scores = at.post_transform(scores)
    return [at.look_up(labels, label) if named else label, scores]


def _needs_plain_svm(at: _Writer, named: bool) -> bool:
    """Whether an SVM node needs a rewrite before the kernel covers it, and its post-transform allows one."""
    transform = at.view.attr("post_transform")
    return transform in _TRANSFORMS and (named or transform != "NONE" or at.x.dtype is not DType.FLOAT32)


def _linear_svm(at: _Writer, labels: Array) -> list[Value]:
    op = at.view.op
    assert isinstance(op, SVMClassifier)
    if at.view.attr("kernel_type") != "LINEAR" or at.view.attr("post_transform") not in _TRANSFORMS:
        return []
    coefficients = op.vectors(at.view, len(labels), "coefficients").astype(np.float32)
    products = at("MatMul", at.floats(), np.ascontiguousarray(coefficients.T))
    return _classify(at, labels, at("Add", products, at.view.attr("rho")[0]))


_RULES: Mapping[str, Rule] = {
    "ArrayFeatureExtractor": _feature_extractor,
    "LabelEncoder": _label_encoder,
    "OneHotEncoder": _one_hot_encoder,
    "Binarizer": _binarizer,
    "Imputer": _imputer,
    "LinearClassifier": _linear_classifier,
    "LinearRegressor": _linear_regressor,
    "Normalizer": _normalizer,
    "SVMClassifier": _svm_classifier,
    "SVMRegressor": _svm_regressor,
    "Scaler": _scaler,
    "TreeEnsembleClassifier": _tree_classifier,
}
