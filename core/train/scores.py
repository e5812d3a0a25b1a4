"""Running a model over rows of examples, and what its answers are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.train.data import Examples, Loader, Rows
from core.train.joint import LOSS, TARGET
from core.train.metrics import Confusion

Run = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Scores:
    """Metrics by name; for classes, how often each (row) was taken for each (column)."""

    metrics: dict[str, float]
    confusion: NDArray[np.int64] | None = None


class Stopped(Exception):
    """Somebody asked for an end."""


def scores(run: Run, examples: Examples, rows: Rows, batch: int, output: str, stop: Callable[[], bool]) -> Scores:
    """Run over the rows. The model's `output` is judged; a result called `loss` is averaged.

    Stopped as soon as `stop` says so.
    """
    meter: _Classes | _Numbers = _Classes(examples) if examples.classes and not examples.target.shape else _Numbers()
    total = 0.0
    with Loader(examples, rows, batch, shuffle=False, workers=0) as loader:
        for feeds in loader.epoch(0):
            if stop():
                raise Stopped
            results = run(feeds)
            total += float(results.get(LOSS, 0.0)) * len(feeds[TARGET])
            meter.add(feeds[TARGET], results[output])
            with_loss = LOSS in results
    found = meter.scores()
    return Scores({"loss": total / len(rows), **found.metrics}, found.confusion) if with_loss else found


class _Classes:
    def __init__(self, examples: Examples) -> None:
        assert examples.classes is not None
        self.confusion = Confusion(len(examples.classes))

    def add(self, target: NDArray[Any], output: NDArray[Any]) -> None:
        self.confusion.add(target, output)

    def scores(self) -> Scores:
        return Scores({"accuracy": self.confusion.accuracy}, self.confusion.matrix)


class _Numbers:
    """Sums over all elements of targets, in double precision."""

    def __init__(self) -> None:
        self.count, self.squares, self.distances = 0, 0.0, 0.0

    def add(self, target: NDArray[Any], output: NDArray[Any]) -> None:
        error = output.astype(np.float64) - target
        self.count += error.size
        self.squares += float(np.square(error).sum())
        self.distances += float(np.abs(error).sum())

    def scores(self) -> Scores:
        count = max(self.count, 1)
        return Scores({"rmse": (self.squares / count) ** 0.5, "mae": self.distances / count})
