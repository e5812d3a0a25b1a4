"""Compares a compressed model with its source on held-out rows, in one pass over the rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.compiler.compile import compile
from lathe.core.runtime.session.session import Session
from lathe.core.train.data import Loader
from lathe.core.train.recipe.compression import (
    ACCURACY,
    ACCURACY_DROP,
    OUTPUT_ERROR,
    RMSE,
    RMSE_RATIO,
    CompressionData,
)
from lathe.core.train.run.metrics import metric_collector
from lathe.core.train.run.scores import compute_scores
from lathe.core.train.training_step.step_graph import TARGET

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Comparison:
    """Metrics of the source (`before`) and of the compressed model (`after`), both empty without a target.

    `metrics` are those of the compressed model and those that compare the two: `accuracy_drop` or `rmse_ratio`, and
    `output_error`, the root mean square error of the worst output relative to its root mean square.
    """

    before: Mapping[str, float]
    after: Mapping[str, float]
    metrics: Mapping[str, float]


def compare_models(
    source: Path,
    compressed: bytes,
    data: CompressionData,
    progress: Progress,
    threads: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Comparison:
    """Run both models on the test rows. `progress` gets the numbers of batches that have ended, and of all.

    DataError if a row cannot be read, or the output does not fit the target; FeedError for rows that do not fit.
    """
    with (
        compile(source, threads=threads, max_batch=data.batch, cache_dir=cache_dir, tune="off") as exact,
        compile(compressed, threads=threads, max_batch=data.batch, cache_dir=cache_dir, tune="off") as small,
    ):
        return _Pass(exact, small, data, progress).comparison()


@dataclass
class _Squares:
    """Sums of squares over all batches: of the differences of two arrays, and of the exact one."""

    difference: float = 0.0
    exact: float = 0.0

    def add(self, got: NDArray[Any], exact: NDArray[Any]) -> None:
        self.difference += float(((np.asarray(got, np.float64) - exact) ** 2).sum())
        self.exact += float((np.asarray(exact, np.float64) ** 2).sum())

    @property
    def relative(self) -> float:
        return float(np.sqrt(self.difference / max(self.exact, np.finfo(np.float64).tiny)))


@dataclass
class _Pass:
    exact: Session
    small: Session
    data: CompressionData
    progress: Progress
    squares: dict[str, _Squares] = field(default_factory=dict)
    ended: int = 0

    def comparison(self) -> Comparison:
        examples, test, batch = self.data.examples, self.data.test, self.data.batch
        if not examples.has_target:
            with Loader(examples, test, batch, shuffle=False, workers=0) as loader:
                for feeds in loader.epoch(0):
                    self._run(feeds)
            return Comparison({}, {}, {OUTPUT_ERROR: self._error})
        output = next(iter(self.exact.outputs))
        before = metric_collector(len(examples.classes) if examples.classes else None)

        def run(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
            expected, got = self._run(feeds)
            before.add(feeds[TARGET], expected[output])
            return got

        after = compute_scores(run, examples, test, batch, output, lambda: False).metrics
        changes = _changes(before.values(), after)
        return Comparison(before.values(), after, {**after, **changes, OUTPUT_ERROR: self._error})

    def _run(self, feeds: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The outputs of the source and of the compressed model for a batch, whose error is added up."""
        inputs = {name: feeds[name] for name in self.exact.inputs}
        exact, got = self.exact.run(inputs), self.small.run(inputs)
        for name, array in exact.items():
            if array.dtype.kind == "f":
                self.squares.setdefault(name, _Squares()).add(got[name], array)
        self.ended += 1
        self.progress(self.ended, -(-len(self.data.test) // self.data.batch))
        return exact, got

    @property
    def _error(self) -> float:
        return max((squares.relative for squares in self.squares.values()), default=0.0)


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The metrics that compare the accuracies of two classifiers, or the errors of two regressions."""
    if ACCURACY in before:
        return {ACCURACY_DROP: before[ACCURACY] - after[ACCURACY]}
    return {RMSE_RATIO: after[RMSE] / before[RMSE]} if before.get(RMSE) else {}
