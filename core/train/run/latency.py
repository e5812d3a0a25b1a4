"""The latency limit of a search: predicts and measures the times of candidates before they train.

The prediction (`lathe.core.compiler.time_prediction`) is fitted to candidates of the space that are measured, without
training, when the search begins. Where a prediction is not far from the limit, the candidate itself is measured: it
takes a second, and a training takes longer. As other trials train at the same time, times are measured in turns with
one of the first candidates, the reference, and are relative to its time at the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import log
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
from lathe.core.frontends.export import export
from lathe.core.ir.graph import Graph
from lathe.core.runtime.session.sample_inputs import sample_inputs
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.recipe.sweep_space import Latency
from lathe.core.train.run.durable_files import write_file

FILE = "latency.json"  # the measurements, so that a resumed search predicts the same times
REFERENCE = "reference.onnx"  # the candidate of the first measurement in the file
_POINTS = 12  # measured candidates: half of the predictions for convnets were then within 20 to 30 %
_DRAWS = 4 * _POINTS  # at most, as some candidates cannot be built, or are drawn twice


class LatencyLimit:
    """The limit on the time of a run in a search, which decides before a training whether it is worth while."""

    def __init__(self, settings: Latency) -> None:
        self.settings = settings
        self.measurements: tuple[Measurement, ...] = ()
        self._prediction: TimePrediction | None = None
        self._reference = b""  # an ONNX file

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
            self._reference = (folder / REFERENCE).read_bytes()
        else:
            models = self._different_models(draw)
            if len(models) < LEAST_POINTS:
                wanted = f"at least {LEAST_POINTS} different models in the space, to predict times from"
                raise RecipeError(f"latency: expected {wanted}, found {len(models)}")
            times = measure(list(models.values()), self.settings.batch)
            near = sorted(zip(times, models, strict=True), key=lambda each: abs(log(each[0] / self.settings.limit_ms)))
            self.measurements = tuple(Measurement(work, ms) for ms, work in near)
            self._reference = export(models[self.measurements[0].work])
            write_file(folder / REFERENCE, self._reference)
            write_file(folder / FILE, json.dumps([asdict(each) for each in self.measurements]).encode())
        self._prediction = fit_prediction(self.measurements)

    def measure(self, models: Sequence[Graph | bytes]) -> list[float]:
        """The milliseconds of a run of each model, scaled to the reference's time at the beginning."""
        reference, *times = measure([self._reference, *models], self.settings.batch)
        return [time * self.measurements[0].ms / reference for time in times]

    def predict(self, model: Graph) -> float | None:
        """The predicted milliseconds of a run; None if the model cannot be planned."""
        work = self._work(model)
        return None if work is None else self.prediction.ms(work)

    def is_far_above(self, predicted: float | None) -> bool:
        """Whether a time exceeds the limit by more than predictions are usually too high."""
        return predicted is not None and predicted > self.prediction.excess * self.settings.limit_ms

    def is_far_below(self, predicted: float | None) -> bool:
        """Whether a time is below the limit by more than predictions are usually too low."""
        return predicted is not None and predicted < self.prediction.shortfall * self.settings.limit_ms

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
