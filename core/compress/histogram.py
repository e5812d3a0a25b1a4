"""`Histogram`: the distribution of a tensor's elements, collected batch by batch in a fixed amount of memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import DataError

BINS = 4096  # as many on each side of 0 as TensorRT's calibrator has for absolute values
_CHUNK = 1 << 16  # elements that are counted at a time: bounds the memory of one call of `add` to about 1 MB
_SMOOTHING = 0.9  # weight of the previous batches in the moving average, as in Jacob et al. (2018), section 3.1


class Histogram:
    """Counts of elements in `BINS` intervals of equal width between -limit and limit, with limit a power of two.

    If the magnitude of an element reaches the limit, the limit is doubled as often as needed, and neighbouring
    intervals are joined. So the counts are those of one pass with the final limit, however the elements are divided
    into batches. The limit is 0 while all elements are 0. `counts` takes `nbytes`, however many elements are added.

    `least` and `most` are the extremes of all elements: infinity and -infinity before the first one. `smooth` is the
    moving average of each batch's least and greatest element; None before the first batch.
    """

    __slots__ = ("counts", "least", "limit", "most", "smooth")

    nbytes = BINS * 8

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(BINS, np.int64)
        self.limit = 0.0
        self.least, self.most = math.inf, -math.inf
        self.smooth: tuple[float, float] | None = None

    @property
    def total(self) -> int:
        """The number of elements that were counted."""
        return int(self.counts.sum())

    @property
    def centers(self) -> NDArray[np.float64]:
        """The middle of each interval: float64 [BINS]."""
        return np.asarray((np.arange(BINS) + 0.5) * (2 * self.limit / BINS) - self.limit, np.float64)

    def add(self, batch: NDArray[Any]) -> None:
        """Count the elements of `batch`, an array of any shape. DataError, and no change, if one is not finite."""
        if not batch.size:
            return
        least, most = float(batch.min()), float(batch.max())
        if not (math.isfinite(least) and math.isfinite(most)):
            raise DataError(f"expected finite numbers, got {least if not math.isfinite(least) else most}")
        self._widen(max(-least, most))
        for start in range(0, batch.size, _CHUNK):
            self._count(batch.reshape(-1)[start : start + _CHUNK])
        self.least, self.most = min(self.least, least), max(self.most, most)
        if self.smooth is None:
            self.smooth = least, most
        else:
            low, high = self.smooth
            self.smooth = _SMOOTHING * low + (1 - _SMOOTHING) * least, _SMOOTHING * high + (1 - _SMOOTHING) * most

    def _count(self, elements: NDArray[Any]) -> None:
        if not self.limit:  # all elements so far are 0
            self.counts[BINS // 2] += elements.size
            return
        places = np.floor(elements.astype(np.float64) * (BINS / 2 / self.limit)).astype(np.int64) + BINS // 2
        self.counts += np.bincount(places.clip(0, BINS - 1), minlength=BINS)

    def _widen(self, largest: float) -> None:
        """Raise the limit to the next power of two above the magnitude `largest`, unless it is greater already."""
        if largest < self.limit or not largest:
            return
        wider = 2.0 ** math.frexp(largest)[1]
        times = round(math.log2(wider / self.limit)) if self.limit else BINS.bit_length()
        joined = min(1 << min(times, BINS.bit_length()), BINS // 2)  # intervals of one side that become one
        inner = self.counts.reshape(-1, joined).sum(axis=1)
        self.counts = np.zeros(BINS, np.int64)
        middle = BINS // 2
        self.counts[middle - inner.size // 2 : middle + inner.size // 2] = inner
        self.limit = wider
