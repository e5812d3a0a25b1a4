"""Shared code of the classifiers and regressors of ai.onnx.ml: post-transforms, class labels, the second class.

Where the ONNX specification is silent (above all on one score for two classes), they follow ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType, TensorType
from lathe.core.ops.opdef.registry import Infer, NodeView
from lathe.core.ops.opdef.type_rules import Kind

DOMAIN = "ai.onnx.ml"
FITTED = "models of ai.onnx.ml are not trained by gradients"
NUMBERS = Kind("float32, float64, int32 or int64", frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64}))


def softmax(scores: Array) -> Array:
    """Softmax along the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=-1, keepdims=True)


def softmax_zero(scores: Array) -> Array:
    """Softmax along the last axis over the scores that are not zero; the others stay zero."""
    powers = np.where(scores == 0, 0, np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf)))
    return powers / np.maximum(powers.sum(axis=-1, keepdims=True), np.finfo(powers.dtype).tiny)


def probit(scores: Array) -> Array:
    """The quantile function of the standard normal distribution; NaN outside (0, 1)."""
    quantile = NormalDist().inv_cdf
    items: list[Any] = [quantile(float(p)) if 0 < p < 1 else np.nan for p in scores.ravel()]
    return np.array(items, scores.dtype).reshape(scores.shape)


def logistic(scores: Array) -> Array:
    return 1 / (1 + np.exp(-scores))


POST_TRANSFORMS: Mapping[str, Callable[[Array], Array]] = {
    "NONE": lambda scores: scores,
    "SOFTMAX": softmax,
    "LOGISTIC": logistic,
    "SOFTMAX_ZERO": softmax_zero,
    "PROBIT": probit,
}


def check_transform(c: NodeView) -> None:
    """ModelError for an unknown `post_transform`."""
    if c.attr("post_transform") not in POST_TRANSFORMS:
        c.fail(f"post_transform is {c.attr('post_transform')!r}, expected one of {', '.join(POST_TRANSFORMS)}")


def apply_post_transform(c: NodeView, scores: Array) -> Array:
    """Scores [rows, classes] after `post_transform`, as float32."""
    return POST_TRANSFORMS[c.attr("post_transform")](scores).astype(np.float32)


def matrix_rows(c: Infer) -> Dim | None:
    """The number of rows of X: N for [N,C], 1 for [C]; None if the rank is not known. ModelError for other ranks."""
    shape = c.shape(0)
    if shape is None:
        return None
    if len(shape) not in (1, 2):
        c.fail(f"X is {c.tensor(0)}, expected [N,C] or [C]")
    return shape[0] if len(shape) == 2 else 1


def as_rows(x: Array, dtype: Any = np.float32) -> Array:
    """X as a matrix [rows, features] of type `dtype`; a vector is one row."""
    return np.atleast_2d(x).astype(dtype)


def class_labels(c: NodeView, integers: str = "classlabels_ints") -> Array:
    """The class labels, int64 or strings, from the attribute that is present. ModelError for both or neither."""
    found = [c.attr(integers), c.attr("classlabels_strings")]
    if bool(found[0]) == bool(found[1]):
        c.fail(f"has {len(found[0] or ())} {integers} and {len(found[1] or ())} classlabels_strings, expected one kind")
    return np.array(found[0], np.int64) if found[0] else np.array(found[1], object)


def classifier_types(c: Infer, labels: Array, columns: int) -> list[TensorType]:
    """The types of a classifier's two outputs: labels [rows], and float32 scores [rows, columns]."""
    rows, dtype = matrix_rows(c), DType.from_numpy(labels.dtype)
    if rows is None:
        return [TensorType(dtype, None), TensorType(DType.FLOAT32, None)]
    return [TensorType(dtype, (rows,)), TensorType(DType.FLOAT32, (rows, columns))]


def both_classes(score: Array, complement: bool) -> Array:
    """Scores [rows, 2] from `score` [rows] of the second class: the first gets 1 - score (`complement`) or -score."""
    return np.stack([1 - score if complement else -score, score], axis=1)


def label_of_largest(labels: Array, scores: Array) -> Array:
    """The label of the largest score of each row; the first of equal scores wins."""
    return labels[scores.argmax(axis=1)]


def floats(values: Sequence[float] | None, dtype: Any = np.float32) -> Array:
    """A numeric attribute as a vector of type `dtype`, empty if absent."""
    return np.array(values if values is not None else (), dtype)
