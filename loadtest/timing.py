"""Helpers of engine comparisons: the median time of a call, and the relative error of two results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def slice_ms(run: Callable[[], Any], seconds: float) -> float:
    """The median milliseconds of a call, over `seconds` and at least one call."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def relative_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    """The largest difference over the largest element of `want`; infinite if the shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    return float(np.abs(got - want).max() / np.abs(want).max())
