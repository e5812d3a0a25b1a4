"""Progress between two events of a training: mean loss and throughput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_INTERVAL = 0.25  # seconds of timed steps after which a `step` event is due


@dataclass
class StepMeter:
    """Sums since the last event. A step that included compilation counts for the loss, not for the throughput."""

    loss: float = 0.0
    rows: int = 0
    timed_rows: int = 0
    seconds: float = 0.0

    @property
    def due(self) -> bool:
        return self.seconds >= _INTERVAL

    def add(self, loss: float, rows: int, seconds: float | None) -> None:
        """Add a step: its mean loss over `rows` rows, and its duration, None if it included compilation."""
        self.loss += loss * rows
        self.rows += rows
        if seconds is not None:
            self.timed_rows += rows
            self.seconds += seconds

    def take(self) -> dict[str, Any]:
        """The means `loss` and `rows_per_second` since the last call. The throughput is None without timed steps."""
        rate = round(self.timed_rows / self.seconds, 1) if self.seconds else None
        means = {"loss": self.loss / max(self.rows, 1), "rows_per_second": rate}
        self.loss, self.rows, self.timed_rows, self.seconds = 0.0, 0, 0, 0.0
        return means
