"""`ChannelStatistics`: the mean and the largest size of each channel of an activation, collected batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import DataError


class ChannelStatistics:
    """Of the channels along `axis`: `mean` and `largest` (of the absolute values), both float64 [C].

    Both are empty before the first element. The memory does not grow with the data.
    """

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.mean: NDArray[np.float64] = np.zeros(0)
        self.largest: NDArray[np.float64] = np.zeros(0)
        self._count = 0

    def add(self, batch: NDArray[Any]) -> None:
        """Add an activation. DataError if a number is not finite; then nothing is added."""
        if not batch.size:
            return
        if not np.isfinite(batch).all():
            raise DataError("expected finite numbers")
        rows = np.moveaxis(batch, self.axis, -1).reshape(-1, batch.shape[self.axis])
        if not self._count:
            self.mean, self.largest = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
        total = self._count + len(rows)
        self.mean += (rows.sum(axis=0, dtype=np.float64) - self.mean * len(rows)) / total
        self.largest = np.maximum(self.largest, np.abs(rows).max(axis=0))
        self._count = total
