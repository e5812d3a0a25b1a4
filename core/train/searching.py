"""The search of a sweep: what to try next, which trials to end early, and the best one's result.

Optuna's sampler (TPE: J. Bergstra et al., 2011) and pruners decide; what they know lies in the records of the trials,
so a search that was killed goes on with them.

Z. Li et al., Hyperband, 2018; the median rule: D. Golovin et al., Google Vizier, 2017.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import LatheError
from core.runtime.cpus import available_cpus
from core.train import events, report, result
from core.train.assembly import Means
from core.train.durable import write_folder
from core.train.fitting import Outcome
from core.train.recipe import RecipeError
from core.train.space import Between, Choices, Sweep, from_json
from core.train.trials import FOLDER, Record, Trial, records
from core.train.work import RECIPE, Sources, locked

if TYPE_CHECKING:
    import optuna

_LOOK = 0.1  # seconds between two looks at the trials
_TELLING = 4  # complete trials that can say what mattered


def work(folder: Path, sources: Sources, means: Means, stop: Callable[[], bool]) -> Outcome:
    """Search as the folder says, from where it was left, until there is a result or `stop` says so.

    Raises Occupied; RecipeError; LatheError when no trial comes to an end; OSError.
    """
    with locked(folder), events.Events(folder) as told:
        if (folder / result.FOLDER).is_dir():
            return Outcome.DONE
        try:
            return Search(folder, sources, means, told).run(stop)
        except (LatheError, OSError) as error:
            told.emit("failed", error=str(error))
            raise


class Search:
    """One search, in a folder in which no other process works."""

    def __init__(self, folder: Path, sources: Sources, means: Means, told: events.Events) -> None:
        self.sweep = from_json((folder / RECIPE).read_bytes())
        self._folder, self._dataset, self._told = folder, sources.dataset, told
        threads = (means.threads or available_cpus()) // self.sweep.parallel
        self._means = Means(max(threads, 1), means.cache_dir, keep_free=means.keep_free)
        self._ended: list[Record] = []
        self._running: list[tuple[Trial, optuna.Trial]] = []
        self._began = time.monotonic()
        self._study = self._remember()

    def run(self, stop: Callable[[], bool]) -> Outcome:
        """Try what there is to try."""
        self._told.emit("started", trials=self.sweep.trials, ended=len(self._ended), parallel=self.sweep.parallel)
        try:
            while self._fill() or self._running:
                if stop():
                    return self._stop()
                for trial, asked in list(self._running):
                    self._look(trial, asked)
                time.sleep(_LOOK)
        finally:
            for trial, _ in self._running:
                trial.kill()
        self._finish()
        return Outcome.DONE

    # -- what to try ----------------------------------------------------------------------------------------------

    def _remember(self) -> optuna.Study:
        """Optuna's view of what has been tried. Trials that were killed are to be asked for again, first."""
        study = _new_study(self.sweep, self._folder)
        known = list(records(self._folder))
        for record in known:
            if record.state != "running":
                self._ended.append(record)
                study.add_trial(_told_to_optuna(self.sweep, record))
        self._again = [record for record in known if record.state == "running"]
        for record in self._again:
            study.enqueue_trial(_as_params(self.sweep, record.values))
        if not known and self.sweep.default is not None:
            study.enqueue_trial(_as_params(self.sweep, self.sweep.default))
        return study

    def _fill(self) -> bool:
        """Start trials while there is room; returns whether there are any left to start."""
        begun = len(self._ended) + len(self._running)
        while begun < self.sweep.trials and len(self._running) < self.sweep.parallel:
            self._start()
            begun += 1
        return begun < self.sweep.trials

    def _start(self) -> None:
        asked = self._study.ask()
        values = {path: _suggest(asked, path, span) for path, span in self.sweep.space.items()}
        if self._again:
            record = self._again.pop(0)
        else:
            taken = {record.number for record in self._ended} | {trial.record.number for trial, _ in self._running}
            record = Record(max(taken, default=-1) + 1, values)
        recipe = json.dumps(self.sweep.at(record.values)).encode()
        path = self._folder / FOLDER / str(record.number)
        self._running.append((Trial(path, record, recipe, self._dataset, self._means), asked))

    # -- what becomes of it ---------------------------------------------------------------------------------------

    def _look(self, trial: Trial, asked: optuna.Trial) -> None:
        status = trial.status  # before its events, so that none is missed
        for epoch, merit in trial.look().items():
            asked.report(merit, epoch)
        if status is None:
            if trial.merits and asked.should_prune():
                trial.kill()
                self._note(trial, asked, trial.end("pruned"))
        elif trial.found_no_room:
            raise OSError(28, "no space left on device")
        elif trial.was_stopped:
            raise LatheError(f"trial {trial.record.number} was stopped by somebody else")
        else:
            self._note(trial, asked, trial.end())

    def _note(self, trial: Trial, asked: optuna.Trial, record: Record) -> None:
        from optuna.trial import TrialState

        self._running.remove((trial, asked))
        self._ended.append(record)
        states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        self._study.tell(asked, record.merit if record.state == "complete" else None, states[record.state])
        best = self._best
        self._told.emit(
            "trial",
            trial=record.number,
            state=record.state,
            values=dict(record.values),
            merit=record.merit,
            error=record.error,
            ended=len(self._ended),
            trials=self.sweep.trials,
            best=best.number if best else None,
            seconds=round(time.monotonic() - self._began, 3),
        )

    def _stop(self) -> Outcome:
        """Have trials write checkpoints; they go on when the sweep does."""
        for trial, _ in self._running:
            trial.ask_to_stop()
        for trial, _ in self._running:
            trial.wait()
        return Outcome.STOPPED

    @property
    def _best(self) -> Record | None:
        complete = [record for record in self._ended if record.state == "complete" and record.merit is not None]
        return max(complete, key=lambda record: (record.merit, -record.number), default=None)

    def _finish(self) -> None:
        """The best trial's result is the sweep's."""
        best = self._best
        if best is None:
            why = next((record.error for record in self._ended if record.error), "all were ended early")
            raise RecipeError(f"none of {len(self._ended)} trials came to an end: {why}")
        trial = self._folder / FOLDER / str(best.number)
        record = {**result.read_metrics(trial), "sweep": self._summary(best)}
        files = {path.name: path.read_bytes() for path in (trial / result.FOLDER).iterdir() if path.is_file()}
        files |= self._report(trial, record["sweep"])
        files[result.METRICS] = json.dumps(record, indent=1).encode()
        write_folder(self._folder / result.FOLDER, files)
        self._told.emit("done", metrics=record["metrics"], seconds=round(time.monotonic() - self._began, 3))

    def _summary(self, best: Record) -> dict[str, Any]:
        trials = [
            {"trial": one.number, "state": one.state, "merit": one.merit, "values": dict(one.values)}
            for one in sorted(self._ended, key=lambda one: one.number)
        ]
        return {
            "best": best.number,
            "values": dict(best.values),
            "merit": best.merit,
            "importance": importance(self._study),
            "trials": trials,
        }

    def _report(self, trial: Path, summary: dict[str, Any]) -> dict[str, bytes]:
        """The page about the search and its best trial, by its file's name. Without one the result is no worse."""
        merits = {record.number: record.merits or {} for record in self._ended}
        try:
            operators = report.slowest((trial / result.FOLDER / result.MODEL).read_bytes(), threads=self._means.threads)
            return {report.FILE: report.page(trial, operators, report.section(summary, merits)).encode()}
        except Exception as error:  # whatever it is: the search has ended well
            self._told.emit("log", message=f"the report could not be written: {error!r}")
            return {}


