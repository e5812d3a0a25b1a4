"""The cost model: the line fitted to measured times, and the upper bound that nearly all times satisfy."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.server.batching.cost_model import HEADROOM, CostModel


def cost_model_of(times: list[tuple[int, float]]) -> CostModel:
    cost = CostModel()
    for rows, seconds in times:
        cost.add(rows, seconds)
    return cost


def test_the_line_is_found() -> None:
    cost = cost_model_of([(rows, 0.01 + 0.002 * rows) for rows in (1, 8, 32, 4, 16, 2)])
    assert cost.predict(10) == pytest.approx(0.03)
    assert cost.bound(10) == pytest.approx(HEADROOM * 0.03)


def test_the_bound_holds_for_nearly_all_executions() -> None:
    """Log-normal times: nearly half of the following times exceed the mean, a few in a hundred exceed the bound."""
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


def test_one_stall_does_not_change_the_model() -> None:
    times = [(1, 0.001)] * 60
    assert cost_model_of([*times, (1, 0.5), *[(1, 0.001)] * 8]).bound(1) < 0.03
    assert cost_model_of([*times, (1, 0.5), (1, 0.5), *[(1, 0.001)] * 6]).bound(1) > 0.3


def test_the_bound_follows_a_slower_machine_within_a_few_batches() -> None:
    """The mean lags behind the bound."""
    cost = cost_model_of([(32, 0.05)] * 80 + [(32, 0.1)] * 8)
    assert cost.predict(32) < 0.065
    assert cost.bound(32) >= 0.0999


def test_time_is_a_function_of_work_not_of_rows() -> None:
    """Rows of 10 and of 500 tokens: the line is found however they are batched, and so is the mean work of a row."""
    cost = CostModel()
    for rows, tokens in ((1, 500), (8, 10), (4, 500), (2, 10), (8, 500), (1, 10)):
        cost.add(rows, 0.01 + 1e-5 * rows * tokens, rows * tokens)
    assert (cost.fixed, cost.each) == (pytest.approx(0.01), pytest.approx(1e-5))
    assert cost.predict(8 * 10) == pytest.approx(0.0108)
    assert cost.bound(8 * 500) == pytest.approx(HEADROOM * 0.05)
    assert cost.largest_work == 4000
    assert 200 < cost.mean_work(1) < 350
