"""Metrics of a model's outputs against targets, accumulated batch by batch.

Memory is bounded by the number of classes, or of numbers per row. Only the area under the ROC curve stores scores, at
most `MAX_SCORES`.
Definitions are those of scikit-learn, also for divisions by zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lathe.core.train.data.dataset import Values
from lathe.core.train.data.moments import Moments

Matrix: TypeAlias = NDArray[np.int64]
Vector: TypeAlias = NDArray[np.float64]

MAX_SCORES = 1 << 24  # most scores that are stored: 64 MiB of float32
_SUM_TOLERANCE = 0.02  # five times the spacing of bfloat16 below 1
_LEAST_PROBABILITY = float(np.finfo(np.float32).eps)
MAX_CONFUSION_CLASSES = 1000  # most classes of a confusion matrix: a larger one is unreadable


class MetricCollector(Protocol):
    """The interface of a collector that accumulates the metrics of a model's outputs, batch by batch."""

    def add(self, target: Values, output: Values) -> None:
        """Add a batch: targets and the model's outputs."""
        ...

    def values(self) -> dict[str, float]:
        """All metrics so far, by name."""
        ...

    @property
    def confusion(self) -> Matrix | None:
        """The confusion matrix: rows are true classes, columns are predicted classes.

        None for regression, and for more than `MAX_CONFUSION_CLASSES` classes.
        """
        ...


def metric_collector(classes: int | None) -> MetricCollector:
    """A collector for outputs and class indices; if `classes` is None, for outputs and numbers.

    Outputs are [N, C, ...] for class indices [N, ...], and have the shape of the targets for numbers.
    """
    return RegressionMetrics() if classes is None else ClassificationMetrics(classes)


class ClassificationMetrics:
    """Classification metrics of outputs [N, C, ...] against class indices [N, ...].

    `classes` is C. `values` has `accuracy`, the macro averages `precision`, `recall` and `f1`, and `log_loss`; for more
    than 5 classes `top5`; and `auc` if it is defined (see `RocArea.value`).

    `log_loss` and `auc` need probabilities. The outputs are probabilities if each row of all batches is one
    distribution: no number below 0, and a sum of 1 (`are_distributions`). Otherwise they are logits or
    log-probabilities, and their softmax gives the probabilities.
    """

    def __init__(self, classes: int) -> None:
        self.counts = ClassCounts(classes)
        self.top = TopK(5) if classes > 5 else None
        self.area = RocArea(classes)
        self._loss_of_logits, self._loss_of_probabilities = LogLoss(), LogLoss()
        self._are_probabilities = True  # no row so far says otherwise
        self._confusion = Confusion(classes) if classes <= MAX_CONFUSION_CLASSES else None

    def add(self, target: Values, output: Values) -> None:
        target, output = target.ravel(), np.moveaxis(output, 1, -1).reshape(-1, output.shape[1])
        predicted = output.argmax(axis=1)
        self.counts.add(target, predicted)
        self._loss_of_logits.add(target, log_softmax(output))
        self._are_probabilities = self._are_probabilities and are_distributions(output)
        if self._are_probabilities:
            self._loss_of_probabilities.add(target, log_of_probabilities(output))
        self.area.add(target, output)
        if self.top:
            self.top.add(target, output)
        if self._confusion:
            self._confusion.add(target, predicted)

    def values(self) -> dict[str, float]:
        metrics = {
            "accuracy": self.counts.accuracy,
            "precision": self.counts.macro(self.counts.precision),
            "recall": self.counts.macro(self.counts.recall),
            "f1": self.counts.macro(self.counts.f1),
            "log_loss": (self._loss_of_probabilities if self._are_probabilities else self._loss_of_logits).value,
        }
        if self.top:
            metrics[f"top{self.top.k}"] = self.top.value
        area = self.area.value(are_logits=not self._are_probabilities)
        return metrics if area is None else {**metrics, "auc": area}

    @property
    def confusion(self) -> Matrix | None:
        return self._confusion.matrix if self._confusion else None


class RegressionMetrics:
    """Regression metrics of outputs against numbers of the same shape [N, ...]."""

    confusion: Matrix | None = None

    def __init__(self) -> None:
        self._count = 0
        self._squares: Vector = np.zeros(1)
        self._distances = 0.0
        self._targets = Moments()

    def add(self, target: Values, output: Values) -> None:
        targets = target.reshape(len(target), -1).astype(np.float64)
        error = output.reshape(len(target), -1) - targets
        self._targets.add(targets)
        self._squares = self._squares + np.square(error).sum(axis=0)
        self._distances += float(np.abs(error).sum())
        self._count += error.size

    def values(self) -> dict[str, float]:
        """`rmse` and `mae` over all numbers; `r2` averaged over the numbers of a row."""
        count = max(self._count, 1)
        rmse = float(np.sqrt(self._squares.sum() / count))
        return {"rmse": rmse, "mae": self._distances / count, "r2": self._r2()}

    def _r2(self) -> float:
        spread = self._targets.deviation**2 * self._targets.count
        perfect = np.where(self._squares == 0, 1.0, 0.0)
        explained = 1 - np.divide(self._squares, spread, out=1 - perfect, where=spread > 0)
        return float(explained.mean())


@dataclass
class Confusion:
    """The confusion matrix [C, C]: rows are true classes, columns are predicted classes."""

    classes: int
    matrix: Matrix = field(init=False)

    def __post_init__(self) -> None:
        self.matrix = np.zeros((self.classes, self.classes), np.int64)

    def add(self, target: Values, predicted: Values) -> None:
        """Add true and predicted class indices, both [N]."""
        np.add.at(self.matrix, (target, predicted), 1)


