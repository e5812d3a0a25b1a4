"""`Fit`: a recipe's training in a folder, from wherever it was left to its result.

    events.jsonl      what happens: see events.py
    checkpoints/      where to go on: see checkpoint.py
    result/           what came of it: see result.py

What is drawn, and the order of rows, are functions of seeds and counters. So a training that was killed and goes on
from a checkpoint ends with the same weights, bit by bit, as one that was not.
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

from core.errors import LatheError
from core.ir.graph import Array
from core.train import checkpoint, events, result
from core.train.assembly import MEANS, Assembly, Means, assemble
from core.train.data import Dataset
from core.train.joint import TARGET
from core.train.meter import Meter
from core.train.parent import Parent
from core.train.progress import Best, Progress, packed, unpacked
from core.train.recipe import Recipe, RecipeError
from core.train.scores import Stopped, scores
from core.train.stepping import with_weights

_LEAST_SCALE = 2.0**-32  # of a loss


class Diverged(LatheError):
    """The loss is no number any more."""


class Outcome(Enum):
    DONE = "done"  # there is a result
    STOPPED = "stopped"  # somebody asked for an end: a checkpoint says where to go on


def never() -> bool:
    return False


class Fit:
    """One training, in a folder that exists and in which no other process works.

    `stop` is asked after every step whether to end; `watch` sees every event. RecipeError, DataError or ModelError when
    recipe, data and parent do not go together.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        folder: Path,
        parent: Parent | None = None,
        means: Means = MEANS,
        *,
        stop: Callable[[], bool] = never,
        watch: events.Watcher | None = None,
    ) -> None:
        self.recipe, self.folder = recipe, folder
        self.assembly: Assembly = assemble(recipe, dataset, parent, means)
        self.learner = self.assembly.learner
        self.progress = Progress()
        self._belongs = {"recipe": recipe_digest(recipe), "data": dataset.digest}
        self._stop, self._watch = stop, watch
        self._meter = Meter()
        self._compiled: set[int] = set()  # numbers of rows that steps have run with
        self._began_in = 0  # epochs that were done when this process took over
        self._saved: tuple[int, int] | None = None  # runs and epochs of the last checkpoint
        self._tried = 0  # runs before the last attempt at one
        self._tried_at = self._stepped_at = perf_counter()

    def run(self) -> Outcome:
        """Train to the end, or until stopped.

        Diverged when the loss is no number any more; OSError when the result finds no room.
        """
        with (
            closing(self.learner),
            events.Events(self.folder, self._watch) as self._events,
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

    # -- where it begins ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Take up the newest whole checkpoint, or start."""
        found, complaints = checkpoint.newest(self.folder)
        for complaint in complaints:
            self._events.emit("log", message=complaint)
        if found is None:
            self._events.emit("started", **self._facts())
        else:
            self._resume(found)
        self._began_in = self.progress.epoch
        self._tried_at = self._stepped_at = perf_counter()

    def _resume(self, found: checkpoint.Checkpoint) -> None:
        belongs = found.record["belongs"]
        for name, digest in self._belongs.items():
            if belongs.get(name) != digest:
                raise RecipeError(f"the folder holds checkpoints of another {name}, sha256 {belongs.get(name)}")
        self.progress = unpacked(found, self.learner)
        self._saved = (self.learner.runs, self.progress.epoch)
        self._tried = self.learner.runs
        self._events.emit("resumed", step=self.learner.runs, epoch=self.progress.epoch + 1)

    def _facts(self) -> dict[str, Any]:
        split, learner = self.assembly.split, self.learner
        return {
            "rows": {"train": len(split.train), "validation": len(split.validation), "test": len(split.test)},
            "epochs": self.recipe.epochs,
            "steps_per_epoch": self.assembly.steps_per_epoch,
            "batch": self.recipe.batch,
            "parameters": sum(array.size for array in learner.parameters.values()),
            "judge": self.assembly.judge,
            "data": self._belongs["data"],
            "seed": self.recipe.seed,
            "version": result.code_version(),
        }

    # -- epochs and steps -----------------------------------------------------------------------------------------

    def _epoch(self) -> None:
        """What is left of an epoch, and a look at it."""
        for batch in self._loader.epoch(self.progress.epoch, self.progress.position):
            self._step(batch)
            if self._stop():
                raise Stopped
            if self._checkpoint_due:
                self._save()
        self._look()

    def _step(self, batch: Mapping[str, Array]) -> None:
        progress, learner, rows = self.progress, self.learner, len(batch[TARGET])
        skipped = learner.skipped
        loss = float(learner.run(batch)["loss"])
        now = perf_counter()
        seconds = now - self._stepped_at if rows in self._compiled else None
        self._stepped_at = now
        self._compiled.add(rows)
        is_open = learner.settings.scaling is not None and learner.runs % self.recipe.accumulate != 0
        if _is_lost(loss, learner.loss_scale, skipped=is_open or learner.skipped > skipped):
            place = f"step {learner.runs}, epoch {progress.epoch + 1}"
            raise Diverged(f"the loss is {loss} at {place}: try a lower rate, a warm-up, or `clip`")
        progress.position += 1
        progress.seconds += seconds or 0.0
        if isfinite(loss):
            progress.loss += loss * rows
            progress.rows += rows
            self._meter.add(loss, rows, seconds)
        is_due = self._meter.due or progress.position == self.assembly.steps_per_epoch
        if is_due and self._meter.rows:
            self._tell_step()

    def _tell_step(self) -> None:
        run = self.learner.runs
        rate = self.learner.schedule((run - 1) // self.recipe.accumulate)
        values = {"step": run, "epoch": self.progress.epoch + 1, "rate": rate, **self._meter.take()}
        if self.learner.settings.scaling is not None:
            values.update(loss_scale=self.learner.loss_scale, skipped=self.learner.skipped)
        self._events.emit("step", **values, seconds=round(self.progress.seconds, 3))

    def _look(self) -> None:
        """Judge the weights that an epoch has come to."""
        progress, validation = self.progress, self._validation()
        values: dict[str, Any] = {"loss": progress.mean_loss}
        if validation:
            values.update(validation=validation, best=self._judge(validation))
        progress.next_epoch()
        if progress.epoch > self._began_in + 1:  # in the first epoch of a run the validation was compiled
            progress.seconds += perf_counter() - self._stepped_at
        self._stepped_at = perf_counter()
        place = {"epoch": progress.epoch, "step": self.learner.runs}
        self._events.emit("epoch", **place, **values, seconds=round(progress.seconds, 3))

    def _validation(self) -> dict[str, float]:
        assembly, rows = self.assembly, self.assembly.split.validation
        if not len(rows):
            return {}
        output = assembly.learner.model.outputs[0].name
        return scores(assembly.evaluation.run, assembly.examples, rows, self.recipe.batch, output, self._stop).metrics

    def _judge(self, validation: Mapping[str, float]) -> bool:
        """Whether this epoch is the best so far. Equal accuracies are told apart by the loss."""
        progress, stop = self.progress, self.recipe.stop
        gain = validation["accuracy"] if self.assembly.judge == "accuracy" else -validation["loss"]
        merit, best = (gain, -validation["loss"]), progress.best
        gained = best is None or gain > best.merit[0] + (stop.least_change if stop else 0.0)
        progress.waited = 0 if gained else progress.waited + 1
        progress.ended = stop is not None and progress.waited >= stop.patience
        if best is not None and merit <= best.merit:
            return False
        weights = {name: array.copy() for name, array in self.assembly.evaluation.weights.items()}
        progress.best = Best(progress.epoch + 1, merit, weights if self.recipe.keep == "best" else {})
        return True

    # -- what stays -----------------------------------------------------------------------------------------------

    @property
    def _checkpoint_due(self) -> bool:
        settings = self.recipe.checkpoint
        if settings.steps is not None and self.learner.runs - self._tried >= settings.steps:
            return True
        return settings.seconds is not None and perf_counter() - self._tried_at >= settings.seconds

    def _save(self) -> None:
        """Write a checkpoint, unless there is one of this very moment. Without room, go on with the one before."""
        present = (self.learner.runs, self.progress.epoch)
        self._tried, self._tried_at = self.learner.runs, perf_counter()
        if present == self._saved or not self.learner.runs:
            return
        try:
            checkpoint.save(self.folder, self.learner.runs, packed(self.progress, self.learner, self._belongs))
        except OSError as error:
            self._events.emit("log", message=f"checkpoint {self.learner.runs} could not be written: {error}")
            return
        self._saved = present
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
        trained = with_weights(self.assembly.model, weights)
        record = result.write_result(self.folder, self.assembly, trained, facts, self._stop)
        self._events.emit("done", metrics=record["metrics"], seconds=facts["seconds"])


def _is_lost(loss: float, scale: float, skipped: bool) -> bool:
    """Whether a training has no way on. Where float16 overflows the update is skipped, or will be once its last batch
    has come, which does no harm; but a loss that is no number at any scale, or a scale that falls without end, will not
    get better."""
    if isfinite(loss):
        return scale < _LEAST_SCALE
    return not skipped or scale < 1


def recipe_digest(recipe: Recipe) -> str:
    """A digest of what a recipe says: fields that later versions add, and it does not have, leave it as it is."""
    return hashlib.sha256(recipe.model_dump_json(exclude_defaults=True).encode()).hexdigest()
