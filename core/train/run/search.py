"""Hyper-parameter search: chooses the values of trials, prunes bad trials, and publishes the best trial's result.

A sampler (TPE: J. Bergstra et al., 2011; random; evolution.py) and Optuna's pruners decide. A search that was killed
rebuilds their state from the records of the trials.

Pruners: Hyperband (Z. Li et al., 2018); the median rule (D. Golovin et al., Google Vizier, 2017).
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lathe.core.errors import LatheError
from lathe.core.runtime.host.cpus import available_cpus
from lathe.core.train import report
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.recipe.sweep_space import Between, Choices, Sweep, from_json
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import events, result
from lathe.core.train.run.durable_files import write_folder
from lathe.core.train.run.training_loop import Outcome
from lathe.core.train.run.trials import FOLDER, Trial, TrialRecord, trial_records
from lathe.core.train.run.work_folder import RECIPE, Sources, hold_lock

if TYPE_CHECKING:
    import optuna

_POLL_INTERVAL = 0.1  # seconds between two polls of the trials
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
        self._planned = _planned_trials(self.sweep)
        self._study = self._restore_study()

    def run(self, stop: Callable[[], bool]) -> Outcome:
        """Run all trials and write the result; DONE, or STOPPED if `stop` returned true.

        If STOPPED, the running trials have written checkpoints, from which a later search resumes them. After an error
        they are killed. RecipeError if no trial completed, LatheError if a trial was stopped from outside, OSError if
        there is no disk space.
        """
        self._event_log.emit(
            "started", trials=self._planned, ended=len(self._finished_trials), parallel=self.sweep.parallel
        )
        try:
            while self._fill() or self._running:
                if stop():
                    return self._stop()
                for trial, optuna_trial in list(self._running):
                    self._poll(trial, optuna_trial)
                time.sleep(_POLL_INTERVAL)
        finally:
            for trial, _ in self._running:
                trial.kill()
        self._finish()
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
        """Start trials up to the number that may run in parallel; returns whether more are to be started later."""
        started = len(self._finished_trials) + len(self._running)
        while started < self._planned and len(self._running) < self.sweep.parallel:
            self._start()
            started += 1
        return started < self._planned

    def _start(self) -> None:
        optuna_trial = self._study.ask()
        values = {path: _suggest(optuna_trial, path, span) for path, span in self.sweep.space.items()}
        if self._interrupted:
            record = self._interrupted.pop(0)
        else:
            numbers = {record.number for record in self._finished_trials} | {
                trial.record.number for trial, _ in self._running
            }
            record = TrialRecord(max(numbers, default=-1) + 1, values)
        recipe = json.dumps(self.sweep.at(record.values)).encode()
        path = self._folder / FOLDER / str(record.number)
        self._running.append((Trial(path, record, recipe, self._dataset, self._resources), optuna_trial))

    # -- results of trials ----------------------------------------------------------------------------------------

    def _poll(self, trial: Trial, optuna_trial: optuna.Trial) -> None:
        status = trial.status  # read before the events, so that events written before the end are not missed
        for epoch, merit in trial.look().items():
            optuna_trial.report(merit, epoch)
        if status is None:
            if trial.merits and optuna_trial.should_prune():
                trial.kill()
                self._record_end(trial, optuna_trial, trial.end("pruned"))
        elif trial.is_out_of_space:
            raise OSError(28, "no space left on device")
        elif trial.was_stopped:
            raise LatheError(f"trial {trial.record.number} was stopped from outside the search")
        else:
            self._record_end(trial, optuna_trial, trial.end())

    def _record_end(self, trial: Trial, optuna_trial: optuna.Trial, record: TrialRecord) -> None:
        from optuna.trial import TrialState

        self._running.remove((trial, optuna_trial))
        self._finished_trials.append(record)
        states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        self._study.tell(optuna_trial, record.merit if record.state == "complete" else None, states[record.state])
        best = self._best
        self._event_log.emit(
            "trial",
            trial=record.number,
            state=record.state,
            values=dict(record.values),
            merit=record.merit,
            error=record.error,
            ended=len(self._finished_trials),
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
    def _best(self) -> TrialRecord | None:
        complete = [
            record for record in self._finished_trials if record.state == "complete" and record.merit is not None
        ]
        return max(complete, key=lambda record: (record.merit, -record.number), default=None)

    def _finish(self) -> None:
        """Write the result: that of the best trial, a summary of the search, and the report.

        RecipeError if no trial completed.
        """
        best = self._best
        if best is None:
            why = next((record.error for record in self._finished_trials if record.error), "all were pruned")
            raise RecipeError(f"none of {len(self._finished_trials)} trials completed: {why}")
        trial = self._folder / FOLDER / str(best.number)
        record = {**result.read_metrics(trial), "sweep": self._summary(best)}
        files = {path.name: path.read_bytes() for path in (trial / result.FOLDER).iterdir() if path.is_file()}
        files |= self._report(trial, record["sweep"])
        files[result.METRICS] = json.dumps(record, indent=1).encode()
        write_folder(self._folder / result.FOLDER, files)
        self._event_log.emit("done", metrics=record["metrics"], seconds=round(time.monotonic() - self._started_at, 3))

    def _summary(self, best: TrialRecord) -> dict[str, Any]:
        trials = [
            {"trial": one.number, "state": one.state, "merit": one.merit, "values": dict(one.values)}
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


def _planned_trials(sweep: Sweep) -> int:
    """The number of trials. Evolution repeats no candidate, so it has at most as many as there are candidates."""
    if sweep.sampler != "evolution":
        return sweep.trials
    from lathe.core.train.run.evolution import candidate_count

    count = candidate_count({path: _distribution(span) for path, span in sweep.space.items()})
    return sweep.trials if count is None else min(sweep.trials, count)


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


def _optuna_trial(sweep: Sweep, record: TrialRecord) -> optuna.trial.FrozenTrial:
    import optuna
    from optuna.trial import TrialState

    states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
    return optuna.trial.create_trial(
        state=states[record.state],
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
