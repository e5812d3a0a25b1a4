"""Hyper-parameter search: chooses the values of trials, prunes bad trials, and publishes the best trial's result.

A sampler (TPE: J. Bergstra et al., 2011; random; evolution.py) and Optuna's pruners decide. A search that was killed
rebuilds their state from the records of the trials.

Pruners: Hyperband (Z. Li et al., 2018); the median rule (D. Golovin et al., Google Vizier, 2017).
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lathe.core.errors import LatheError
from lathe.core.ir.graph import Graph
from lathe.core.runtime.host.cpus import available_cpus
from lathe.core.train import report
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.recipe.sweep_space import Between, Choices, Sweep, Values, from_json
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import events, result
from lathe.core.train.run.candidates import Candidates
from lathe.core.train.run.durable_files import write_folder
from lathe.core.train.run.finals import Finals
from lathe.core.train.run.latency import LatencyLimit
from lathe.core.train.run.training_loop import Outcome
from lathe.core.train.run.trials import FOLDER, UNTRAINED, Trial, TrialRecord, trial_records
from lathe.core.train.run.work_folder import RECIPE, Sources, hold_lock

if TYPE_CHECKING:
    import optuna

_POLL_INTERVAL = 0.1  # seconds between two polls of the trials
_UNTRAINED_PER_TRIAL = 20  # candidates that are not trained, after which no further ones are drawn, per planned trial
_MIN_TRIALS = 4  # fewest complete trials for which importances are computed


def run_search(
    folder: Path, sources: Sources, resources: Resources, stop: Callable[[], bool], watch: events.Watcher | None = None
) -> Outcome:
    """Run or resume the search in the folder until there is a result or `stop` returns true; `watch` gets its events.

    Occupied if another process works here. RecipeError for an invalid recipe, or if no trial completes. LatheError if
    Optuna is not installed (extra `train`), or if a trial was stopped from outside. OSError if there is no disk space.
    """
    with hold_lock(folder), events.EventLog(folder, watch) as event_log:
        if (folder / result.FOLDER).is_dir():
            return Outcome.DONE
        try:
            return Search(folder, sources, resources, event_log).run(stop)
        except (LatheError, OSError) as error:
            event_log.emit("failed", error=str(error))
            raise


class Search:
    """One hyper-parameter search, in a folder that this process has locked: its trials, ended and running."""

    def __init__(self, folder: Path, sources: Sources, resources: Resources, event_log: events.EventLog) -> None:
        self.sweep = from_json((folder / RECIPE).read_bytes())
        self._folder, self._dataset, self._event_log = folder, sources.dataset, event_log
        threads = (resources.threads or available_cpus()) // self.sweep.parallel
        self._resources = Resources(max(threads, 1), resources.cache_dir, keep_free=resources.keep_free)
        self._finished_trials: list[TrialRecord] = []
        self._running: list[tuple[Trial, optuna.Trial]] = []
        self._started_at = time.monotonic()
        self._candidate_count = _candidate_count(self.sweep)
        self._planned = int(min(self.sweep.trials, self._candidate_count))
        self._candidates = Candidates(self.sweep, sources.dataset) if _compares_models(self.sweep) else None
        self._limit = LatencyLimit(self.sweep.latency) if self.sweep.latency else None
        self._study = self._restore_study()

    def run(self, stop: Callable[[], bool]) -> Outcome:
        """Run all trials and write the result; DONE, or STOPPED if `stop` returned true.

        If STOPPED, the running trials have written checkpoints, from which a later search resumes them. After an error
        they are killed. RecipeError if no trial completed, LatheError if a trial was stopped from outside, OSError if
        there is no disk space.
        """
        self._event_log.emit("started", trials=self._planned, ended=self._trained, parallel=self.sweep.parallel)
        try:
            if self._limit is not None:
                self._calibrate(self._limit)
            while self._fill() or self._running:
                if stop():
                    return self._stop()
                for trial, optuna_trial in list(self._running):
                    self._poll(trial, optuna_trial)
                time.sleep(_POLL_INTERVAL)
        finally:
            for trial, _ in self._running:
                trial.kill()
        return self._choose(stop)

    def _calibrate(self, limit: LatencyLimit) -> None:
        """Fit the prediction of times to random candidates."""
        random = _random_study(self.sweep.seed)
        candidates = self._candidates or Candidates(self.sweep, self._dataset)

        def draw() -> Graph | None:
            trial = random.ask()
            candidate = candidates.build({path: _suggest(trial, path, span) for path, span in self.sweep.space.items()})
            return None if candidate is None else candidate.model

        limit.calibrate(self._folder, draw)
        found = f"{len(limit.measurements)} candidates measured: half of the predicted times are within"
        self._event_log.emit("log", message=f"{found} {limit.prediction.error:.0%}")

    def _choose(self, stop: Callable[[], bool]) -> Outcome:
        """Choose the result, after the finals if there is a latency limit, and write it."""
        complete = self._complete
        if not complete:
            why = next((record.error for record in self._finished_trials if record.state == "failed"), None)
            if why is None and self._skipped:
                why = f"{self._skipped} exceed the latency limit, the others were pruned or repeated"
            raise RecipeError(f"none of {len(self._finished_trials)} trials completed: {why or 'all were pruned'}")
        if self._limit is None:
            self._finish(complete[0], self._folder / FOLDER / str(complete[0].number), {})
            return Outcome.DONE
        finals = Finals(self._folder, self.sweep, self._limit, self._dataset, self._resources, self._event_log)
        if finals.run(complete, stop) is Outcome.STOPPED:
            return Outcome.STOPPED
        best = next(record for record in complete if record.number == finals.chosen.trial)
        self._finish(best, finals.chosen_folder, {"latency": finals.summary(self._skipped)})
        return Outcome.DONE

    # -- choosing trials ------------------------------------------------------------------------------------------

    def _restore_study(self) -> optuna.Study:
        """An Optuna study that knows the trials that have ended.

        Interrupted trials are queued to run first; in a new search the recipe's own values, if they are in the space.
        """
        study = _new_study(self.sweep, self._folder)
        known = list(trial_records(self._folder))
        for record in known:
            if record.state != "running":
                self._finished_trials.append(record)
                study.add_trial(_optuna_trial(self.sweep, record))
        self._interrupted = [record for record in known if record.state == "running"]
        for record in self._interrupted:
            study.enqueue_trial(_as_params(self.sweep, record.values))
        if not known and self.sweep.default is not None:
            study.enqueue_trial(_as_params(self.sweep, self.sweep.default))
        return study

    def _fill(self) -> bool:
        """Start trials up to the number that may run in parallel; returns whether more are to be started later.

        At most one candidate that is not trained is drawn, so that the caller can look at running trials.
        """
        while self._has_candidates and len(self._running) < self.sweep.parallel:
            if not self._start():
                break
        return self._has_candidates

    @property
    def _trained(self) -> int:
        """The number of trials that have trained and ended."""
        return len(self._finished_trials) - self._untrained

    @property
    def _skipped(self) -> int:
        return sum(record.state == "skipped" for record in self._finished_trials)

    @property
    def _untrained(self) -> int:
        return sum(record.state in UNTRAINED for record in self._finished_trials)

    @property
    def _has_candidates(self) -> bool:
        """Whether further candidates are to be drawn: trials are left, and not too many candidates were not trained."""
        drawn = len(self._finished_trials) + len(self._running)
        is_exhausted = drawn >= self._candidate_count or self._untrained >= _UNTRAINED_PER_TRIAL * self._planned
        return bool(self._interrupted) or (self._trained + len(self._running) < self._planned and not is_exhausted)

    def _start(self) -> bool:
        """Draw a candidate and start its trial; False if it is not trained."""
        optuna_trial = self._study.ask()
        values = {path: _suggest(optuna_trial, path, span) for path, span in self.sweep.space.items()}
        record = self._interrupted.pop(0) if self._interrupted else self._new_record(values)
        path = self._folder / FOLDER / str(record.number)
        if record.state in UNTRAINED:
            record.write(path)
            self._record_end(optuna_trial, record)
            return False
        recipe = json.dumps(self.sweep.at(record.values)).encode()
        self._running.append((Trial(path, record, recipe, self._dataset, self._resources), optuna_trial))
        return True

    def _new_record(self, values: Values) -> TrialRecord:
        """The record of a new trial: to be trained, skipped for its time, or repeating an earlier trial."""
        earlier = [*self._finished_trials, *(trial.record for trial, _ in self._running)]
        record = TrialRecord(max((each.number for each in earlier), default=-1) + 1, values)
        candidate = self._candidates.build(values) if self._candidates is not None else None
        if candidate is None:
            return record
        same = next((each.number for each in earlier if each.digest == candidate.digest), None)
        if same is not None:
            return replace(record, state="repeated", error=f"the same as trial {same}")
        predicted = self._limit.predict(candidate.model) if self._limit is not None else None
        record = replace(record, digest=candidate.digest, predicted_ms=predicted)
        return record if self._limit is None else _within(self._limit, record, candidate.model)

    # -- results of trials ----------------------------------------------------------------------------------------

    def _poll(self, trial: Trial, optuna_trial: optuna.Trial) -> None:
        status = trial.status  # read before the events, so that events written before the end are not missed
        for epoch, merit in trial.look().items():
            optuna_trial.report(merit, epoch)
        if status is None:
            if trial.merits and optuna_trial.should_prune():
                trial.kill()
                self._end(trial, optuna_trial, trial.end("pruned"))
        else:
            trial.check_end()
            self._end(trial, optuna_trial, trial.end())

    def _end(self, trial: Trial, optuna_trial: optuna.Trial, record: TrialRecord) -> None:
        self._running.remove((trial, optuna_trial))
        self._record_end(optuna_trial, record)

    def _record_end(self, optuna_trial: optuna.Trial, record: TrialRecord) -> None:
        self._finished_trials.append(record)
        self._study.tell(optuna_trial, record.merit if record.state == "complete" else None, _optuna_state(record))
        best = next(iter(self._complete), None)
        self._event_log.emit(
            "trial",
            trial=record.number,
            state=record.state,
            values=dict(record.values),
            merit=record.merit,
            error=record.error,
            ended=self._trained,
            trials=self._planned,
            best=best.number if best else None,
            seconds=round(time.monotonic() - self._started_at, 3),
        )

    def _stop(self) -> Outcome:
        """Stop the trials with checkpoints, from which they resume when the search does."""
        for trial, _ in self._running:
            trial.request_stop()
        for trial, _ in self._running:
            trial.wait()
        return Outcome.STOPPED

    @property
    def _complete(self) -> list[TrialRecord]:
        """The complete trials, the best one first, of equal ones the earlier one."""
        complete = [
            record for record in self._finished_trials if record.state == "complete" and record.merit is not None
        ]
        return sorted(complete, key=lambda record: (-(record.merit or 0.0), record.number))

    def _finish(self, best: TrialRecord, trial: Path, facts: Mapping[str, Any]) -> None:
        """Write the result: the one in the folder `trial`, a summary of the search with `facts`, and the report."""
        record = {**result.read_metrics(trial), "sweep": {**self._summary(best), **facts}}
        files = {path.name: path.read_bytes() for path in (trial / result.FOLDER).iterdir() if path.is_file()}
        files |= self._report(trial, record["sweep"])
        files[result.METRICS] = json.dumps(record, indent=1).encode()
        write_folder(self._folder / result.FOLDER, files)
        self._event_log.emit("done", metrics=record["metrics"], seconds=round(time.monotonic() - self._started_at, 3))

    def _summary(self, best: TrialRecord) -> dict[str, Any]:
        trials = [
            {"trial": one.number, "state": one.state, "merit": one.merit, "values": dict(one.values), **_times(one)}
            for one in sorted(self._finished_trials, key=lambda one: one.number)
        ]
        return {
            "best": best.number,
            "values": dict(best.values),
            "merit": best.merit,
            "importance": importance(self._study),
            "trials": trials,
        }

    def _report(self, trial: Path, summary: dict[str, Any]) -> dict[str, bytes]:
        """The report on the search and its best trial, by file name; empty if it fails, which is logged."""
        merits = {record.number: record.merits or {} for record in self._finished_trials}
        try:
            operators = report.slowest_operators(
                (trial / result.FOLDER / result.MODEL).read_bytes(), threads=self._resources.threads
            )
            return {report.FILE: report.page(trial, operators, report.search_section(summary, merits)).encode()}
        except Exception as error:  # any error: the search has succeeded
            self._event_log.emit("log", message=f"the report could not be written: {error!r}")
            return {}


# -- Optuna -----------------------------------------------------------------------------------------------------------


def _new_study(sweep: Sweep, folder: Path) -> optuna.Study:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise LatheError(f"sweeps need {error.name}: pip install '.[train]'") from None

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    epochs = sweep.trial({}).epochs
    pruners: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=sweep.patience),
        "hyperband": lambda: optuna.pruners.HyperbandPruner(max_resource=epochs),
        "none": optuna.pruners.NopPruner,
    }
    known = sum(record.state != "running" for record in trial_records(folder))
    # A resumed search must not draw the same values again, so the seed depends on the number of known trials.
    return optuna.create_study(
        direction="maximize", sampler=_sampler(sweep, sweep.seed + known), pruner=pruners[sweep.pruner]()
    )


def _sampler(sweep: Sweep, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    match sweep.sampler:
        case "random":
            return optuna.samplers.RandomSampler(seed=seed)
        case "evolution":
            from lathe.core.train.run.evolution import EvolutionSampler

            space = {path: _distribution(span) for path, span in sweep.space.items()}
            return EvolutionSampler(space, sweep.trials, seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _candidate_count(sweep: Sweep) -> float:
    """The number of candidates that the sampler can draw, infinite for samplers that repeat candidates."""
    if sweep.sampler != "evolution":
        return inf
    from lathe.core.train.run.evolution import candidate_count

    count = candidate_count({path: _distribution(span) for path, span in sweep.space.items()})
    return inf if count is None else count


def _compares_models(sweep: Sweep) -> bool:
    """Whether untrained models tell something: their time, or whether evolution has drawn the same one before."""
    return sweep.latency is not None or (
        sweep.sampler == "evolution" and any(path.partition(".")[0] == "model" for path in sweep.space)
    )


def _random_study(seed: int) -> optuna.Study:
    """A study whose trials are drawn evenly."""
    import optuna

    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))


def importance(study: optuna.Study) -> dict[str, float]:
    """The importance of each setting (by path) for the merit, as shares of 1: PED-ANOVA (S. Watanabe et al., 2023).

    Empty for fewer than `_MIN_TRIALS` complete trials, or if their merits do not differ.
    """
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
    from optuna.trial import TrialState

    if len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) < _MIN_TRIALS:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # Optuna warns and gives equal shares
        try:
            importances = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
        except UserWarning:
            return {}
    return {path: float(share) for path, share in importances.items()}


def _optuna_state(record: TrialRecord) -> optuna.trial.TrialState:
    """The state of an ended trial.

    A skipped one counts as pruned before the first epoch: worse than all others. Of a repeated one samplers learn
    nothing.
    """
    from optuna.trial import TrialState

    match record.state:
        case "complete":
            return TrialState.COMPLETE
        case "failed" | "repeated":
            return TrialState.FAIL
    return TrialState.PRUNED


def _times(record: TrialRecord) -> dict[str, float]:
    times = {"predicted_ms": record.predicted_ms, "measured_ms": record.measured_ms}
    return {name: ms for name, ms in times.items() if ms is not None}


def _within(limit: LatencyLimit, record: TrialRecord, model: Graph) -> TrialRecord:
    """The record of a trial, skipped if its model takes too long: far too long as predicted, or else as measured."""
    if limit.is_far_above(record.predicted_ms):
        return replace(record, state="skipped")
    if limit.is_far_below(record.predicted_ms):
        return record
    (ms,) = limit.measure([model])
    return replace(record, measured_ms=ms, state="running" if ms <= limit.settings.limit_ms else "skipped")


def _optuna_trial(sweep: Sweep, record: TrialRecord) -> optuna.trial.FrozenTrial:
    import optuna

    return optuna.trial.create_trial(
        state=_optuna_state(record),
        value=record.merit if record.state == "complete" else None,
        params=_as_params(sweep, record.values),
        distributions={path: _distribution(span) for path, span in sweep.space.items()},
        intermediate_values=dict(record.merits or {}),
    )


def _distribution(span: Between | Choices) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(span, Choices):
        return CategoricalDistribution([json.dumps(value) for value in span.choices])
    if span.is_whole:
        return IntDistribution(int(span.low), int(span.high), log=span.log)
    return FloatDistribution(span.low, span.high, log=span.log)


def _suggest(optuna_trial: optuna.Trial, path: str, span: Between | Choices) -> Any:
    if isinstance(span, Choices):
        return json.loads(optuna_trial.suggest_categorical(path, [json.dumps(value) for value in span.choices]))
    if span.is_whole:
        return optuna_trial.suggest_int(path, int(span.low), int(span.high), log=span.log)
    return optuna_trial.suggest_float(path, span.low, span.high, log=span.log)


def _as_params(sweep: Sweep, values: Any) -> dict[str, Any]:
    """Values of fields as parameters of Optuna: choices as JSON text, since Optuna takes scalars only."""
    choices = {path for path, span in sweep.space.items() if isinstance(span, Choices)}
    return {path: json.dumps(value) if path in choices else value for path, value in values.items()}
