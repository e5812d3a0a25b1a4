"""The progress of a training: counters that checkpoints store, and the best weights so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lathe.core.ir.graph import Array
from lathe.core.train.run.checkpoint import Checkpoint
from lathe.core.train.training_step.train_step import TrainStep

_STATE, _BEST = "state/", "best/"


@dataclass
class Best:
    """The best epoch so far: its number from 1, its merit (higher is better), and its weights.

    `merit` is (accuracy or -loss, -loss). `weights` is empty if the recipe keeps the last epoch.
    """

    epoch: int
    merit: tuple[float, float]
    weights: dict[str, Array]


@dataclass
class Progress:
    """The counters of a training between two steps."""

    epoch: int = 0  # completed epochs
    position: int = 0  # completed batches of the current epoch
    loss: float = 0.0  # of the current epoch: sum of loss times rows
    rows: int = 0  # of the current epoch
    waited: int = 0  # epochs since the last improvement
    seconds: float = 0.0  # of training, without compilation
    ended: bool = False  # by early stopping
    best: Best | None = field(default=None, compare=False)

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.rows, 1)

    def next_epoch(self) -> None:
        self.epoch += 1
        self.position, self.loss, self.rows = 0, 0.0, 0


def checkpoint_of(progress: Progress, learner: TrainStep, belongs: Mapping[str, str]) -> Checkpoint:
    """A checkpoint with copies of the training's state. `belongs` holds the digests of its recipe and data."""
    best = progress.best
    counters = {
        **asdict(replace(progress, best=None)),
        "best": {"epoch": best.epoch, "merit": best.merit} if best else None,
    }
    tensors = {_STATE + name: array for name, array in learner.state().items()}
    tensors.update({_BEST + name: array for name, array in (best.weights if best else {}).items()})
    return Checkpoint({"belongs": dict(belongs), "runs": learner.runs, "progress": counters}, tensors)


def restore(checkpoint: Checkpoint, learner: TrainStep) -> Progress:
    """Load a checkpoint's state into the learner; returns the counters and the best weights.

    LatheError if the checkpoint lacks a state of the learner, or has it in another shape or dtype.
    """
    record: Mapping[str, Any] = checkpoint.record
    learner.load_state(_without_prefix(_STATE, checkpoint.tensors), record["runs"])
    counters = dict(record["progress"])
    best = counters.pop("best")
    best_epoch = Best(best["epoch"], tuple(best["merit"]), _without_prefix(_BEST, checkpoint.tensors)) if best else None
    return Progress(**counters, best=best_epoch)


def _without_prefix(prefix: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {name[len(prefix) :]: array for name, array in tensors.items() if name.startswith(prefix)}
