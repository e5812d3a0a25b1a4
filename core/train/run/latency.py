"""The latency limit of a search: predicts the times of candidates before they train, and measures trained models.

The prediction (`lathe.core.compiler.time_prediction`) is fitted to candidates of the space that are measured, without
training, when the search begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.recipe.sweep_space import Latency
from lathe.core.train.run.durable_files import write_file

FILE = "latency.json"  # the measurements, so that a resumed search predicts the same times
_POINTS = 12  # measured candidates: half of the predictions for convnets were then within 20 to 30 %
_DRAWS = 4 * _POINTS  # at most, as some candidates cannot be built, or are drawn twice


class LatencyLimit:
    """The limit on the time of a run in a search, which decides before a training whether it is worth while."""

    def __init__(self, settings: Latency) -> None:
        self.settings = settings
        self.measurements: tuple[Measurement, ...] = ()
        self._prediction: TimePrediction | None = None

    @property
    def prediction(self) -> TimePrediction:
        """The fitted prediction. ValueError before `calibrate`."""
        if self._prediction is None:
            raise ValueError("the prediction is not calibrated yet")
        return self._prediction

    def calibrate(self, folder: Path, draw: Callable[[], Graph | None]) -> None:
        """Fit the prediction to models that `draw` gives, or to the measurements in the search's folder.

        RecipeError if too few models can be planned.
        """
        if (folder / FILE).exists():
            known = json.loads((folder / FILE).read_bytes())
            self.measurements = tuple(Measurement(Work(**each["work"]), each["ms"]) for each in known)
        else:
            models = self._different_models(draw)
            if len(models) < LEAST_POINTS:
                wanted = f"at least {LEAST_POINTS} different models in the space, to predict times from"
                raise RecipeError(f"latency: expected {wanted}, found {len(models)}")
            times = measure(list(models.values()), self.settings.batch)
            self.measurements = tuple(map(Measurement, models, times))
            write_file(folder / FILE, json.dumps([asdict(each) for each in self.measurements]).encode())
        self._prediction = fit_prediction(self.measurements)

    def predict(self, model: Graph) -> float | None:
        """The predicted milliseconds of a run; None if the model cannot be planned."""
        work = self._work(model)
        return None if work is None else self.prediction.ms(work)

    def is_far_above(self, predicted: float | None) -> bool:
        """Whether a time exceeds the limit by more than predictions are usually too high."""
        return predicted is not None and predicted > self.prediction.excess * self.settings.limit_ms

    def _different_models(self, draw: Callable[[], Graph | None]) -> dict[Work, Graph]:
        """The first models of different work that `draw` gives."""
        found: dict[Work, Graph] = {}
        for _ in range(_DRAWS):
            model = draw()
            work = None if model is None else self._work(model)
            if model is not None and work is not None:
                found.setdefault(work, model)
            if len(found) == _POINTS:
                break
        return found

    def _work(self, model: Graph) -> Work | None:
        try:
            return work_of(model, self.settings.batch)
        except LatheError:
            return None


def measure(models: Sequence[Graph | bytes], batch: int) -> list[float]:
    """The milliseconds of a run of `batch` rows of each model, on one thread, in turns: see `time_in_turns`.

    All models take the same inputs; they get random ones.
    """
    with compile(models[0], threads=1, tune="off") as session:
        feeds = sample_inputs(session, batch)
    return [nanoseconds / 1e6 for nanoseconds in time_in_turns(models, feeds)]
