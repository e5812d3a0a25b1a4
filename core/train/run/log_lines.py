"""The log of a job's process: its events as lines of text on standard error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lathe.core.train.run.events import Event
from lathe.core.train.run.terminal_view import TrainingProgress, trial_line


class LogLines:
    """Writes a line for each event that a reader of the log wants to know; a full disk loses lines, nothing else."""

    def __init__(self) -> None:
        self._progress = TrainingProgress()

    def __call__(self, event: Event) -> None:
        """Write the line of an event, if it has one."""
        self._progress.see(event.kind, event.values)
        if line := self._line(event.kind, event.values):
            with suppress(OSError):
                print(line, file=sys.stderr, flush=True)

    def _line(self, kind: str, values: Mapping[str, Any]) -> str:
        match kind:
            case "started" if "trials" in values:
                return (
                    f"search of {values['trials']} trials, {values['parallel']} at once; {values['ended']} have ended"
                )
            case "started":
                rows = values["rows"]["train"]
                return f"training on {rows} rows: {values['epochs']} epochs of {values['steps_per_epoch']} steps"
            case "resumed":
                return f"continues after step {values['step']}, in epoch {values['epoch']}"
            case "epoch":
                return self._progress.epoch_line
            case "trial":
                return trial_line(values)
            case "stage":
                return f"{values['stage']}: {values['ended']} of {values['total']}"
            case "log":
                return str(values["message"])
            case "failed":
                return f"failed: {values['error']}"
            case "done":
                numbers = {name: value for name, value in values["metrics"].items() if isinstance(value, int | float)}
                return "done: " + "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        return ""
