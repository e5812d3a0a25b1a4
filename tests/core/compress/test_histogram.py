"""Histograms that are collected batch by batch: exact counts, in the same memory for any number of batches."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from lathe.core.compress.histogram import BINS, Histogram
from lathe.core.errors import DataError
from tests.random_numbers import RNG


def collected(*batches: np.ndarray) -> Histogram:
    histogram = Histogram()
    for batch in batches:
        histogram.add(batch)
    return histogram


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_all_batches_at_once(seed: int) -> None:
    """The limit grows several times, by any number of doublings; 0 and powers of two lie on borders."""
    rng = np.random.default_rng(seed)
    batches = [rng.standard_normal((50, 7)).astype(np.float32) * 2.0 ** rng.integers(-20, 20) for _ in range(9)]
    batches += [np.zeros(11, np.float32), np.array([2.0, -2.0, 1.0, 0.5], np.float32)]
    order = rng.permutation(len(batches))
    histogram, elements = collected(*(batches[place] for place in order)), np.concatenate([b.ravel() for b in batches])
    expected, _ = np.histogram(elements.astype(np.float64), BINS, (-histogram.limit, histogram.limit))
    np.testing.assert_array_equal(histogram.counts, expected)
    assert (histogram.least, histogram.most) == (elements.min(), elements.max())
    assert histogram.limit / 2 <= np.abs(elements).max() < histogram.limit


def test_zeros_alone_then_others() -> None:
    histogram = collected(np.zeros(3, np.float32), np.zeros(2, np.float32))
    assert (histogram.total, histogram.limit) == (5, 0.0)
    histogram.add(np.array([-1e-30], np.float32))
    assert histogram.total == 6
    assert histogram.counts[BINS // 2] == 5
    assert histogram.counts[: BINS // 4].sum() == 1


def test_the_moving_average_is_that_of_the_batches() -> None:
    histogram = collected(*(np.array([-low, high], np.float32) for low, high in ((1, 2), (3, 4), (1, 8))))
    assert histogram.smooth is not None
    np.testing.assert_allclose(histogram.smooth, (-(0.9 * (0.9 + 0.3) + 0.1), 0.9 * (0.9 * 2 + 0.4) + 0.8), 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_batch_that_is_not_finite_changes_nothing(bad: float) -> None:
    histogram = collected(np.ones(4, np.float32))
    before = histogram.counts.copy(), histogram.limit, histogram.smooth
    with pytest.raises(DataError, match=r"expected finite numbers, got (nan|inf|-inf)"):
        histogram.add(np.array([7.0, bad], np.float32))
    np.testing.assert_array_equal(histogram.counts, before[0])
    assert (histogram.limit, histogram.smooth) == before[1:]


def test_memory_does_not_grow_with_the_data() -> None:
    """32 MB of elements need less than 4 MB besides themselves."""
    batch = RNG.standard_normal(8_000_000).astype(np.float32)
    histogram = Histogram()
    tracemalloc.start()
    try:
        histogram.add(batch)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert histogram.counts.nbytes == histogram.nbytes
