"""`Moments`: of the rows of an activation, collected batch by batch; GPTQ, AWQ and SmoothQuant need no other data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import DataError

_CHUNK = 4096  # rows of an activation that are multiplied at a time


@dataclass
class Moments:
    """Of rows x [K] of one activation: their number, the mean of x x^T [K, K], the mean and the maximum of |x| [K].

    Memory: `nbytes(K)`, whatever is added.
    """

    count: int
    gram: NDArray[np.float32]
    mean_size: NDArray[np.float64]
    largest: NDArray[np.float64]

    @classmethod
    def empty(cls, width: int) -> Moments:
        """The moments of no rows of `width` numbers."""
        return cls(0, np.zeros((width, width), np.float32), np.zeros(width), np.zeros(width))

    @staticmethod
    def nbytes(width: int) -> int:
        """The bytes of the moments of rows of `width` numbers."""
        return 4 * width * (width + 4)

    def add(self, activation: NDArray[np.float32]) -> None:
        """Add the rows of an activation [..., K]. DataError if a number is not finite; then nothing is added."""
        rows = activation.reshape(-1, activation.shape[-1])
        if not np.isfinite(rows).all():
            raise DataError("expected finite numbers")
        total = self.count + len(rows)
        if not total:
            return
        self.gram *= self.count / total
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            self.gram += (part.T @ part) / total
        size = np.abs(rows)
        self.mean_size += (size.sum(axis=0, dtype=np.float64) - self.mean_size * len(rows)) / total
        self.largest = np.maximum(self.largest, size.max(axis=0, initial=0))
        self.count = total
