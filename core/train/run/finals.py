"""The finals of a search with a latency limit: the best trials that keep to it train again with further seeds.

finals/<trial>-<number>/     the work folder of a training with another seed, and its record: see trials.py

Of many trials, the best one was lucky as well as good. So only the further trainings decide among the finalists.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.recipe.sweep_space import Sweep
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import events, result
from lathe.core.train.run.latency import LatencyLimit
from lathe.core.train.run.training_loop import Outcome
from lathe.core.train.run.trials import FOLDER as TRIALS
from lathe.core.train.run.trials import Trial, TrialRecord, read_record

FOLDER = "finals"
_POLL_INTERVAL = 0.1  # seconds between two polls of the trainings


@dataclass(frozen=True)
class Measured:
    """A trained model: the number of its trial, and the milliseconds of a run, predicted (if it was) and measured."""

    trial: int
    predicted_ms: float | None
    measured_ms: float


@dataclass(frozen=True)
class Finalist:
    """A trial that keeps to the limit, and its further trainings: their validation merits, and errors if any failed."""

    trial: int
    predicted_ms: float | None
    measured_ms: float
    merits: tuple[float, ...]
    errors: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        return statistics.fmean(self.merits)

    def to_json(self) -> dict[str, Any]:
        deviation = statistics.stdev(self.merits) if len(self.merits) > 1 else None
        return {**asdict(self), "mean": self.mean if self.merits else None, "deviation": deviation}


class Finals:
    """Measures trained models, trains the finalists, and chooses one of them."""

    def __init__(
        self,
        folder: Path,
        sweep: Sweep,
        limit: LatencyLimit,
        dataset: Path,
        resources: Resources,
        event_log: events.EventLog,
    ) -> None:
        self._folder, self._sweep, self._limit, self._settings = folder, sweep, limit, limit.settings
        self._dataset, self._resources, self._event_log = dataset, resources, event_log
        self._measured: list[Measured] = []
        self._finalists: list[Finalist] = []

    def run(self, complete: Sequence[TrialRecord], stop: Callable[[], bool]) -> Outcome:
        """Choose among the complete trials, best first; DONE, or STOPPED if `stop` returned true.

        If STOPPED, the running trainings have written checkpoints. RecipeError if no trial keeps to the limit, or if no
        finalist's trainings succeeded; errors of `Trial.check_end`.
        """
        within = self._within_limit(complete)
        records = {record.number: record for record in complete}
        runs = [(records[each.trial], number) for each in within for number in range(self._settings.seeds)]
        if self._train(runs, stop) is Outcome.STOPPED:
            return Outcome.STOPPED
        self._finalists = [self._finalist(each) for each in within]
        if not any(not each.errors for each in self._finalists):
            raise RecipeError(f"no finalist could be trained with further seeds: {self._finalists[0].errors[0]}")
        return Outcome.DONE

    @property
    def chosen(self) -> Finalist:
        """The finalist with the highest mean merit; of equal ones the faster one."""
        able = [each for each in self._finalists if not each.errors]
        return max(able, key=lambda each: (each.mean, -each.measured_ms))

    @property
    def chosen_folder(self) -> Path:
        """The folder of the best training of the chosen finalist, by its merit on validation rows."""
        best = max(range(len(self.chosen.merits)), key=self.chosen.merits.__getitem__)
        return self._training(self.chosen.trial, best)

    def summary(self, skipped: int) -> dict[str, Any]:
        """The entry `latency` of the search in metrics.json. `skipped` candidates exceed the limit."""
        settings, prediction, chosen = self._settings, self._limit.prediction, self.chosen
        within = sum(each.measured_ms <= settings.limit_ms for each in self._measured)
        reason = (
            f"trial {chosen.trial} has the highest mean merit of {settings.seeds} further trainings among "
            f"{len(self._finalists)} finalists; {within} of {len(self._measured)} measured trials keep to "
            f"{settings.limit_ms:g} ms, and {skipped} candidates were too slow to be trained"
        )
        return {
            **settings.model_dump(mode="json"),
            "prediction": asdict(prediction),
            "calibration": [
                {"predicted_ms": prediction.ms(each.work), "measured_ms": each.ms} for each in self._limit.measurements
            ],
            "skipped": skipped,
            "measured": [asdict(each) for each in self._measured],
            "finalists": [each.to_json() for each in self._finalists],
            "chosen": chosen.trial,
            "reason": reason,
        }

    # -- measuring ------------------------------------------------------------------------------------------------

    def _within_limit(self, complete: Sequence[TrialRecord]) -> list[Measured]:
        """The best trials whose measured time keeps to the limit, at most as many as there may be finalists."""
        limit, wanted = self._settings.limit_ms, self._settings.finalists
        for start in range(0, len(complete), 2 * wanted):
            records = complete[start : start + 2 * wanted]
            models = [self._model(record) for record in records]
            for record, ms in zip(records, self._limit.measure(models), strict=True):
                self._measured.append(Measured(record.number, record.predicted_ms, ms))
                self._event_log.emit("log", message=f"trial {record.number}: {ms:.4g} ms measured")
            within = [each for each in self._measured if each.measured_ms <= limit]
            if len(within) >= wanted:
                break
        if not within:
            fastest = min(self._measured, key=lambda each: each.measured_ms)
            got = f"the fastest is trial {fastest.trial} with {fastest.measured_ms:.4g} ms"
            raise RecipeError(
                f"latency.limit_ms: none of {len(complete)} trained models takes at most {limit:g} ms; {got}"
            )
        return within[:wanted]

    def _model(self, record: TrialRecord) -> bytes:
        return (self._folder / TRIALS / str(record.number) / result.FOLDER / result.MODEL).read_bytes()

    # -- further seeds --------------------------------------------------------------------------------------------

    def _training(self, trial: int, number: int) -> Path:
        return self._folder / FOLDER / f"{trial}-{number}"

    def _train(self, runs: Sequence[tuple[TrialRecord, int]], stop: Callable[[], bool]) -> Outcome:
        waiting, running = list(self._unfinished(runs)), list[Trial]()
        try:
            while waiting or running:
                if stop():
                    return _stop(running)
                while waiting and len(running) < self._sweep.parallel:
                    running.append(self._start(*waiting.pop(0)))
                for trial in [each for each in running if each.status is not None]:
                    trial.check_end()
                    running.remove(trial)
                    self._emit_end(trial.folder, trial.end())
                time.sleep(_POLL_INTERVAL)
        finally:
            for trial in running:
                trial.kill()
        return Outcome.DONE

    def _unfinished(self, runs: Sequence[tuple[TrialRecord, int]]) -> Iterator[tuple[TrialRecord, int]]:
        for record, number in runs:
            known = read_record(self._training(record.number, number))
            if known is None or known.state == "running":
                yield record, number

    def _start(self, record: TrialRecord, number: int) -> Trial:
        seed = self._sweep.trial(record.values).seed + 1 + number
        recipe = {**self._sweep.at(record.values), "seed": seed}
        fresh = replace(record, state="running", merits=None, error="")
        path = self._training(record.number, number)
        return Trial(path, fresh, json.dumps(recipe).encode(), self._dataset, self._resources)

    def _emit_end(self, folder: Path, record: TrialRecord) -> None:
        merit = f"merit {record.merit:.4f}" if record.state == "complete" and record.merit is not None else record.error
        self._event_log.emit("log", message=f"finalist {folder.name}: {merit}")

    def _finalist(self, measured: Measured) -> Finalist:
        found = [read_record(self._training(measured.trial, number)) for number in range(self._settings.seeds)]
        records = [each for each in found if each is not None]
        merits = tuple(each.merit for each in records if each.state == "complete" and each.merit is not None)
        errors = tuple(each.error or "no validated epoch" for each in records if each.state != "complete")
        return Finalist(**asdict(measured), merits=merits, errors=errors)


def _stop(running: Sequence[Trial]) -> Outcome:
    for trial in running:
        trial.request_stop()
    for trial in running:
        trial.wait()
    return Outcome.STOPPED
