"""`History`: the curves of a training, built from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lathe.core.train.run.events import Event, read

Curve = list[tuple[float, float]]  # points (step, value)


@dataclass
class History:
    """Curves over the number of steps, by name.

    `train` has `loss`, `rate`, `rows_per_second`, and in float16 `loss_scale` and `skipped`, of the `step` events, and
    `epoch loss`, the mean loss of each epoch. `validation` has the metrics after each epoch. `epochs` has the number of
    steps at the end of each epoch.
    """

    started: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Curve] = field(default_factory=dict)
    validation: dict[str, Curve] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    seconds: float = 0.0  # of training
    resumed: int = 0  # how often the training was resumed

    def add(self, event: Event) -> None:
        """Add the next event. `resumed` removes the points after the checkpoint from which the training resumed."""
        values = event.values
        match event.kind:
            case "started":
                self.started = values
            case "resumed":
                self._remove_after(values["step"])
                self.resumed += 1
            case "step":
                for name in ("loss", "rate", "rows_per_second", "loss_scale", "skipped"):
                    if values.get(name) is not None:  # no throughput without timed steps, no loss scale in float32
                        self.train.setdefault(name, []).append((values["step"], values[name]))
                self.seconds = values["seconds"]
            case "epoch":
                self.epochs.append(values["step"])
                self.train.setdefault("epoch loss", []).append((values["step"], values["loss"]))
                for name, value in (values.get("validation") or {}).items():
                    self.validation.setdefault(name, []).append((values["step"], value))
                self.seconds = values["seconds"]

    def _remove_after(self, step: int) -> None:
        for curves in (self.train, self.validation):
            for name, curve in curves.items():
                curves[name] = [point for point in curve if point[0] <= step]
        self.epochs = [end for end in self.epochs if end <= step]


def history(events: Iterable[Event]) -> History:
    """The curves of a training, built from its events in order."""
    result = History()
    for event in events:
        result.add(event)
    return result


def read_history(folder: Path) -> History:
    """The history of a training so far, from its folder; an empty one without events."""
    return history(read(folder))