@dataclass
class ClassCounts:
    """Per class the number of rows of that class, of predictions of it, and of correct predictions."""

    classes: int
    table: Matrix = field(init=False)  # [3, classes]: true, predicted, correct

    def __post_init__(self) -> None:
        self.table = np.zeros((3, self.classes), np.int64)

    def add(self, target: Values, predicted: Values) -> None:
        """Add true and predicted class indices, both [N]."""
        for row, classes in enumerate((target, predicted, target[target == predicted])):
            self.table[row] += np.bincount(classes, minlength=self.classes)

    @property
    def accuracy(self) -> float:
        """The share of correct predictions, which equals micro-averaged precision, recall and F1."""
        return float(self.table[2].sum() / max(self.table[0].sum(), 1))

    @property
    def recall(self) -> Vector:
        """Per class [C]: the share of its rows that were predicted correctly; 0 without rows."""
        return _share(self.table[2], self.table[0])

    @property
    def precision(self) -> Vector:
        """Per class [C]: the share of its predictions that are correct; 0 without predictions."""
        return _share(self.table[2], self.table[1])

    @property
    def f1(self) -> Vector:
        """Per class [C]: the harmonic mean of precision and recall; 0 if the class does not occur."""
        return _share(2 * self.table[2], self.table[0] + self.table[1])

    def macro(self, values: Vector) -> float:
        """The mean of `values` over the classes that occur among targets or predictions (macro average).

        0 if no class occurs.
        """
        occurs = self.table[:2].any(axis=0)
        return float(values[occurs].mean()) if occurs.any() else 0.0


@dataclass
class TopK:
    """Top-k accuracy: the share of rows whose class is among the k highest scores.

    Of equal scores the one of the lower class index ranks first.
    """

    k: int
    right: int = 0
    count: int = 0

    def add(self, target: Values, scores: Values) -> None:
        """Add class indices [N] and scores [N, C]."""
        own = np.take_along_axis(scores, target[:, None], axis=1)
        earlier = (scores == own) & (np.arange(scores.shape[1]) < target[:, None])
        rank = (scores > own).sum(axis=1) + earlier.sum(axis=1)
        self.right += int((rank < self.k).sum())
        self.count += len(target)

    @property
    def value(self) -> float:
        return self.right / max(self.count, 1)


@dataclass
class LogLoss:
    """Log loss: the mean of -log of the predicted probability of the true class."""

    total: float = 0.0
    count: int = 0

    def add(self, target: Values, log_probabilities: Values) -> None:
        """Add class indices [N] and log-probabilities [N, C]."""
        self.total -= float(np.take_along_axis(log_probabilities, target[:, None], axis=1).sum())
        self.count += len(target)

    @property
    def value(self) -> float:
        return self.total / max(self.count, 1)


@dataclass
class RocArea:
    """Area under the ROC curve: for two classes that of the second, otherwise the mean over one-vs-rest."""

    classes: int
    _targets: list[Values] = field(default_factory=list)
    _scores: list[Values] = field(default_factory=list)
    _size: int = 0

    def add(self, target: Values, output: Values) -> None:
        """Add class indices [N] and outputs [N, C]. Beyond `MAX_SCORES` of these in all, `value` is None."""
        self._size += output.size
        if self._size > MAX_SCORES:
            self._targets, self._scores = [], []
            return
        self._targets.append(target)
        self._scores.append(output.astype(np.float32))

    def value(self, are_logits: bool) -> float | None:
        """The area; None if a class has no rows or all of them, or if there were more than `MAX_SCORES` scores.

        None also for fewer than two classes. `are_logits`: whether the outputs are logits, not probabilities.
        """
        if not self._targets or self.classes < 2:
            return None
        target, scores = np.concatenate(self._targets), np.concatenate(self._scores)
        if are_logits:
            scores = np.exp(log_softmax(scores)).astype(np.float32)
        if self.classes == 2:
            return area_under_curve(target == 1, scores[:, 1])
        areas = [area_under_curve(target == label, scores[:, label]) for label in range(self.classes)]
        return None if None in areas else float(np.mean([area for area in areas if area is not None]))


def area_under_curve(positive: NDArray[np.bool_], scores: Values) -> float | None:
    """The probability that a positive row scores higher than a negative one, ties counting half; arguments are [N].

    Computed from ranks (Mann-Whitney U statistic). None if all rows are positive or all are negative.
    """
    count = int(positive.sum())
    others = len(positive) - count
    if not count or not others:
        return None
    _, which, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(sizes) - (sizes - 1) / 2
    return float((ranks[which][positive].sum() - count * (count + 1) / 2) / (count * others))


def log_softmax(logits: Values) -> Vector:
    """Log-probabilities of logits [N, C], in float64.

    Applied to log-probabilities it changes nothing but by rounding.
    """
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def are_distributions(output: Values) -> bool:
    """Whether each row of `output` [N, C] has no number below 0, and a sum of 1 within 0.02.

    The tolerance is that of probabilities in bfloat16. That logits meet both in every row does not happen by chance.
    """
    sums = output.astype(np.float64).sum(axis=1)
    return bool((output >= 0).all() and (np.abs(sums - 1) <= _SUM_TOLERANCE).all())


def log_of_probabilities(probabilities: Values) -> Vector:
    """The logarithms of probabilities [N, C], in float64, scaled to a sum of 1; those below 1.2e-7 count as 1.2e-7.

    This bound, the precision of float32, is that of scikit-learn's `log_loss`.
    """
    bounded = np.clip(probabilities.astype(np.float64), _LEAST_PROBABILITY, 1.0)
    return np.log(bounded) - np.log(bounded.sum(axis=1, keepdims=True))


def _share(part: Matrix, whole: Matrix) -> Vector:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
