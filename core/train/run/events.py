"""The event log of a training, evaluation or search: lines of JSON in `events.jsonl` of its folder, appended only.

    started     rows {train, validation, test}, epochs, steps_per_epoch, batch, parameters, judge, data, seed, version
    resumed     step, epoch: earlier lines about later steps are void
    step        step, epoch, loss (mean since the last `step` event), rate, rows_per_second (or null), seconds; in
                float16 also loss_scale, skipped (updates so far that were skipped because gradients overflowed)
    epoch       epoch, step, loss (mean of its rows), seconds; with validation rows also validation {metric: value} and
                best (whether this epoch is the best so far)
    checkpoint  step
    log         message
    trial       trial, state, values, merit, error, ended, trials, best, seconds: of a sweep, whose `started` has
                trials, ended, parallel
    stage       stage (calibrating, comparing or timing), ended, total (batches or turns): of a compression
    done        metrics, seconds
    failed      error

Every line also has `kind` and `time` (seconds since 1970). Steps and epochs count from 1. In a training, `seconds` is
its time without compilation, summed over all processes that worked on it. In a search it is the time since the present
process began the search, in an evaluation or a compression the time of the work.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

FILE = "events.jsonl"

Kind: TypeAlias = Literal[
    "started", "resumed", "step", "epoch", "checkpoint", "log", "trial", "stage", "done", "failed"
]


@dataclass(frozen=True)
class Event:
    kind: Kind
    values: dict[str, Any]
    time: float = field(default_factory=time.time)

    def line(self) -> bytes:
        return json.dumps({"kind": self.kind, "time": round(self.time, 3), **self.values}).encode() + b"\n"


Watcher: TypeAlias = Callable[[Event], None]


def read(folder: Path) -> Iterator[Event]:
    """The events in a folder so far, in order; an incomplete last line is left out. No events if there is no file."""
    path = folder / FILE
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n")[:-1]:
        values = json.loads(line)
        yield Event(values.pop("kind"), values, values.pop("time"))


class EventLog:
    """The event log of a folder, open for appending, and an optional watcher that gets every event.

    Opening the log removes an incomplete last line. If the disk is full, lines are lost and the training continues.
    Each line is written completely or not at all. `close` closes the file.
    """

    def __init__(self, folder: Path, watch: Watcher | None = None) -> None:
        self._watch = watch
        self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = self._truncate()

    def emit(self, kind: Kind, **values: Any) -> None:
        event = Event(kind, values)
        line = event.line()
        try:
            written = os.write(self._file, line)
        except OSError:
            written = 0
        if written == len(line):
            self._size += written
        else:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
        if self._watch is not None:
            self._watch(event)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _truncate(self) -> int:
        """Truncate an incomplete last line that a crash has left; returns the size of the file."""
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        size = content.rfind(b"\n") + 1
        if size < len(content):
            os.ftruncate(self._file, size)
        return size
