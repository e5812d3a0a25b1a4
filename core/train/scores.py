"""Running a model over rows of examples, and what its answers are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from core.train.data import Examples, Loader, Rows
from core.train.joint import LOSS, TARGET
from core.train.metrics import Matrix, meter

Run = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Scores:
    """Metrics by name; for classes, how often each (row) was taken for each (column)."""

    metrics: dict[str, float]
    confusion: Matrix | None = None


class Stopped(Exception):
    """Somebody asked for an end."""


def scores(run: Run, examples: Examples, rows: Rows, batch: int, output: str, stop: Callable[[], bool]) -> Scores:
    """Run over the rows. The model's `output` is judged; a result called `loss` is averaged.

    Stopped as soon as `stop` says so.
    """
    gauge = meter(len(examples.classes) if examples.classes else None)
    total = 0.0
    with Loader(examples, rows, batch, shuffle=False, workers=0) as loader:
        for feeds in loader.epoch(0):
            if stop():
                raise Stopped
            results = run(feeds)
            total += float(results.get(LOSS, 0.0)) * len(feeds[TARGET])
            gauge.add(feeds[TARGET], results[output])
            with_loss = LOSS in results
    losses = {"loss": total / len(rows)} if with_loss else {}
    return Scores(losses | gauge.values(), gauge.confusion)
