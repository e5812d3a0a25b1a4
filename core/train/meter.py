"""What is told of a training between two of its events: mean loss and throughput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_INTERVAL = 0.25  # seconds between two events of steps


@dataclass
class Meter:
    """Sums since the last event. A step in which something was compiled takes part in the loss only."""

    loss: float = 0.0
    rows: int = 0
    timed_rows: int = 0
    seconds: float = 0.0

    @property
    def due(self) -> bool:
        return self.seconds >= _INTERVAL

    def add(self, loss: float, rows: int, seconds: float | None) -> None:
        """A step: mean loss over its rows, and what it took from the end of the one before."""
        self.loss += loss * rows
        self.rows += rows
        if seconds is not None:
            self.timed_rows += rows
            self.seconds += seconds

    def take(self) -> dict[str, Any]:
        """The means, and begin anew. The throughput is None where nothing was timed."""
        rate = round(self.timed_rows / self.seconds, 1) if self.seconds else None
        found = {"loss": self.loss / max(self.rows, 1), "rows_per_second": rate}
        self.loss, self.rows, self.timed_rows, self.seconds = 0.0, 0, 0, 0.0
        return found
