"""`FitRun`: runs or resumes a training in a folder until there is a result.

    events.jsonl      the log of events: see events.py
    checkpoints/      states to resume from: see checkpoint.py
    result/           the model and its metrics: see result.py

Random numbers and the order of rows are functions of seeds and counters. So a training that was killed and resumed
from a checkpoint ends with bit-identical weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import closing
from enum import Enum
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

from lathe.core.errors import LatheError
from lathe.core.ir.graph import Array, Graph
from lathe.core.train.data import Dataset
from lathe.core.train.recipe.parent_model import Parent
from lathe.core.train.recipe.recipe import Recipe, RecipeError
from lathe.core.train.recipe.training_setup import DEFAULT_RESOURCES, Resources, TrainingSetup, set_up_training
from lathe.core.train.run import checkpoint, events, result
from lathe.core.train.run.progress import Best, Progress, checkpoint_of, restore
from lathe.core.train.run.scores import Stopped, compute_scores
from lathe.core.train.run.step_meter import StepMeter
from lathe.core.train.training_step.step_graph import TARGET
from lathe.core.train.training_step.train_step import with_weights

_MIN_LOSS_SCALE = 2.0**-32  # of the loss scale: a training whose scale falls below it cannot recover


class Diverged(LatheError):
    """The training has diverged: the loss is infinite or NaN, or the loss scale of float16 is too small to recover."""


class Outcome(Enum):
    DONE = "done"  # there is a result
    STOPPED = "stopped"  # by request; a checkpoint allows to resume


def never_stop() -> bool:
    return False


class FitRun:
    """One training in an existing folder that this process has locked. `run` is called once.

    `parent` is the model to fine-tune, `teacher` that of a distillation, `resources` limit it. `stop` is called after
    every step, and before every batch of validation and test; it ends the training if it returns true. `watch` is
    called with every event. RecipeError, DataError or ModelError if recipe, data and parent do not fit together.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        folder: Path,
        parent: Parent | None = None,
        resources: Resources = DEFAULT_RESOURCES,
        teacher: Graph | None = None,
        *,
        stop: Callable[[], bool] = never_stop,
        watch: events.Watcher | None = None,
    ) -> None:
        self.recipe, self.folder = recipe, folder
        self.assembly: TrainingSetup = set_up_training(recipe, dataset, parent, resources, teacher)
        self.learner = self.assembly.learner
        self.progress = Progress()
        self._identity = {"recipe": recipe_digest(recipe), "data": dataset.digest}
        self._stop, self._watch = stop, watch
        self._meter = StepMeter()
        self._compiled: set[int] = set()  # batch sizes that have run, and so are compiled
        self._first_epoch = 0  # epochs that were done when this process started
        self._last_checkpoint: tuple[int, int] | None = None  # runs and epochs at the last checkpoint
        self._attempted_runs = 0  # runs at the last attempt to write a checkpoint
        self._attempted_at = self._last_step_at = perf_counter()

    def run(self) -> Outcome:
        """Train until there is a result (DONE), or `stop` returns true (STOPPED, after `_save`).

        Closes the training step at the end. Diverged if the training diverges. OSError if there is no disk space for
        the result. RecipeError if the folder has checkpoints of another recipe or other data.
        """
        with (
            closing(self.learner),
            events.EventLog(self.folder, self._watch) as self._events,
            self.assembly.loader() as self._loader,
        ):
            try:
                self._begin()
                while self.progress.epoch < self.recipe.epochs and not self.progress.ended:
                    self._epoch()
                self._save()
                self._finish()
            except Stopped:
                self._save()
                return Outcome.STOPPED
        return Outcome.DONE

    # -- start or resume ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Resume from the newest intact checkpoint, or start from the beginning if there is none.

        Damaged checkpoints that are newer are logged. RecipeError for a checkpoint of another recipe or other data.
        """
        latest, errors = checkpoint.newest(self.folder)
        for error in errors:
            self._events.emit("log", message=error)
        if latest is None:
            self._events.emit("started", **self._facts())
        else:
            self._resume(latest)
        self._first_epoch = self.progress.epoch
        self._attempted_at = self._last_step_at = perf_counter()

    def _resume(self, latest: checkpoint.Checkpoint) -> None:
        belongs = latest.record["belongs"]
        for name, digest in self._identity.items():
            if belongs.get(name) != digest:
                raise RecipeError(f"{name}: the folder has checkpoints with sha256 {belongs.get(name)}, got {digest}")
        self.progress = restore(latest, self.learner)
        self._last_checkpoint = (self.learner.runs, self.progress.epoch)
        self._attempted_runs = self.learner.runs
        self._events.emit("resumed", step=self.learner.runs, epoch=self.progress.epoch + 1)

    def _facts(self) -> dict[str, Any]:
        split, learner, pruner = self.assembly.split, self.learner, self.assembly.pruner
        masks = pruner.names if pruner is not None else frozenset()
        return {
            "rows": {"train": len(split.train), "validation": len(split.validation), "test": len(split.test)},
            "epochs": self.recipe.epochs,
            "steps_per_epoch": self.assembly.steps_per_epoch,
            "batch": self.recipe.batch,
            "parameters": sum(array.size for name, array in learner.parameters.items() if name not in masks),
            "judge": self.assembly.judge,
            "data": self._identity["data"],
            "seed": self.recipe.seed,
            "version": result.code_version(),
        }

    # -- epochs and steps -----------------------------------------------------------------------------------------

    def _epoch(self) -> None:
        """Do the remaining steps of an epoch, then `_end_epoch` with the validation.

        Stopped if `stop` returns true after a step, or before a batch of the validation.
        """
        for batch in self._loader.epoch(self.progress.epoch, self.progress.position):
            self._step(batch)
            if self._stop():
                raise Stopped
            if self._is_checkpoint_due:
                self._save()
        self._end_epoch()

    def _step(self, batch: Mapping[str, Array]) -> None:
        progress, learner, rows = self.progress, self.learner, len(batch[TARGET])
        skipped = learner.skipped
        loss = float(learner.run(batch)["loss"])
        now = perf_counter()
        seconds = now - self._last_step_at if rows in self._compiled else None
        self._last_step_at = now
        self._compiled.add(rows)
        is_open = learner.settings.scaling is not None and learner.runs % self.recipe.accumulate != 0
        if _has_diverged(loss, learner.loss_scale, skipped=is_open or learner.skipped > skipped):
            place = f"step {learner.runs}, epoch {progress.epoch + 1}"
            raise Diverged(f"the loss is {loss} at {place}: try a lower rate, a warm-up, or `clip`")
        if self.assembly.pruner is not None and learner.runs % self.recipe.accumulate == 0:
            self.assembly.pruner.after_update(learner)
        progress.position += 1
        progress.seconds += seconds or 0.0
        if isfinite(loss):
            progress.loss += loss * rows
            progress.rows += rows
            self._meter.add(loss, rows, seconds)
        is_due = self._meter.due or progress.position == self.assembly.steps_per_epoch
        if is_due and self._meter.rows:
            self._emit_step()

    def _emit_step(self) -> None:
        run = self.learner.runs
        rate = self.learner.schedule((run - 1) // self.recipe.accumulate)
        values = {"step": run, "epoch": self.progress.epoch + 1, "rate": rate, **self._meter.take()}
        if self.learner.settings.scaling is not None:
            values.update(loss_scale=self.learner.loss_scale, skipped=self.learner.skipped)
        self._events.emit("step", **values, seconds=round(self.progress.seconds, 3))

    def _end_epoch(self) -> None:
        """End an epoch: validate, update the best weights, and emit the event `epoch`."""
        progress, validation = self.progress, self._validation()
        values: dict[str, Any] = {"loss": progress.mean_loss}
        if validation:
            values.update(validation=validation, best=self._update_best(validation))
        progress.next_epoch()
        if progress.epoch > self._first_epoch + 1:  # the first epoch of a process includes compiling the validation
            progress.seconds += perf_counter() - self._last_step_at
        self._last_step_at = perf_counter()
        place = {"epoch": progress.epoch, "step": self.learner.runs}
        self._events.emit("epoch", **place, **values, seconds=round(progress.seconds, 3))

    def _validation(self) -> dict[str, float]:
        assembly, rows = self.assembly, self.assembly.split.validation
        if not len(rows):
            return {}
        output = assembly.learner.model.outputs[0].name
        return compute_scores(
            assembly.evaluation.run, assembly.examples, rows, self.recipe.batch, output, self._stop
        ).metrics

    def _update_best(self, validation: Mapping[str, float]) -> bool:
        """Update the best epoch and early stopping; returns whether this epoch is the best so far.

        Of equal accuracies the lower loss is better. Early stopping compares accuracies or losses alone.
        """
        progress, stop = self.progress, self.recipe.stop
        score = validation["accuracy"] if self.assembly.judge == "accuracy" else -validation["loss"]
        merit, best = (score, -validation["loss"]), progress.best
        is_improvement = best is None or score > best.merit[0] + (stop.least_change if stop else 0.0)
        progress.waited = 0 if is_improvement else progress.waited + 1
        progress.ended = stop is not None and progress.waited >= stop.patience
        if best is not None and merit <= best.merit:
            return False
        weights = {name: array.copy() for name, array in self.assembly.evaluation.weights.items()}
        progress.best = Best(progress.epoch + 1, merit, weights if self.recipe.keep == "best" else {})
        return True

    # -- checkpoints and result -----------------------------------------------------------------------------------

    @property
    def _is_checkpoint_due(self) -> bool:
        settings = self.recipe.checkpoint
        if settings.steps is not None and self.learner.runs - self._attempted_runs >= settings.steps:
            return True
        return settings.seconds is not None and perf_counter() - self._attempted_at >= settings.seconds

    def _save(self) -> None:
        """Write a checkpoint unless the present state has one, or no step was done yet.

        If it cannot be written, the error is logged and the previous checkpoint remains.
        """
        present = (self.learner.runs, self.progress.epoch)
        self._attempted_runs, self._attempted_at = self.learner.runs, perf_counter()
        if present == self._last_checkpoint or not self.learner.runs:
            return
        try:
            checkpoint.save(self.folder, self.learner.runs, checkpoint_of(self.progress, self.learner, self._identity))
        except OSError as error:
            self._events.emit("log", message=f"checkpoint {self.learner.runs} could not be written: {error}")
            return
        self._last_checkpoint = present
        self._events.emit("checkpoint", step=self.learner.runs)

    def _finish(self) -> None:
        best, evaluation = self.progress.best, self.assembly.evaluation
        weights = best.weights if best is not None and best.weights else evaluation.weights
        facts = {
            "epochs": self.progress.epoch,
            "steps": self.learner.runs,
            "best_epoch": best.epoch if best is not None else None,
            "seconds": round(self.progress.seconds, 3),
            "recipe": self.recipe.model_dump(mode="json"),
        }
        trained = self.assembly.compression.finish(with_weights(self.assembly.model, weights))
        record = result.write_result(self.folder, self.assembly, trained, facts, self._stop)
        self._events.emit("done", metrics=record["metrics"], seconds=facts["seconds"])


def _has_diverged(loss: float, scale: float, skipped: bool) -> bool:
    """Whether the training has diverged.

    With loss scaling an overflow is harmless, since the update is skipped. But a loss that is not finite at a scale
    below 1, or a scale below `_MIN_LOSS_SCALE`, does not recover. `skipped` says that this update is skipped, or still
    accumulates batches and may be skipped.
    """
    if isfinite(loss):
        return scale < _MIN_LOSS_SCALE
    return not skipped or scale < 1


def recipe_digest(recipe: Recipe) -> str:
    """The SHA-256 of a recipe. Fields with their default value do not count, so fields added later do not change it."""
    return hashlib.sha256(recipe.model_dump_json(exclude_defaults=True).encode()).hexdigest()
