"""One trial of a search: a training in a child process with a folder of its own, and a record of its outcome.

trials/<number>/trial.json     the record: values, state, merits, error
trials/<number>/...            the work folder of the training
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lathe.core.errors import LatheError
from lathe.core.exit_status import ExitStatus
from lathe.core.runtime.host import child_python
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import checkpoint, events, result
from lathe.core.train.run.durable_files import write_file
from lathe.core.train.run.work_folder import RECIPE

FOLDER, RECORD = "trials", "trial.json"

State: TypeAlias = Literal["running", "complete", "pruned", "failed", "skipped", "repeated"]
UNTRAINED: tuple[State, ...] = ("skipped", "repeated")


@dataclass(frozen=True)
class TrialRecord:
    """The persistent record of a trial.

    `merit` is the validation metric of the trial's best epoch, the accuracy or -loss, so higher is better. It is None
    before the trial has ended, and without validated epochs. A trial is skipped, and never trained, if the time of
    a run exceeds the search's latency limit. It is repeated, and not trained again, if an earlier trial has
    the same model and the same settings in effect.
    """

    number: int
    values: Mapping[str, Any]
    state: State = "running"
    merits: Mapping[int, float] | None = None  # by epoch, once the trial has ended
    error: str = ""
    predicted_ms: float | None = None  # of a run, in a search with a latency limit
    measured_ms: float | None = None  # without training, if the prediction alone could not tell
    digest: str = ""  # of the model and the settings in effect, if the search compares them

    @property
    def merit(self) -> float | None:
        return max(self.merits.values()) if self.merits else None

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / RECORD, json.dumps(asdict(self)).encode())


def trial_records(folder: Path) -> Iterator[TrialRecord]:
    """The records of the trials in a search's folder, by number."""
    folders = (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ()
    for path in sorted(folders, key=lambda path: int(path.name)):
        if (record := read_record(path)) is not None:
            yield record


def read_record(folder: Path) -> TrialRecord | None:
    """The record in the folder of a trial; None if the search was killed before the trial began."""
    if not (folder / RECORD).exists():
        return None
    record = json.loads((folder / RECORD).read_bytes())
    merits = record.pop("merits")
    return TrialRecord(**record, merits={int(epoch): merit for epoch, merit in merits.items()} if merits else None)


class Trial:
    """A running trial in a child process, which creating the object starts; killed when the creating thread ends."""

    def __init__(self, folder: Path, record: TrialRecord, recipe: bytes, dataset: Path, resources: Resources) -> None:
        self.folder, self.record = folder, record
        self.metric = ""  # the metric of merits, known from the event `started`
        self.merits: dict[int, float] = {}
        self._read = -1  # size of the event log when it was last read
        record.write(folder)
        write_file(folder / RECIPE, recipe)
        with (folder / "log.txt").open("ab") as log:
            command = child_python.command(
                "lathe.core.train.run.training_process", *_arguments(folder, dataset, resources)
            )
            environment = child_python.environment()
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    @property
    def status(self) -> int | None:
        """The exit status of the process, negative if a signal ended it; None while it runs."""
        return self._process.poll()

    def look(self) -> dict[int, float]:
        """Read the new events; returns the merits of epochs that have ended since the last call, by epoch."""
        path = self.folder / events.FILE
        size = path.stat().st_size if path.exists() else 0
        if size == self._read:
            return {}
        self._read, before = size, dict(self.merits)
        for event in events.read(self.folder):
            if event.kind == "started":
                self.metric = event.values["judge"]
            elif event.kind == "epoch" and (metrics := event.values.get("validation")):
                self.merits[event.values["epoch"]] = metrics[self.metric] * (-1 if self.metric == "loss" else 1)
        return {epoch: merit for epoch, merit in self.merits.items() if epoch not in before}

    def request_stop(self) -> None:
        """Send SIGTERM: the training writes a checkpoint and ends."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and wait for its end; progress since the last checkpoint is lost."""
        self._process.kill()
        self._process.wait()

    def wait(self) -> None:
        self._process.wait()

    def end(self, state: State | None = None) -> TrialRecord:
        """Write the final record of an ended process, and return it; `state` is by default that of the exit status.

        Removes the checkpoints of the trial.
        """
        self.look()
        final_state, error = (state, "") if state else self._outcome()
        self.record = replace(self.record, state=final_state, merits=self.merits, error=error)
        self.record.write(self.folder)
        shutil.rmtree(self.folder / checkpoint.FOLDER, ignore_errors=True)
        return self.record

    def _outcome(self) -> tuple[State, str]:
        if self.status == ExitStatus.DONE and (self.folder / result.FOLDER).is_dir():
            return "complete", ""
        errors = [event.values["error"] for event in events.read(self.folder) if event.kind == "failed"]
        return "failed", errors[-1] if errors else f"ended with exit status {self.status}"

    def check_end(self) -> None:
        """Check why an ended process ended: OSError if the disk was full, LatheError if SIGTERM ended it."""
        if self.is_out_of_space:
            raise OSError(28, "no space left on device")
        if self.was_stopped:
            raise LatheError(f"trial {self.record.number} was stopped from outside the search")

    @property
    def was_stopped(self) -> bool:
        """Whether the trial ended because of SIGTERM: by its handler, or by the signal before there was a handler."""
        return self.status in (ExitStatus.STOPPED, -signal.SIGTERM)

    @property
    def is_out_of_space(self) -> bool:
        return self.status == ExitStatus.OUT_OF_SPACE


def _arguments(folder: Path, dataset: Path, resources: Resources) -> Iterator[str]:
    yield from (str(folder), "--dataset", str(dataset), "--owner", str(os.getpid()))
    yield from ("--threads", str(resources.threads))
    if resources.keep_free:
        yield from ("--keep-free", str(resources.keep_free))
    if resources.cache_dir is not None:
        yield from ("--cache", os.fspath(resources.cache_dir))
