"""The latency limit of a search: predicts the times of candidates before they train, and measures trained models.

The prediction (`lathe.core.compiler.time_prediction`) is fitted to candidates of the space that are measured, without
training, when the search begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lathe.core.compiler.compile import compile
from lathe.core.compiler.time_prediction import (
    LEAST_POINTS,
    Measurement,
    TimePrediction,
    Work,
    fit_prediction,
    work_of,
)
from lathe.core.compress.latency import time_in_turns
from lathe.core.errors import LatheError
from lathe.core.ir.graph import Graph
from lathe.core.runtime.session.sample_inputs import sample_inputs
from lathe.core.train.data import Dataset
from lathe.core.train.recipe.data_selection import dataset_for
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.recipe.sweep_space import Latency, Sweep, Values
from lathe.core.train.recipe.training_setup import untrained_model
from lathe.core.train.run.durable_files import write_file

FILE = "latency.json"  # the measurements, so that a resumed search predicts the same times
_POINTS = 12  # measured candidates: half of the predictions for convnets were then within 20 to 30 %
_DRAWS = 4 * _POINTS  # at most, as some candidates cannot be built, or are drawn twice


class LatencyLimit:
    """The limit on the time of a run in a search, which decides before a training whether it is worth while."""

    def __init__(self, sweep: Sweep, settings: Latency, dataset: Path) -> None:
        self.settings, self._sweep, self._path = settings, sweep, dataset
        self._datasets: dict[str, Dataset] = {}
        self.measurements: tuple[Measurement, ...] = ()
        self._prediction: TimePrediction | None = None

    @property
    def prediction(self) -> TimePrediction:
        """The fitted prediction. ValueError before `calibrate`."""
        if self._prediction is None:
            raise ValueError("the prediction is not calibrated yet")
        return self._prediction

    def calibrate(self, folder: Path, draw: Callable[[], Values]) -> None:
        """Fit the prediction to candidates that `draw` gives, or to the measurements in the search's folder.

        RecipeError if too few candidates can be built and measured.
        """
        if (folder / FILE).exists():
            known = json.loads((folder / FILE).read_bytes())
            self.measurements = tuple(Measurement(Work(**each["work"]), each["ms"]) for each in known)
        else:
            graphs = list(self._candidates(draw))
            if len(graphs) < LEAST_POINTS:
                wanted = f"at least {LEAST_POINTS} different models in the space, to predict times from"
                raise RecipeError(f"latency: expected {wanted}, found {len(graphs)}")
            times = measure(graphs, self.settings.batch)
            works = [work_of(graph, self.settings.batch) for graph in graphs]
            self.measurements = tuple(map(Measurement, works, times))
            write_file(folder / FILE, json.dumps([asdict(each) for each in self.measurements]).encode())
        self._prediction = fit_prediction(self.measurements)

    def predict(self, values: Values) -> float | None:
        """The predicted milliseconds of a candidate; None if it cannot be built: its training says why."""
        try:
            return self.prediction.ms(work_of(self._model(values), self.settings.batch))
        except LatheError:
            return None

    def is_far_above(self, predicted: float | None) -> bool:
        """Whether a time exceeds the limit by more than predictions are usually too high."""
        return predicted is not None and predicted > self.prediction.excess * self.settings.limit_ms

    def _candidates(self, draw: Callable[[], Values]) -> Iterator[Graph]:
        """The first models of different work that can be built."""
        seen = set()
        for _ in range(_DRAWS):
            try:
                graph = self._model(draw())
                work = work_of(graph, self.settings.batch)
            except LatheError:
                continue
            if work not in seen:
                seen.add(work)
                yield graph
            if len(seen) == _POINTS:
                return

    def _model(self, values: Values) -> Graph:
        recipe = self._sweep.trial(values)
        key = recipe.data.model_dump_json()
        if key not in self._datasets:
            self._datasets[key] = dataset_for(recipe.data, self._path)
        return untrained_model(recipe, self._datasets[key])


def measure(models: Sequence[Graph | bytes], batch: int) -> list[float]:
    """The milliseconds of a run of `batch` rows of each model, on one thread, in turns: see `time_in_turns`.

    All models take the same inputs; they get random ones.
    """
    with compile(models[0], threads=1, tune="off") as session:
        feeds = sample_inputs(session, batch)
    return [nanoseconds / 1e6 for nanoseconds in time_in_turns(models, feeds)]
