"""Mean and standard deviation of numbers that arrive in chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lathe.core.train.data.dataset import Values


@dataclass
class Moments:
    """Running mean and deviation of columns of numbers, merged in float64 (T. Chan, G. Golub, R. LeVeque, 1983)."""

    count: int = 0
    mean: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    _squares: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))

    def add(self, samples: Values) -> None:
        """Add samples [n, columns]; `columns` is the same in each call."""
        if not len(samples):
            return
        mean = samples.mean(axis=0, dtype=np.float64)
        squares = np.square(samples - mean).sum(axis=0)
        total = self.count + len(samples)
        difference = mean - self.mean
        self._squares = self._squares + squares + difference**2 * (self.count * len(samples) / total)
        self.mean = self.mean + difference * (len(samples) / total)
        self.count = total

    @property
    def deviation(self) -> NDArray[np.float64]:
        """The population standard deviation per column (divided by n)."""
        return np.sqrt(self._squares / max(self.count, 1))
