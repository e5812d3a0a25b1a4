"""How far a training has come: counters that a checkpoint keeps, and the best weights so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from core.ir.graph import Array
from core.train.checkpoint import Checkpoint
from core.train.stepping import TrainStep

_STATE, _BEST = "state/", "best/"


@dataclass
class Best:
    """The epoch whose weights are kept: its number from 1, what it was judged by (more is better), its weights."""

    epoch: int
    merit: tuple[float, float]
    weights: dict[str, Array]


@dataclass
class Progress:
    """Where a training stands between two steps."""

    epoch: int = 0  # epochs that are done
    position: int = 0  # batches of the present epoch that are done
    loss: float = 0.0  # of the present epoch: losses times rows
    rows: int = 0  # of the present epoch
    waited: int = 0  # epochs since the best one
    seconds: float = 0.0  # in training so far
    ended: bool = False  # before the last epoch
    best: Best | None = field(default=None, compare=False)

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.rows, 1)

    def next_epoch(self) -> None:
        self.epoch += 1
        self.position, self.loss, self.rows = 0, 0.0, 0


def packed(progress: Progress, learner: TrainStep, belongs: Mapping[str, str]) -> Checkpoint:
    """A checkpoint of the whole training. `belongs`: digests of what it is a training of."""
    best = progress.best
    counters = {
        **asdict(replace(progress, best=None)),
        "best": {"epoch": best.epoch, "merit": best.merit} if best else None,
    }
    tensors = {_STATE + name: array for name, array in learner.state().items()}
    tensors.update({_BEST + name: array for name, array in (best.weights if best else {}).items()})
    return Checkpoint({"belongs": dict(belongs), "runs": learner.runs, "progress": counters}, tensors)


def unpacked(checkpoint: Checkpoint, learner: TrainStep) -> Progress:
    """Put the learner into a checkpoint's state; returns the counters. LatheError when it does not fit."""
    record: Mapping[str, Any] = checkpoint.record
    learner.load_state(_below(_STATE, checkpoint.tensors), record["runs"])
    counters = dict(record["progress"])
    best = counters.pop("best")
    kept = Best(best["epoch"], tuple(best["merit"]), _below(_BEST, checkpoint.tensors)) if best else None
    return Progress(**counters, best=kept)


def _below(prefix: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {name[len(prefix) :]: array for name, array in tensors.items() if name.startswith(prefix)}
