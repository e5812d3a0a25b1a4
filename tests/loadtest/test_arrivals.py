from __future__ import annotations

import numpy as np
import pytest

from loadtest.arrivals import constant, poisson, ramp


def test_constant_is_evenly_spaced() -> None:
    assert constant(4, 1).tolist() == [0, 0.25, 0.5, 0.75]


def test_poisson_has_the_mean_rate_and_exponential_gaps() -> None:
    times = poisson(1000, 100, seed=1)
    gaps = np.diff(times)
    assert len(times) == pytest.approx(100_000, rel=0.02)
    assert times[-1] < 100
    assert (gaps >= 0).all()
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.02)  # equal for an exponential distribution


def test_poisson_repeats_only_with_the_same_seed() -> None:
    assert poisson(50, 2, seed=3).tolist() == poisson(50, 2, seed=3).tolist()
    assert poisson(50, 2, seed=3).tolist() != poisson(50, 2, seed=4).tolist()


@pytest.mark.parametrize(("first", "last"), [(10, 100), (100, 10), (50, 50)])
def test_ramp_sends_the_integral_of_its_rate(first: float, last: float) -> None:
    times = ramp(first, last, 10)
    assert len(times) == (first + last) / 2 * 10
    assert (np.diff(times) > 0).all()
    assert np.sum(times < 1) == pytest.approx(first + (last - first) / 20, abs=1)
    assert np.sum(times >= 9) == pytest.approx(last - (last - first) / 20, abs=1)
