"""Metrics of a model's outputs against targets, gathered batch by batch in memory that the number of classes bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from core.train.data.dataset import Values


@dataclass
class Confusion:
    """How often each class was taken for each: rows are true classes, columns predicted ones."""

    classes: int
    matrix: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.matrix = np.zeros((self.classes, self.classes), np.int64)

    def add(self, target: Values, scores: Values) -> None:
        """Classes [N] and scores [N, C] (logits or probabilities): the largest is the prediction."""
        pairs = target.astype(np.int64) * self.classes + scores.argmax(axis=1)
        self.matrix += np.bincount(pairs, minlength=self.classes**2).reshape(self.matrix.shape)

    @property
    def accuracy(self) -> float:
        return float(np.trace(self.matrix) / max(self.matrix.sum(), 1))
