"""The range of numbers that a quantized tensor covers, chosen from the histogram of its elements.

A wide range clips nothing but has coarse steps; a narrow one clips outliers. The methods:

- `min-max`: from the least to the greatest element.
- `moving-average`: the moving average of the extremes of each batch (Jacob et al. 2018, section 3.1).
- `percentile`: leaves out equal shares of the elements at the two ends (McKinstry et al. 2019; Wu et al. 2020,
  section 4.2).
- `entropy`: the least loss of information (Kullback-Leibler divergence) about the magnitudes, as in TensorRT (Migacz
  2017).
- `mse`: the least mean square error, among the whole range and 80 parts of it (Sung et al. 2015; Choukroun et al.
  2019).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.grids import make_grid
from lathe.core.compress.histogram import BINS, Histogram
from lathe.core.errors import UnsupportedError
from lathe.core.ir.types import DType

Method = Literal["min-max", "moving-average", "percentile", "entropy", "mse"]
METHODS: tuple[Method, ...] = get_args(Method)
DEFAULT_PERCENTILE = 99.99
_LEVELS = 128  # of the absolute values in TensorRT's method: those of int8
# Of an interval in TensorRT's method: with fewer, gaps decide which threshold is best. Few elements are never clipped.
_MEAN_COUNT = 16
_SHRUNK = np.linspace(1.0, 0.2, 81)  # parts of the whole range among which `mse` chooses


def choose_range(
    histogram: Histogram, method: Method, dtype: DType, symmetric: bool, percentile: float = DEFAULT_PERCENTILE
) -> tuple[float, float]:
    """The least and the greatest number that a grid of `dtype` should cover; (0, 0) if nothing was counted.

    `percentile` is the share of elements that stays within the range, in percent; only the method `percentile` reads
    it. Only `mse` reads `dtype` and `symmetric`. UnsupportedError if the method is unknown.
    """
    if method not in METHODS:
        raise UnsupportedError(f"calibration: expected one of {', '.join(METHODS)}, got {method!r}")
    if not histogram.total:
        return 0.0, 0.0
    low, high = histogram.least, histogram.most
    if method == "min-max":
        return low, high
    if method == "moving-average":
        return histogram.smooth or (low, high)
    if method == "percentile":
        left_out = (100 - percentile) / 100
        return max(low, _quantile(histogram, left_out / 2)), min(high, _quantile(histogram, 1 - left_out / 2))
    if method == "entropy":
        threshold = _entropy_threshold(histogram)
        return max(low, -threshold), min(high, threshold)
    shrunk = ((low * part, high * part) for part in _SHRUNK)
    return min(shrunk, key=lambda ends: _error(histogram, ends, dtype, symmetric))


def _quantile(histogram: Histogram, share: float) -> float:
    """The number below which `share` (0 to 1) of the elements lies, interpolated within an interval."""
    sums = np.concatenate(([0], np.cumsum(histogram.counts)))
    edges = np.linspace(-histogram.limit, histogram.limit, BINS + 1)
    return float(np.interp(share * sums[-1], sums, edges))


def _entropy_threshold(histogram: Histogram) -> float:
    """The threshold t for which 128 levels from 0 to t change the distribution of the absolute values least."""
    half = BINS // 2
    counts = (histogram.counts[half:] + histogram.counts[:half][::-1]).astype(np.float64)
    while half > _LEVELS and histogram.total < half * _MEAN_COUNT:
        half //= 2
        counts = counts.reshape(half, 2).sum(axis=1)
    counts[0] = counts[1]  # half of a ReLU's results are 0, which has no error; they would outweigh all others
    if not counts.any():
        return histogram.limit
    used = int(np.flatnonzero(counts).max()) + 1
    ends = range(_LEVELS, max(used, _LEVELS) + 1)
    best = min(ends, key=lambda end: _divergence(counts, end))
    return best * histogram.limit / half


def _divergence(counts: NDArray[np.float64], end: int) -> float:
    """The Kullback-Leibler divergence of the distribution P from Q, both over the first `end` intervals.

    P: the counts, where the last one includes all intervals from `end` on. Q: the counts without those, replaced by
    their mean within each of 128 levels, over the intervals where P is not 0. Infinity if Q is 0 where P is not.
    """
    clipped = counts[:end].copy()
    clipped[-1] += counts[end:].sum()
    starts = np.arange(_LEVELS) * end // _LEVELS
    level = np.repeat(np.arange(_LEVELS), np.diff(np.append(starts, end)))
    filled = clipped > 0
    sums = np.bincount(level, counts[:end], _LEVELS)
    sizes = np.bincount(level, filled, _LEVELS)
    spread = np.where(filled, (sums / np.maximum(sizes, 1))[level], 0.0)
    p, q = clipped / clipped.sum(), spread / max(spread.sum(), 1e-300)
    with np.errstate(divide="ignore"):
        terms = p[filled] * (np.log(p[filled]) - np.log(q[filled]))
    return float(terms.sum())  # infinity where only clipped elements are


def _error(histogram: Histogram, ends: tuple[float, float], dtype: DType, symmetric: bool) -> float:
    """The mean square error of quantizing the elements with the grid for the range `ends`.

    Each element counts as the middle of its interval.
    """
    grid, centers = make_grid(*ends, dtype, symmetric), histogram.centers
    difference: NDArray[Any] = grid.dequantized(grid.quantized(centers)) - centers
    return float((histogram.counts * difference**2).sum()) / histogram.total
