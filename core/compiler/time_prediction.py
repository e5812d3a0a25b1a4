"""Predicts the time of a run from the plan alone: no code is generated, nothing runs.

A run takes `start + operations / rate + bytes / bandwidth`. The three factors are fitted to models whose times were
measured on the machine, and none is negative. Operations and bytes are those that the
plan knows of its kernel calls: the work of the roofline model (S. Williams et al., 2009), whose two times are added,
as small models overlap them little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lathe.core.compiler.description import describe_model
from lathe.core.compiler.options import make_options
from lathe.core.compiler.pipeline import plan_without_code
from lathe.core.compiler.symbol_binding import other_symbols
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Graph

LEAST_POINTS = 4  # one more than there are factors
_ITERATIONS, _MOST = 20, 100.0  # of the fit; the largest ratio of a time to its prediction that counts
_QUANTILE = 0.9  # of the errors within which predictions are expected to lie


@dataclass(frozen=True)
class Work:
    """The floating-point operations of one run, and the sum of the bytes that its kernels must read and write."""

    flops: int
    bytes: int


def work_of(graph: Graph, batch: int) -> Work:
    """The work of a run of `batch` rows on one thread. Nodes without a kernel are not counted.

    UnsupportedError for a graph with symbolic dimensions besides the batch size; ModelError if it cannot be planned.
    """
    graph, description, _ = describe_model(graph, make_options(threads=1))
    if symbols := other_symbols(graph, description.batching):
        raise UnsupportedError(f"expected rows of one shape, the model's have the symbols {', '.join(symbols)}")
    plan = plan_without_code(graph, make_options(threads=1), description.batching)
    return Work(
        sum(step.flops.at(batch) for step in plan.steps),
        sum(step.bytes.at(batch) for step in plan.steps),
    )


@dataclass(frozen=True)
class Measurement:
    """A model's work, and the milliseconds that a run of it took."""

    work: Work
    ms: float


@dataclass(frozen=True)
class TimePrediction:
    """Factors for this machine, and how wrong predictions were for models that the fit did not know.

    `start` is in milliseconds, `per_flop` and `per_byte` are milliseconds each. `error` is the median relative error:
    0.2 if half of the predictions are at most 20 % too high, or as much too low. Nine of ten predictions exceed the
    measured time by at most the factor `excess`, and are at least its share `shortfall`; the former is at least 1, the
    latter at most 1. All three by leaving out one measurement at a time.
    """

    start: float
    per_flop: float
    per_byte: float
    error: float
    excess: float
    shortfall: float

    def ms(self, work: Work) -> float:
        """The predicted milliseconds of a run."""
        return self.start + self.per_flop * work.flops + self.per_byte * work.bytes


def fit_prediction(measurements: Sequence[Measurement]) -> TimePrediction:
    """The factors that fit best. UnsupportedError for fewer than `LEAST_POINTS` measurements."""
    if len(measurements) < LEAST_POINTS:
        raise UnsupportedError(f"expected at least {LEAST_POINTS} measured models, got {len(measurements)}")
    columns = np.array([[1, each.work.flops, each.work.bytes] for each in measurements], np.float64)
    times = np.array([each.ms for each in measurements])
    others = [columns[one] @ _fit(columns[rest], times[rest]) for one, rest in _without_one(len(times))]
    ratios = np.maximum(np.array(others) / times, 1 / _MOST)
    error = float(np.exp(np.median(np.abs(np.log(ratios)))) - 1)
    excess, shortfall = (float(np.quantile(ratios, share)) for share in (_QUANTILE, 1 - _QUANTILE))
    start, per_flop, per_byte = map(float, _fit(columns, times))
    return TimePrediction(start, per_flop, per_byte, error, max(excess, 1.0), min(shortfall, 1.0))


def _without_one(count: int) -> Iterator[tuple[int, list[int]]]:
    for one in range(count):
        yield one, [other for other in range(count) if other != one]


def _fit(columns: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Factors of at least 0 with the least squared logarithms of the ratios of predictions to times.

    So a prediction of half the time counts as much as one of twice the time. The method is that of Gauss and Newton:
    each iteration solves the problem linearised at the predictions of the one before.
    """
    predicted = times
    for _ in range(_ITERATIONS):
        factors = _least_squares(columns / predicted[:, None], 1 + np.log(times / predicted))
        predicted = np.clip(columns @ factors, predicted / 2, predicted * 2)
    return factors


def _least_squares(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Factors of at least 0 with the least squared error: the best of the fits with some factors at 0."""
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(np.float64).tiny)  # so that no factor looks negligible
    best, least = np.zeros(rows.shape[1]), np.inf
    for count in range(1, rows.shape[1] + 1):
        for chosen in map(list, combinations(range(rows.shape[1]), count)):
            factors = np.linalg.lstsq(rows[:, chosen] / scale[chosen], wanted, rcond=None)[0]
            error = float(((rows[:, chosen] / scale[chosen] @ factors - wanted) ** 2).sum())
            if (factors >= 0).all() and error < least:
                best, least = np.zeros(rows.shape[1]), error
                best[chosen] = factors / scale[chosen]
    return best
