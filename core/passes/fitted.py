"""Fitted models of ai.onnx.ml in terms of what has kernels: products, trees, support vectors, elementwise operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from core.ir.graph import Array, Attr, Graph, Node, Value
from core.ir.types import DType
from core.ops import registry
from core.ops.labels import LabelEncoder
from core.ops.linear import LinearClassifier, LinearRegressor
from core.ops.scores import class_labels
from core.ops.svm import SVMClassifier
from core.ops.tree_models import TreeEnsembleClassifier
from core.passes.base import PassResult, has_ranks, shape_of
from core.passes.edit import Editor

_MOST_KEYS = 1 << 16  # places of a table of labels
_OF_ANY_RANK = ("ArrayFeatureExtractor", "LabelEncoder", "OneHotEncoder")

_TRANSFORMS = {"NONE": None, "LOGISTIC": "Sigmoid", "SOFTMAX": "Softmax"}  # the others stay with the reference


@dataclass(frozen=True)
class ExpandFitted:
    """Only what takes rows [N,C] of numbers, and labels that are looked up."""

    name: str = "fitted"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op in _RULES and (_takes_rows(node) or node.op in _OF_ANY_RANK):
                results = _RULES[node.op](_At(editor, node))
                for old, new in zip(node.outputs, results, strict=False):
                    editor.replace(old, new)
        return editor.finish()


def _takes_rows(node: Node) -> bool:
    x = node.inputs[0]
    return x is not None and len(shape_of(x) or ()) == 2 and x.dtype.numpy.kind in "fi"


class _At:
    """Writes in place of one node."""

    def __init__(self, editor: Editor, node: Node) -> None:
        self.editor, self.node = editor, node
        self.view = registry.NodeView(registry.get(node.op), node)

    @property
    def x(self) -> Value:
        value = self.node.inputs[0]
        assert value is not None
        return value

    def __call__(self, op: str, *inputs: Value | Array | float, **attrs: Attr) -> Value:
        given = [each if isinstance(each, Value) else self.constant(each) for each in inputs]
        return self.editor.emit(self.node, op, *given, attrs=attrs)

    def constant(self, value: Array | float) -> Value:
        return self.editor.constant(np.asarray(value, np.float32) if isinstance(value, int | float) else value)

    def floats(self) -> Value:
        """X in single precision, in which these operators compute."""
        return self.x if self.x.dtype is DType.FLOAT32 else self("Cast", self.x, to=DType.FLOAT32.onnx_code)

    def integers(self) -> Value:
        return self.x if self.x.dtype is DType.INT64 else self("Cast", self.x, to=DType.INT64.onnx_code)

    def vector(self, name: str, default: float) -> Array:
        """An attribute of numbers."""
        return np.array(self.view.attr(name) or (default,), np.float32)

    def transformed(self, scores: Value) -> Value:
        op = _TRANSFORMS[self.view.attr("post_transform")]
        return scores if op is None else self(op, scores, **({"axis": -1} if op == "Softmax" else {}))

    def looked_up(self, labels: Array, places: Value) -> Value:
        return self("Gather", self.constant(labels), places, axis=0)


Rule: TypeAlias = Callable[[_At], "list[Value]"]


def _scaler(at: _At) -> list[Value]:
    return [at("Mul", at("Sub", at.floats(), at.vector("offset", 0)), at.vector("scale", 1))]


def _normalizer(at: _At) -> list[Value]:
    op = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}[at.view.attr("norm")]
    x = at.floats()
    divisor = at(op, x, axes=(-1,), keepdims=1)
    return [at("Div", x, at("Where", at("Equal", divisor, 0.0), 1.0, divisor))]


def _imputer(at: _At) -> list[Value]:
    if at.x.dtype is not DType.FLOAT32:
        return []
    wanted, imputed = at.view.attr("replaced_value_float"), at.vector("imputed_value_floats", 0)
    found = at("IsNaN", at.x) if np.isnan(wanted) else at("Equal", at.x, wanted)
    return [at("Where", found, imputed, at.x)]


def _binarizer(at: _At) -> list[Value]:
    if at.x.dtype is not DType.FLOAT32:
        return []
    return [at("Cast", at("Greater", at.x, at.view.attr("threshold")), to=DType.FLOAT32.onnx_code)]


def _place_in(at: _At, x: Value, table: Array, least: int) -> Value:
    """Where x (int64 or float32) stands in a table of consecutive whole numbers from `least` on; the last place is for
    all others."""
    behind = len(table) - 1
    first, last = (np.array(number, x.dtype.numpy) for number in (least, least + behind - 1))
    known = at("And", at("GreaterOrEqual", x, first), at("LessOrEqual", x, last))
    place = at("Sub", x, first)
    if x.dtype is DType.FLOAT32:
        known, place = at("And", known, at("Equal", x, at("Floor", x))), at("Cast", place, to=DType.INT64.onnx_code)
    return at("Where", known, place, np.array(behind, np.int64))


def _table_of(keys: Sequence[int], values: Sequence[Any], default: Any, dtype: Any) -> Array | None:
    """The value of each integer from the least key to the greatest, and behind them the default; None where keys lie
    too far apart."""
    least, greatest = min(keys), max(keys)
    if greatest - least >= _MOST_KEYS:
        return None
    table: Array = np.full(greatest - least + 2, default, dtype)
    for key, value in zip(keys, values, strict=True):  # of two values of a key the last one
        table[key - least] = value
    return table


def _label_encoder(at: _At) -> list[Value]:
    """Of whole numbers."""
    op = registry.get(at.node.op)
    assert isinstance(op, LabelEncoder)
    keys, values, default = op.table(at.view)
    whole = keys.dtype.kind == "i" or (keys.dtype == np.float32 and np.isfinite(keys).all() and not np.any(keys % 1))
    if not whole or not keys.size or not has_ranks(at.node):
        return []
    numbers = [int(key) for key in keys.ravel().tolist()]
    table = _table_of(numbers, values.ravel().tolist(), default.item(), values.dtype)
    if table is None:
        return []
    x = at.x if at.x.dtype is DType.FLOAT32 else at.integers()
    return [at.looked_up(table, _place_in(at, x, table, min(numbers)))]


def _one_hot_encoder(at: _At) -> list[Value]:
    """Of numbers. Where an element of no category is an error, it is looked up behind the last one and so refused."""
    numbers = at.view.attr("cats_int64s")
    if at.x.dtype.numpy.kind not in "fi" or not numbers or not has_ranks(at.node):
        return []
    if at.view.attr("zeros"):
        hot = at("Equal", at("Unsqueeze", at.integers(), axes=(-1,)), np.array(numbers, np.int64))
        return [at("Cast", hot, to=DType.FLOAT32.onnx_code)]
    table = _table_of(numbers, range(len(numbers)), len(numbers), np.int64)
    if table is None or len(set(numbers)) < len(numbers):
        return []
    places = at.looked_up(table, _place_in(at, at.integers(), table, min(numbers)))
    return [at.looked_up(np.eye(len(numbers), dtype=np.float32), places)]


def _feature_extractor(at: _At) -> list[Value]:
    """Columns that the model names, or the labels of largest scores."""
    places, columns, labels = at.node.inputs[1], at.editor.array(at.node.inputs[1]), at.editor.array(at.x)
    extent = at.x.shape[-1] if has_ranks(at.node) else None
    if places is None or not isinstance(extent, int):
        return []
    if labels is not None and labels.size == extent and _are_places(places, extent):
        found = at.looked_up(labels.reshape(-1), at("Reshape", places, shape=(-1,)))
        return [at("Unsqueeze", found, axes=(0,))]
    if columns is None or np.any((columns < 0) | (columns >= extent)) or len(at.x.shape) < 2:
        return []
    return [at("Gather", at.x, columns.reshape(-1), axis=-1)]


def _are_places(value: Value, below: int) -> bool:
    """Whether these are surely numbers from 0 on and `below` an extent: where scores are largest."""
    node = value.producer
    while node is not None and node.op in ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"):
        node = node.inputs[0].producer if node.inputs[0] is not None else None
    if node is None or node.op != "ArgMax" or node.inputs[0] is None:
        return False
    axis, shape = node.attrs.get("axis", 0), shape_of(node.inputs[0])
    return isinstance(axis, int) and shape is not None and shape[axis] == below


def _linear_scores(at: _At, op: LinearRegressor | LinearClassifier, columns: int) -> Value:
    coefficients, intercepts = op.weights(at.view, columns)
    return at("Add", at("MatMul", at.floats(), np.ascontiguousarray(coefficients.T)), intercepts)


def _linear_regressor(at: _At) -> list[Value]:
    assert isinstance(at.view.op, LinearRegressor)
    if at.view.attr("post_transform") not in _TRANSFORMS:
        return []
    return [at.transformed(_linear_scores(at, at.view.op, at.view.attr("targets")))]


def _linear_classifier(at: _At) -> list[Value]:
    op, labels = at.view.op, class_labels(at.view)
    assert isinstance(op, LinearClassifier)
    if op.columns(at.view, len(labels)) != len(labels) or at.view.attr("post_transform") not in _TRANSFORMS:
        return []
    return _classified(at, labels, _linear_scores(at, op, len(labels)))


def _classified(at: _At, labels: Array, scores: Value) -> list[Value]:
    """The label of the largest score, and the scores."""
    return [at.looked_up(labels, at("ArgMax", scores, axis=1, keepdims=0)), at.transformed(scores)]


def _tree_classifier(at: _At) -> list[Value]:
    op = at.view.op
    assert isinstance(op, TreeEnsembleClassifier)
    labels, weighed = op.labels(at.view), np.unique(op.forest(at.view).target)
    if at.view.attr("post_transform") not in _TRANSFORMS:
        return []
    if len(labels) != 2 or weighed.size != 1:
        return _classified(at, labels, _tree_scores(at, op, len(labels), at.view.attr("class_ids")))
    zeros = (0,) * len(at.view.attr("class_ids"))
    score = _tree_scores(at, op, 1, zeros, np.broadcast_to(op.base(at.view), 2)[weighed])
    positive = bool(op.forest(at.view).weight.min() >= 0)
    wins = at("Greater", at("Squeeze", score, axes=(1,)), 0.5 if positive else 0.0)
    label = at.looked_up(labels, at("Cast", wins, to=DType.INT64.onnx_code))
    return [label, _both(at, score, bool(weighed[0]), positive)]


def _both(at: _At, score: Value, is_second: bool, positive: bool) -> Value:
    """The scores of both classes from that of one, [N,1]; see `TreeEnsembleClassifier`."""
    if is_second:
        return at.transformed(at("Pad", score, pads=(0, 1, 0, 0)))
    if at.view.attr("post_transform") == "LOGISTIC":
        return at("Concat", at("Sigmoid", at("Neg", score)), at("Sigmoid", score), axis=1)
    other = at("Sub", 1.0, score) if positive else at("Neg", score)
    return at("Concat", other, score, axis=1)


def _tree_scores(at: _At, op: TreeEnsembleClassifier, targets: int, ids: Attr, base: Array | None = None) -> Value:
    """The sums over trees as a regressor's."""
    renamed = {name.replace("class_", "target_", 1): value for name, value in at.node.attrs.items()}
    attrs: dict[str, Attr] = {name: value for name, value in renamed.items() if not name.startswith("classlabels_")}
    base = op.base(at.view) if base is None else base
    attrs |= {"n_targets": targets, "target_ids": ids, "post_transform": "NONE"}
    attrs.pop("base_values_as_tensor", None)
    return at("TreeEnsembleRegressor", at.x, **attrs | {"base_values": tuple(base.tolist())})


