"""Work that is not resumed: it has a result, or begins again. Evaluations and compressions are such work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.core.errors import LatheError
from lathe.core.train.run import events, result
from lathe.core.train.run.durable_files import write_folder
from lathe.core.train.run.scores import Stopped
from lathe.core.train.run.training_loop import Outcome
from lathe.core.train.run.work_folder import hold_lock


@dataclass(frozen=True)
class SingleResult:
    """The files of a result, by name, and the values of the event `done`."""

    files: Mapping[str, bytes]
    done: Mapping[str, Any]


def run_once(folder: Path, watch: events.Watcher | None, work: Callable[[events.EventLog], SingleResult]) -> Outcome:
    """Write the result of `work` unless the folder has one; DONE, or STOPPED if `work` raised Stopped.

    `work` gets the event log, whose events `watch` gets, too. Occupied if another process works here. Errors of `work`
    become an event, and are raised. OSError if the result cannot be written.
    """
    with hold_lock(folder), events.EventLog(folder, watch) as event_log:
        if (folder / result.FOLDER).is_dir():
            return Outcome.DONE
        try:
            made = work(event_log)
            write_folder(folder / result.FOLDER, made.files)
        except Stopped:
            return Outcome.STOPPED
        except (LatheError, OSError, MemoryError) as error:
            event_log.emit("failed", error=str(error) or type(error).__name__)
            raise
        event_log.emit("done", **made.done)
    return Outcome.DONE
