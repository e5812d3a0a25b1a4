"""Metrics of a model's outputs against targets, gathered batch by batch.

Memory is bounded by the number of classes, but for the area under the curve, which needs every score (`MOST_SCORES`).
Definitions, also where something is divided by nothing, are those of scikit-learn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from core.train.data.dataset import Values
from core.train.data.moments import Moments

Matrix: TypeAlias = NDArray[np.int64]
Vector: TypeAlias = NDArray[np.float64]

MOST_SCORES = 1 << 24
MOST_CONFUSED = 1000  # classes, beyond which nobody reads a confusion matrix


class Meter(Protocol):
    """What gathers metrics."""

    def add(self, target: Values, output: Values) -> None:
        """A batch: targets, and what the model made of the rows."""
        ...

    def values(self) -> dict[str, float]:
        """All metrics so far, by name."""
        ...

    @property
    def confusion(self) -> Matrix | None:
        """How often each class (row) was taken for each (column)."""
        ...


def meter(classes: int | None) -> Meter:
    """What judges outputs [N, C, ...] against classes [N, ...]; without classes, numbers against numbers."""
    return Numbers() if classes is None else Classes(classes)


class Classes:
    """Outputs [N, C, ...], logits or logarithms of probabilities, against classes [N, ...]."""

    def __init__(self, classes: int) -> None:
        self.counts = Counts(classes)
        self.top = TopK(5) if classes > 5 else None
        self.loss = LogLoss()
        self.area = Area(classes)
        self._confusion = Confusion(classes) if classes <= MOST_CONFUSED else None

    def add(self, target: Values, output: Values) -> None:
        target, output = target.ravel(), np.moveaxis(output, 1, -1).reshape(-1, output.shape[1])
        probable = log_softmax(output)
        predicted = output.argmax(axis=1)
        self.counts.add(target, predicted)
        self.loss.add(target, probable)
        self.area.add(target, np.exp(probable).astype(np.float32))
        if self.top:
            self.top.add(target, output)
        if self._confusion:
            self._confusion.add(target, predicted)

    def values(self) -> dict[str, float]:
        found = {
            "accuracy": self.counts.accuracy,
            "precision": self.counts.macro(self.counts.precision),
            "recall": self.counts.macro(self.counts.recall),
            "f1": self.counts.macro(self.counts.f1),
            "log_loss": self.loss.value,
        }
        if self.top:
            found[f"top{self.top.k}"] = self.top.value
        area = self.area.value
        return found if area is None else {**found, "auc": area}

    @property
    def confusion(self) -> Matrix | None:
        return self._confusion.matrix if self._confusion else None


class Numbers:
    """Outputs against numbers of the same shape [N, ...]."""

    confusion: Matrix | None = None

    def __init__(self) -> None:
        self._count = 0
        self._squares: Vector = np.zeros(1)
        self._distances = 0.0
        self._targets = Moments()

    def add(self, target: Values, output: Values) -> None:
        wanted = target.reshape(len(target), -1).astype(np.float64)
        error = output.reshape(len(target), -1) - wanted
        self._targets.add(wanted)
        self._squares = self._squares + np.square(error).sum(axis=0)
        self._distances += float(np.abs(error).sum())
        self._count += error.size

    def values(self) -> dict[str, float]:
        """Root mean square and mean absolute error over all numbers, R2 averaged over the numbers of a row."""
        count = max(self._count, 1)
        rmse = float(np.sqrt(self._squares.sum() / count))
        return {"rmse": rmse, "mae": self._distances / count, "r2": self._explained()}

    def _explained(self) -> float:
        spread = self._targets.deviation**2 * self._targets.count
        constant = np.where(self._squares == 0, 1.0, 0.0)
        explained = 1 - np.divide(self._squares, spread, out=1 - constant, where=spread > 0)
        return float(explained.mean())


@dataclass
class Confusion:
    """How often each class was taken for each: rows are true classes, columns predicted ones."""

    classes: int
    matrix: Matrix = field(init=False)

    def __post_init__(self) -> None:
        self.matrix = np.zeros((self.classes, self.classes), np.int64)

    def add(self, target: Values, predicted: Values) -> None:
        """Classes [N] and classes [N]."""
        np.add.at(self.matrix, (target, predicted), 1)


@dataclass
class Counts:
    """For every class: how many rows are of it, were taken for it, and both."""

    classes: int
    table: Matrix = field(init=False)  # [3, classes]

    def __post_init__(self) -> None:
        self.table = np.zeros((3, self.classes), np.int64)

    def add(self, target: Values, predicted: Values) -> None:
        """Classes [N] and classes [N]."""
        for row, found in enumerate((target, predicted, target[target == predicted])):
            self.table[row] += np.bincount(found, minlength=self.classes)

    @property
    def accuracy(self) -> float:
        """The share that was right: micro-averaged precision, recall and F1 are this same number."""
        return float(self.table[2].sum() / max(self.table[0].sum(), 1))

    @property
    def recall(self) -> Vector:
        """Per class: which share of its rows was found."""
        return _share(self.table[2], self.table[0])

    @property
    def precision(self) -> Vector:
        """Per class: which share of what was taken for it is of it."""
        return _share(self.table[2], self.table[1])

    @property
    def f1(self) -> Vector:
        """Per class: the harmonic mean of precision and recall."""
        return _share(2 * self.table[2], self.table[0] + self.table[1])

    def macro(self, values: Vector) -> float:
        """The mean over the classes that occur, as true or as predicted ones."""
        there = self.table[:2].any(axis=0)
        return float(values[there].mean()) if there.any() else 0.0


@dataclass
class TopK:
    """The share of rows whose class is among the k highest scores. Of equal scores the lower class counts first."""

    k: int
    right: int = 0
    count: int = 0

    def add(self, target: Values, scores: Values) -> None:
        """Classes [N] and scores [N, C]."""
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
    """The mean of -log of the probability given to the true class."""

    total: float = 0.0
    count: int = 0

    def add(self, target: Values, log_probabilities: Values) -> None:
        """Classes [N] and logarithms [N, C]."""
        self.total -= float(np.take_along_axis(log_probabilities, target[:, None], axis=1).sum())
        self.count += len(target)

    @property
    def value(self) -> float:
        return self.total / max(self.count, 1)


@dataclass
class Area:
    """Area under the ROC curve: of two classes that of the second, of more the mean of one against the rest."""

    classes: int
    _targets: list[Values] = field(default_factory=list)
    _scores: list[Values] = field(default_factory=list)
    _size: int = 0

    def add(self, target: Values, probabilities: Values) -> None:
        """Classes [N] and probabilities [N, C]. What goes beyond `MOST_SCORES` is not kept, and there is no area."""
        self._size += probabilities.size
        if self._size > MOST_SCORES:
            self._targets, self._scores = [], []
            return
        self._targets.append(target)
        self._scores.append(probabilities[:, 1] if self.classes == 2 else probabilities)

    @property
    def value(self) -> float | None:
        """None where a class does not occur, or scores were too many."""
        if not self._targets or self.classes < 2:
            return None
        target, scores = np.concatenate(self._targets), np.concatenate(self._scores)
        if self.classes == 2:
            return area_under_curve(target == 1, scores)
        areas = [area_under_curve(target == label, scores[:, label]) for label in range(self.classes)]
        return None if None in areas else float(np.mean([area for area in areas if area is not None]))


def area_under_curve(positive: NDArray[np.bool_], scores: Values) -> float | None:
    """How likely a positive row scores higher than another, ties counting half (the Mann-Whitney statistic); None when
    all rows are alike."""
    count = int(positive.sum())
    others = len(positive) - count
    if not count or not others:
        return None
    _, which, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(sizes) - (sizes - 1) / 2
    return float((ranks[which][positive].sum() - count * (count + 1) / 2) / (count * others))


def log_softmax(logits: Values) -> Vector:
    """Logarithms of the probabilities that logits [N, C] stand for; logarithms of probabilities stay as they are."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _share(part: Matrix, whole: Matrix) -> Vector:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
