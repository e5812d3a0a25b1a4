"""Support vector machines of ai.onnx.ml, computed in float64, which distances of close vectors need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

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
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, RowAxis, register
from lathe.core.ops.opdef.type_rules import check_kind, untouched_rows

LEAST = 1e-7  # LIBSVM clamps pairwise probabilities to [1e-7, 1 - 1e-7]
ROUNDS, TOLERANCE = 100, 0.005  # LIBSVM's limits of pairwise coupling: iterations, and error per class


class _Parameters(NamedTuple):
    gamma: float
    coef0: float
    degree: float


class Machine(NamedTuple):
    """Support vectors [vectors, features] grouped by class; `sizes` are the numbers of vectors of the classes.

    Weights are [classes - 1, vectors]; `rho` has the offset of each decision. A regressor has one class, with one row
    of weights and one decision.
    """

    vectors: Array
    sizes: tuple[int, ...]
    weights: Array
    rho: Array

    @property
    def spans(self) -> list[slice]:
        """The range of the support vectors of each class, as slices."""
        return [slice(end - size, end) for size, end in zip(self.sizes, np.cumsum(self.sizes).tolist(), strict=True)]

    def decided(self, products: Array) -> Array:
        """Decisions [.., decisions] without offsets, from kernel products [.., vectors].

        There is one decision for each pair of classes i < j; it is positive for i. A machine of one class has one
        decision.
        """
        if len(self.sizes) == 1:
            return products @ self.weights.T
        spans, weights = self.spans, self.weights
        columns = [
            products[..., spans[i]] @ weights[j - 1, spans[i]] + products[..., spans[j]] @ weights[i, spans[j]]
            for i, j in combinations(range(len(spans)), 2)
        ]
        return np.stack(columns, axis=-1)

    def linear(self) -> Array:
        """The weights [decisions, features] of the linear functions that a machine with linear kernel computes."""
        return self.decided(self.vectors.T).T


def _rbf(x: Array, y: Array, p: _Parameters) -> Array:
    """The RBF kernel, from sums of squared differences, which are accurate for close vectors and for infinities."""
    squares = np.zeros((len(x), len(y)))
    for mine, theirs in zip(x.T, y.T, strict=True):
        squares += np.square(mine[:, None] - theirs)
    return np.exp(-p.gamma * squares)


_KERNELS: Mapping[str, Callable[[Array, Array, _Parameters], Array]] = {
    "LINEAR": lambda x, y, p: x @ y.T,
    "POLY": lambda x, y, p: (p.gamma * (x @ y.T) + p.coef0) ** p.degree,
    "RBF": _rbf,
    "SIGMOID": lambda x, y, p: np.tanh(p.gamma * (x @ y.T) + p.coef0),
}


class _Svm(OpDef):
    """Family base: a kernel between rows and support vectors, or between rows and coefficients if there are none."""

    no_gradient = FITTED
    inputs = "X"
    domain = DOMAIN
    attrs = {
        "coefficients": None,
        "kernel_params": None,
        "kernel_type": "LINEAR",
        "post_transform": "NONE",
        "rho": None,
        "support_vectors": None,
    }

    def vectors(self, c: NodeView, count: int, name: str = "support_vectors") -> Array:
        """The attribute `name` as float64 [count, length]. ModelError if it is empty or does not divide evenly."""
        values = floats(c.attr(name), np.float64)
        if count < 1 or not values.size or values.size % count:
            c.fail(f"{name} has {values.size} numbers, expected {count} vectors of equal length")
        return values.reshape(count, -1)

    def kernel(self, c: Call, x: Array, vectors: Array) -> Array:
        """The kernel (`kernel_type`) of each row of x and each vector: float64 [rows, vectors].

        FeedError if rows and vectors have different numbers of features.
        """
        rows = as_rows(x, np.float64)
        if rows.shape[1] != vectors.shape[1]:
            c.fail(f"X has {rows.shape[1]} features, expected {vectors.shape[1]}")
        parameters = _Parameters(*(c.attr("kernel_params") or (0.0, 0.0, 0.0)))
        return _KERNELS[c.attr("kernel_type")](rows, vectors, parameters)

    def check(self, c: Infer, least_rho: int) -> None:
        check_kind(c, 0, NUMBERS)
        check_transform(c)
        if c.attr("kernel_type") not in _KERNELS:
            c.fail(f"kernel_type is {c.attr('kernel_type')!r}, expected one of {', '.join(_KERNELS)}")
        if len(c.attr("kernel_params") or (0, 0, 0)) != 3:
            c.fail(f"kernel_params is {c.attr('kernel_params')}, expected gamma, coef0 and degree")
        if len(c.attr("rho") or ()) < least_rho:
            c.fail(f"rho has {len(c.attr('rho') or ())} numbers, expected {least_rho}")

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return untouched_rows(c, axes, {c.tensor(0).rank - 1})


@register
class SVMRegressor(_Svm):
    """The weighted sum of kernels plus `rho`, then the post-transform: float32 [N, 1].

    With `one_class` there is no post-transform: 1 if the sum is positive, otherwise -1.
    """

    outputs = "Y"
    attrs = {**_Svm.attrs, "n_supports": 0, "one_class": 0}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        self.check(c, 1)
        self.machine(c)
        rows = matrix_rows(c)
        return [TensorType(DType.FLOAT32, None if rows is None else (rows, 1))]

    def machine(self, c: NodeView) -> Machine:
        supports, rho = c.attr("n_supports"), floats(c.attr("rho"), np.float64)[:1]
        if not supports:
            return Machine(self.vectors(c, 1, "coefficients"), (1,), np.ones((1, 1)), rho)
        return Machine(self.vectors(c, supports), (supports,), self.vectors(c, supports, "coefficients").T[:1], rho)

    def reference(self, c: Call, x: Array) -> Array:
        machine = self.machine(c)
        scores = machine.decided(self.kernel(c, x, machine.vectors)) + machine.rho
        if c.attr("one_class"):
            return np.where(scores > 0, 1, -1).astype(np.float32)
        return apply_post_transform(c, scores)


@register
class SVMClassifier(_Svm):
    """The label, and scores: one per class without support vectors or with `prob_a`, otherwise one per pair of classes.

    A single pair without `prob_a` has two scores: the decision's negative and the decision. With support vectors, the
    label is the class that wins most pairs, the first one if several do, even if another class has a larger
    probability. Probabilities come from `prob_a` and `prob_b` by pairwise coupling (Wu, Lin and Weng 2004), as in
    LIBSVM.
    """

    outputs = "Y, Z"
    attrs = {
        **_Svm.attrs,
        "classlabels_ints": None,
        "classlabels_strings": None,
        "prob_a": None,
        "prob_b": None,
        "vectors_per_class": None,
    }

    def infer(self, c: Infer) -> Sequence[ValueType]:
        labels = class_labels(c)
        pairs = len(labels) * (len(labels) - 1) // 2
        supports = sum(c.attr("vectors_per_class") or ())
        self.check(c, pairs if supports else 1)
        if not supports:
            self.vectors(c, len(labels), "coefficients")
            return classifier_types(c, labels, len(labels))
        self._check_supports(c, len(labels), supports)
        has_scores = bool(c.attr("prob_a")) or pairs == 1
        return classifier_types(c, labels, len(labels) if has_scores else pairs)

    def _check_supports(self, c: Infer, classes: int, supports: int) -> None:
        sizes, pairs = c.attr("vectors_per_class"), classes * (classes - 1) // 2
        if classes < 2 or len(sizes) != classes or min(sizes) < 0:
            c.fail(f"vectors_per_class is {sizes}, expected a number for each of {classes} classes, at least 2")
        self.vectors(c, supports)
        if len(c.attr("coefficients") or ()) != (classes - 1) * supports:
            c.fail(f"has {len(c.attr('coefficients') or ())} coefficients, expected {(classes - 1) * supports}")
        for name in ("prob_a", "prob_b"):
            if len(c.attr(name) or ()) != (pairs if c.attr("prob_a") else 0):
                c.fail(f"{name} has {len(c.attr(name) or ())} numbers, expected one for each of {pairs} pairs")

    def reference(self, c: Call, x: Array) -> tuple[Array, Array]:
        labels = class_labels(c)
        if not sum(c.attr("vectors_per_class") or ()):
            scores = self.kernel(c, x, self.vectors(c, len(labels), "coefficients")) + c.attr("rho")[0]
            return label_of_largest(labels, scores), apply_post_transform(c, scores)
        machine = self.machine(c)
        decisions = machine.decided(self.kernel(c, x, machine.vectors)) + machine.rho
        label = label_of_largest(labels, _votes(decisions, len(labels)))
        if not c.attr("prob_a"):
            return label, self._pair_scores(c, decisions)
        return label, apply_post_transform(c, _coupled_probabilities(_pair_probabilities(c, decisions), len(labels)))

    def machine(self, c: NodeView) -> Machine:
        """The `Machine` of a classifier that has support vectors, from the attributes."""
        sizes, classes = c.attr("vectors_per_class"), len(class_labels(c))
        rho = floats(c.attr("rho"), np.float64)[: classes * (classes - 1) // 2]
        return Machine(self.vectors(c, sum(sizes)), tuple(sizes), self.vectors(c, classes - 1, "coefficients"), rho)

    def _pair_scores(self, c: Call, decisions: Array) -> Array:
        """Scores without probabilities: `decisions` [rows, pairs] after `post_transform`, float32.

        A single pair has two scores, the negative of the decision and the decision; with LOGISTIC they are 1 minus its
        sigmoid and its sigmoid, and other post-transforms are ignored.
        """
        if decisions.shape[1] > 1:
            return apply_post_transform(c, decisions)
        score = decisions[:, 0]
        if c.attr("post_transform") == "LOGISTIC":
            return both_classes(logistic(score), complement=True).astype(np.float32)
        return both_classes(score, complement=False).astype(np.float32)


def _votes(decisions: Array, classes: int) -> Array:
    """The number of pairs that each class wins, [rows, classes].

    The first class of a pair wins a positive decision, the second any other.
    """
    votes = np.zeros((len(decisions), classes), np.int64)
    for column, (i, j) in enumerate(combinations(range(classes), 2)):
        first = decisions[:, column] > 0
        votes[:, i] += first
        votes[:, j] += ~first
    return votes


def _pair_probabilities(c: Call, decisions: Array) -> Array:
    """The probability [rows, pairs] that the first class of each pair wins, clamped to [LEAST, 1 - LEAST].

    Platt scaling: the sigmoid of -(a * decision + b), with `prob_a` and `prob_b`.
    """
    a, b = floats(c.attr("prob_a"), np.float64), floats(c.attr("prob_b"), np.float64)
    return np.clip(logistic(-(a * decisions + b)), LEAST, 1 - LEAST)


def _coupled_probabilities(pairs: Array, classes: int) -> Array:
    """Class probabilities [rows, classes] from pairwise ones, by algorithm 2 of Wu, Lin and Weng."""
    r = np.zeros((len(pairs), classes, classes))
    for column, (i, j) in enumerate(combinations(range(classes), 2)):
        r[:, i, j], r[:, j, i] = pairs[:, column], 1 - pairs[:, column]
    diagonal = np.arange(classes)
    q = -r.transpose(0, 2, 1) * r
    q[:, diagonal, diagonal] = np.square(r).sum(axis=1)
    p = np.full((len(pairs), classes), 1 / classes)
    # The rows that have not converged. Each row stops where LIBSVM stops: more iterations would change its results.
    rows = np.arange(len(pairs))
    for _ in range(max(ROUNDS, classes)):
        qp = np.einsum("nij,nj->ni", q[rows], p[rows])
        pqp = np.einsum("ni,ni->n", p[rows], qp)
        going = np.abs(qp - pqp[:, None]).max(axis=1) >= TOLERANCE / classes
        if not going.any():
            break
        rows = rows[going]
        p[rows] = _coupling_step(p[rows], q[rows], qp[going], pqp[going])
    return p


def _coupling_step(p: Array, q: Array, qp: Array, pqp: Array) -> Array:
    """The probabilities p [rows, classes] after one iteration over all classes; `p` is changed in place.

    `q` is the matrix Q of the paper, `qp` the product Qp, and `pqp` the scalar pQp of each row.
    """
    for t in range(p.shape[1]):
        step = (pqp - qp[:, t]) / q[:, t, t]
        p[:, t] += step
        pqp = (pqp + step * (step * q[:, t, t] + 2 * qp[:, t])) / np.square(1 + step)
        qp = (qp + step[:, None] * q[:, t]) / (1 + step)[:, None]
        p /= (1 + step)[:, None]
    return p
