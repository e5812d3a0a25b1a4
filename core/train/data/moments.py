"""Mean and deviation of numbers that come in pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from core.train.data.dataset import Values


@dataclass
class Moments:
    """Of columns of numbers, merged in float64 (T. Chan, G. Golub, R. LeVeque, 1983)."""

    count: int = 0
    mean: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    _squares: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))

    def add(self, samples: Values) -> None:
        """Samples [n, columns], as many columns each time."""
        if not len(samples):
            return
        mean = samples.mean(axis=0, dtype=np.float64)
        squares = np.square(samples - mean).sum(axis=0)
        total = self.count + len(samples)
        apart = mean - self.mean
        self._squares = self._squares + squares + apart**2 * (self.count * len(samples) / total)
        self.mean = self.mean + apart * (len(samples) / total)
        self.count = total

    @property
    def deviation(self) -> NDArray[np.float64]:
        """Of the population: divided by the count."""
        return np.sqrt(self._squares / max(self.count, 1))