def _svm_regressor(at: _At) -> list[Value]:
    if not _needs_plain_svm(at, False):
        return []
    y = at("SVMRegressor", at.floats(), **at.node.attrs | {"post_transform": "NONE"})
    return [y if at.view.attr("one_class") else at.transformed(y)]


def _svm_classifier(at: _At) -> list[Value]:
    """With numbers for labels, and scores as they are; without support vectors a linear model."""
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
    if len(labels) == 2 and not view.attr("prob_a"):  # one decision and its negative, which no other transform changes
        scores = at("Sigmoid", scores) if view.attr("post_transform") == "LOGISTIC" else scores
    else:
        scores = at.transformed(scores)
    return [at.looked_up(labels, label) if named else label, scores]


def _needs_plain_svm(at: _At, named: bool) -> bool:
    """Whether a support vector machine must be written in another form to be computed by the kernel, and can be."""
    transform = at.view.attr("post_transform")
    return transform in _TRANSFORMS and (named or transform != "NONE" or at.x.dtype is not DType.FLOAT32)


def _linear_svm(at: _At, labels: Array) -> list[Value]:
    op = at.view.op
    assert isinstance(op, SVMClassifier)
    if at.view.attr("kernel_type") != "LINEAR" or at.view.attr("post_transform") not in _TRANSFORMS:
        return []
    coefficients = op.vectors(at.view, len(labels), "coefficients").astype(np.float32)
    products = at("MatMul", at.floats(), np.ascontiguousarray(coefficients.T))
    return _classified(at, labels, at("Add", products, at.view.attr("rho")[0]))


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
