"""Arrival times of requests: seconds from the start, ascending, known before the first request is sent.

An open loop sends at these times, whether or not earlier requests were answered, and measures latency from them. A
closed loop would send less while the server is slow, and so hide the slowness (coordinated omission).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


def constant(rate: float, seconds: float) -> Times:
    """One request every 1/rate seconds."""
    return np.arange(round(rate * seconds)) / rate


def poisson(rate: float, seconds: float, seed: int = 0) -> Times:
    """Arrivals of independent clients: exponential gaps with mean 1/rate, cut at `seconds`."""
    rng = np.random.default_rng(seed)
    expected = rate * seconds
    drawn = int(expected + 6 * np.sqrt(expected) + 10)  # six standard deviations more than expected, then cut
    times = np.cumsum(rng.exponential(1 / rate, drawn))
    return times[times < seconds]


def ramp(first: float, last: float, seconds: float) -> Times:
    """A rate that rises (or falls) linearly from `first` to `last`.

    The k-th request is due where the integral of the rate, `first*t + (last-first)*t*t/(2*seconds)`, reaches k.
    """
    slope = (last - first) / seconds
    count = np.arange(int((first + last) / 2 * seconds))
    if slope == 0:
        return count / first
    return np.asarray((np.sqrt(first * first + 2 * slope * count) - first) / slope)
