"""One trial of a sweep: a training in a process and a folder of its own, and what became of it.

trials/<number>/trial.json     the values tried, and how it ended
trials/<number>/...            what a training writes
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

from core.runtime import child_python
from core.train import checkpoint, events, result
from core.train.assembly import Means
from core.train.durable import write_file
from core.train.run import DONE, OUT_OF_SPACE, STOPPED
from core.train.work import RECIPE

FOLDER, RECORD = "trials", "trial.json"

State: TypeAlias = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class Record:
    """What is kept of a trial. `merit` is what the best epoch is worth: the higher the better."""

    number: int
    values: Mapping[str, Any]
    state: State = "running"
    merits: Mapping[int, float] | None = None  # by epoch, of a trial that has ended
    error: str = ""

    @property
    def merit(self) -> float | None:
        return max(self.merits.values()) if self.merits else None

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / RECORD, json.dumps(asdict(self)).encode())


def records(folder: Path) -> Iterator[Record]:
    """The trials of a sweep's folder, in order."""
    folders = (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ()
    for path in sorted(folders, key=lambda path: int(path.name)):
        if (path / RECORD).exists():  # else it was killed before it began
            found = json.loads((path / RECORD).read_bytes())
            merits = found.pop("merits")
            yield Record(**found, merits={int(epoch): merit for epoch, merit in merits.items()} if merits else None)


class Trial:
    """A trial at work."""

    def __init__(self, folder: Path, record: Record, recipe: bytes, dataset: Path, means: Means) -> None:
        self.folder, self.record = folder, record
        self.metric = ""  # what merits are, once the training has said so
        self.merits: dict[int, float] = {}
        self._read = -1  # bytes of events that were looked at
        record.write(folder)
        write_file(folder / RECIPE, recipe)
        with (folder / "log.txt").open("ab") as log:
            command = child_python.command("core.train.run", *_arguments(folder, dataset, means))
            environment = child_python.environment()
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    @property
    def status(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.poll()

    def look(self) -> dict[int, float]:
        """Read what has happened; returns the merits of epochs that are new."""
        path = self.folder / events.FILE
        size = path.stat().st_size if path.exists() else 0
        if size == self._read:
            return {}
        self._read, before = size, dict(self.merits)
        for event in events.read(self.folder):
            if event.kind == "started":
                self.metric = event.values["judge"]
            elif event.kind == "epoch" and (found := event.values.get("validation")):
                self.merits[event.values["epoch"]] = found[self.metric] * (-1 if self.metric == "loss" else 1)
        return {epoch: merit for epoch, merit in self.merits.items() if epoch not in before}

    def ask_to_stop(self) -> None:
        """Have it write a checkpoint and end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it; what it has not written is lost."""
        self._process.kill()
        self._process.wait()

    def wait(self) -> None:
        self._process.wait()

    def end(self, state: State | None = None) -> Record:
        """Write down how it ended, as its exit status says or else as `state`."""
        self.look()
        found, error = (state, "") if state else self._outcome()
        self.record = replace(self.record, state=found, merits=self.merits, error=error)
        self.record.write(self.folder)
        shutil.rmtree(self.folder / checkpoint.FOLDER, ignore_errors=True)
        return self.record

    def _outcome(self) -> tuple[State, str]:
        if self.status == DONE and (self.folder / result.FOLDER).is_dir():
            return "complete", ""
        told = [event.values["error"] for event in events.read(self.folder) if event.kind == "failed"]
        return "failed", told[-1] if told else f"ended with exit status {self.status}"

    @property
    def was_stopped(self) -> bool:
        """Whether it ended as it was asked to. A process that was asked before it listened ends by the signal."""
        return self.status in (STOPPED, -signal.SIGTERM)

    @property
    def found_no_room(self) -> bool:
        return self.status == OUT_OF_SPACE


def _arguments(folder: Path, dataset: Path, means: Means) -> Iterator[str]:
    yield from (str(folder), "--dataset", str(dataset), "--threads", str(means.threads), "--owner", str(os.getpid()))
    if means.keep_free:
        yield from ("--keep-free", str(means.keep_free))
    if means.cache_dir is not None:
        yield from ("--cache", os.fspath(means.cache_dir))
