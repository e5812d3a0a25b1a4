from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.stats import WRONG, Latency, Log, curve, percentile, summarise


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0.1, 100))
def test_percentile_is_the_smallest_value_that_covers_its_share(values: list[float], p: float) -> None:
    found = percentile(np.array(values), p)
    covered = sum(v <= found for v in values)
    below = sum(v < found for v in values)
    need = p / 100 * len(values)
    assert found in values
    assert covered >= need - 1e-6
    assert below < need + 1e-6


def test_the_tail_is_a_measured_value_not_an_interpolation() -> None:
    values = np.array([1.0] * 998 + [100.0, 200.0])
    latency = Latency.of(values)
    assert (latency.p50, latency.p99, latency.p999, latency.worst) == (1, 1, 100, 200)


def test_latency_of_nothing_is_not_a_number() -> None:
    assert math.isnan(Latency.of(np.array([])).p50)


def log(due: list[float], done: list[float], status: list[int]) -> Log:
    made = Log.of(np.array(due))
    made.taken[:] = made.sent[:] = made.due
    made.done[:] = done
    made.status[:] = status
    return made


def test_a_late_generator_counts_towards_the_latency() -> None:
    made = log([0.0], [0.5], [200])
    made.taken[0], made.sent[0] = 0.3, 0.4  # sent late: a real caller would have waited since 0.0
    phase = summarise("late", made, 1.0)
    assert phase.latency.p50 == pytest.approx(500)
    assert phase.lateness_p99_ms == pytest.approx(300)
    assert phase.unconnected_p99_ms == pytest.approx(100)


def test_refusals_are_neither_failures_nor_latencies() -> None:
    made = log([0.0, 0.1, 0.2, 0.3], [0.01, 0.102, math.nan, 0.31], [200, 503, 0, 500])
    phase = summarise("mixed", made, 1.0)
    assert (phase.accepted, phase.rejected, phase.failed) == (1, 1, 2)
    assert phase.latency.worst == pytest.approx(10)
    assert phase.rejection.worst == pytest.approx(2)
    assert phase.complaints == {"no answer": 1, "HTTP 500": 1}


def test_a_wrong_answer_is_a_failure() -> None:
    made = log([0.0, 0.1], [0.01, 0.11], [200, WRONG])
    made.complaints["version 3 answered"] += 1
    phase = summarise("wrong", made, 1.0)
    assert (phase.accepted, phase.failed) == (1, 1)
    assert phase.complaints == {"version 3 answered": 1}


def test_throughput_is_over_the_duration_of_the_answers() -> None:
    phase = summarise("backlog", log([0.0, 0.5], [1.0, 4.0], [200, 200]), 1.0)
    assert phase.offered == 2
    assert phase.throughput == pytest.approx(0.5)


def test_timeline_has_a_row_per_second_of_intended_time() -> None:
    phase = summarise("two", log([0.0, 0.5, 1.5], [0.01, 0.52, 1.53], [200] * 3), 2.0)
    assert [(second, rate, round(ms)) for second, rate, ms in phase.timeline] == [(0, 2, 20), (1, 1, 30)]


def test_the_curve_ends_with_the_sample() -> None:
    points = curve(np.arange(1, 1001, dtype=float))
    assert points[0] == (0.0, 1.0)
    assert points[-1][0] == pytest.approx(99.9, abs=0.03)
    assert [ms for _, ms in points] == sorted(ms for _, ms in points)
