"""The cost model: the line through what was measured, and the bound that nearly all of it keeps."""

from __future__ import annotations

import numpy as np
import pytest

from server.batching.cost import HEADROOM, CostModel


def learned(times: list[tuple[int, float]]) -> CostModel:
    cost = CostModel()
    for rows, seconds in times:
        cost.add(rows, seconds)
    return cost


def test_the_line_is_found() -> None:
    cost = learned([(rows, 0.01 + 0.002 * rows) for rows in (1, 8, 32, 4, 16, 2)])
    assert cost.predict(10) == pytest.approx(0.03)
    assert cost.bound(10) == pytest.approx(HEADROOM * 0.03)


def test_the_bound_is_kept_by_nearly_all_executions() -> None:
    """Log-normal times: the mean is exceeded by nearly half of what follows, the bound by a few in a hundred."""
    generator = np.random.default_rng(0)
    times = 0.02 * np.exp(0.4 * generator.standard_normal(2_000))
    cost, beyond_mean, beyond_bound = CostModel(), 0, 0
    for index, seconds in enumerate(times):
        if index >= 100:
            beyond_mean += seconds > cost.predict(8)
            beyond_bound += seconds > cost.bound(8)
        cost.add(8, float(seconds))
    assert beyond_mean > 600
    assert beyond_bound < 190


def test_one_stall_is_not_taken_for_the_rule() -> None:
    times = [(1, 0.001)] * 60
    assert learned([*times, (1, 0.5), *[(1, 0.001)] * 8]).bound(1) < 0.03
    assert learned([*times, (1, 0.5), (1, 0.5), *[(1, 0.001)] * 6]).bound(1) > 0.3


def test_a_machine_that_has_become_slower_is_noticed_within_a_few_batches() -> None:
    """The mean still lags when the bound has followed."""
    cost = learned([(32, 0.05)] * 80 + [(32, 0.1)] * 8)
    assert cost.predict(32) < 0.065
    assert cost.bound(32) >= 0.0999


def test_work_is_what_time_is_counted_by() -> None:
    """Rows of 10 and of 500 tokens: the line is found whatever they come in, and what a row mostly is, is known."""
    cost = CostModel()
    for rows, tokens in ((1, 500), (8, 10), (4, 500), (2, 10), (8, 500), (1, 10)):
        cost.add(rows, 0.01 + 1e-5 * rows * tokens, rows * tokens)
    assert (cost.fixed, cost.each) == (pytest.approx(0.01), pytest.approx(1e-5))
    assert cost.predict(8 * 10) == pytest.approx(0.0108)
    assert cost.bound(8 * 500) == pytest.approx(HEADROOM * 0.05)
    assert cost.largest == 4000
    assert 200 < cost.work_of(1) < 350