# -- Optuna -----------------------------------------------------------------------------------------------------------


def _new_study(sweep: Sweep, folder: Path) -> optuna.Study:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise LatheError(f"sweeps need {error.name}: pip install 'lathe[train]'") from None

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    epochs = sweep.trial({}).epochs
    pruners: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=sweep.patience),
        "hyperband": lambda: optuna.pruners.HyperbandPruner(max_resource=epochs),
        "none": optuna.pruners.NopPruner,
    }
    known = sum(record.state != "running" for record in records(folder))  # who goes on does not draw the same again
    sampler = optuna.samplers.TPESampler(seed=sweep.seed + known, constant_liar=True)
    return optuna.create_study(direction="maximize", sampler=sampler, pruner=pruners[sweep.pruner]())


def importance(study: optuna.Study) -> dict[str, float]:
    """How much each setting decided about merits, as shares of 1; nothing where few trials, or equal ones, cannot say.

    S. Watanabe et al., PED-ANOVA, 2023.
    """
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
    from optuna.trial import TrialState

    if len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) < _TELLING:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # Optuna warns and gives equal shares
        try:
            found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
        except UserWarning:
            return {}
    return {path: float(share) for path, share in found.items()}


def _told_to_optuna(sweep: Sweep, record: Record) -> optuna.trial.FrozenTrial:
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


def _suggest(asked: optuna.Trial, path: str, span: Between | Choices) -> Any:
    if isinstance(span, Choices):
        return json.loads(asked.suggest_categorical(path, [json.dumps(value) for value in span.choices]))
    if span.is_whole:
        return asked.suggest_int(path, int(span.low), int(span.high), log=span.log)
    return asked.suggest_float(path, span.low, span.high, log=span.log)


def _as_params(sweep: Sweep, values: Any) -> dict[str, Any]:
    """Values as Optuna knows them: of choices, the JSON."""
    choices = {path for path, span in sweep.space.items() if isinstance(span, Choices)}
    return {path: json.dumps(value) if path in choices else value for path, value in values.items()}
