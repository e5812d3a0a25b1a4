"""Linear models of ai.onnx.ml."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.ml.scores import (
    DOMAIN,
    FITTED,
    NUMBERS,
    apply_post_transform,
    as_rows,
    both_classes,
    check_transform,
    class_labels,
    classifier_types,
    floats,
    label_of_largest,
    logistic,
    matrix_rows,
)
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.type_rules import check_kind, untouched_rows


class _Linear(OpDef):
    """Family base: rows times coefficients [columns, features], plus an intercept per column."""

    no_gradient = FITTED
    inputs = "X"
    domain = DOMAIN

    def weights(self, c: NodeView, columns: int) -> tuple[Array, Array]:
        """Coefficients [columns, features] and intercepts [columns] as float32; zeros if there are no intercepts.

        ModelError if their numbers do not fit `columns`.
        """
        coefficients, intercepts = floats(c.attr("coefficients")), floats(c.attr("intercepts"))
        if columns < 1 or not coefficients.size or coefficients.size % columns:
            c.fail(f"has {coefficients.size} coefficients for {columns} columns, expected a multiple of the columns")
        if intercepts.size not in (0, columns):
            c.fail(f"has {intercepts.size} intercepts, expected {columns}")
        return coefficients.reshape(columns, -1), intercepts if intercepts.size else np.zeros(columns, np.float32)

    def check(self, c: Infer, columns: int) -> None:
        check_kind(c, 0, NUMBERS)
        check_transform(c)
        features = self.weights(c, columns)[0].shape[1]
        shape = c.shape(0)
        if shape and isinstance(shape[-1], int) and shape[-1] != features:
            c.fail(f"X is {c.tensor(0)}, its coefficients are for {features} features")

    def scores(self, c: Call, x: Array, columns: int) -> Array:
        coefficients, intercepts = self.weights(c, columns)
        rows = as_rows(x)
        if rows.shape[1] != coefficients.shape[1]:
            c.fail(f"X has {rows.shape[1]} features, expected {coefficients.shape[1]}")
        return rows @ coefficients.T + intercepts

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return untouched_rows(c, axes, {c.tensor(0).rank - 1})


@register
class LinearRegressor(_Linear):
    """X times `coefficients` plus `intercepts`, one column per target, then the post-transform."""

    outputs = "Y"
    attrs = {"coefficients": Required("numbers"), "intercepts": None, "post_transform": "NONE", "targets": 1}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        self.check(c, c.attr("targets"))
        rows = matrix_rows(c)
        return [TensorType(DType.FLOAT32, None if rows is None else (rows, c.attr("targets")))]

    def reference(self, c: Call, x: Array) -> Array:
        return apply_post_transform(c, self.scores(c, x, c.attr("targets")))


@register
class LinearClassifier(_Linear):
    """The label of the largest score, and the scores.

    If there is one intercept for two classes, there is a single score, that of the second class. The second class wins
    if this score is above 0. Then LOGISTIC is applied if it is the post-transform (other post-transforms are ignored),
    and the first class gets 1 minus the score.
    """

    outputs = "Y, Z"
    attrs = {
        "classlabels_ints": None,
        "classlabels_strings": None,
        "coefficients": Required("numbers"),
        "intercepts": None,
        "multi_class": 0,
        "post_transform": "NONE",
    }

    def columns(self, c: NodeView, classes: int) -> int:
        """The number of computed scores: the number of intercepts, or `classes` if there are no intercepts."""
        return len(c.attr("intercepts") or ()) or classes

    def infer(self, c: Infer) -> Sequence[ValueType]:
        labels = class_labels(c)
        columns = self.columns(c, len(labels))
        self.check(c, columns)
        if columns != len(labels) and (columns, len(labels)) != (1, 2):
            c.fail(f"has {columns} scores for {len(labels)} labels, expected one each, or one for two")
        return classifier_types(c, labels, len(labels))

    def reference(self, c: Call, x: Array) -> tuple[Array, Array]:
        labels = class_labels(c)
        scores = self.scores(c, x, self.columns(c, len(labels)))
        if scores.shape[1] < len(labels):
            score = scores[:, 0]
            kept = logistic(score) if c.attr("post_transform") == "LOGISTIC" else score
            return labels[(score > 0).astype(np.intp)], both_classes(kept, complement=True)
        return label_of_largest(labels, scores), apply_post_transform(c, scores)
