"""`History`: the curves of a training, out of its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.train.events import Event, read

Curve = list[tuple[float, float]]  # steps, values


@dataclass
class History:
    """Values over the number of steps, by name: `train` has every report of loss, rate and throughput, `validation`
    has the metrics after each epoch, `epochs` how many steps each of them ended at."""

    started: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Curve] = field(default_factory=dict)
    validation: dict[str, Curve] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    seconds: float = 0.0  # in training
    resumed: int = 0  # times

    def add(self, event: Event) -> None:
        """Take the next event; what an earlier process did after its last checkpoint is forgotten."""
        values = event.values
        match event.kind:
            case "started":
                self.started = values
            case "resumed":
                self._forget(values["step"])
                self.resumed += 1
            case "step":
                for name in ("loss", "rate", "rows_per_second", "loss_scale", "skipped"):
                    if values.get(name) is not None:  # no throughput where nothing was timed, no scale of float32
                        self.train.setdefault(name, []).append((values["step"], values[name]))
                self.seconds = values["seconds"]
            case "epoch":
                self.epochs.append(values["step"])
                self.train.setdefault("epoch loss", []).append((values["step"], values["loss"]))
                for name, value in (values.get("validation") or {}).items():
                    self.validation.setdefault(name, []).append((values["step"], value))
                self.seconds = values["seconds"]

    def _forget(self, step: int) -> None:
        for curves in (self.train, self.validation):
            for name, curve in curves.items():
                curves[name] = [point for point in curve if point[0] <= step]
        self.epochs = [end for end in self.epochs if end <= step]


def history(events: Iterable[Event]) -> History:
    """The history that events tell."""
    found = History()
    for event in events:
        found.add(event)
    return found


def read_history(folder: Path) -> History:
    """The history of a training so far, from its folder."""
    return history(read(folder))
