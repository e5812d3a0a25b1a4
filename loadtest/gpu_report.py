"""What a measurement of a GPU says, and parts of it that fail alone."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Run = Callable[[str, Path], int]  # a part by its name, which leaves its tables there; gives the exit status


@dataclass
class Report:
    """Lines for the file, a summary for the end, and promises that were broken."""

    out: Path
    summary: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    _latest: dict[str, str] = field(default_factory=dict)  # by what it is about, what may still be replaced

    def line(self, text: str) -> None:
        print(text, flush=True)
        with self.out.open("a") as file:
            file.write(text + "\n")

    def conclude(self, text: str, holds: bool | None, about: str = "") -> None:
        """`holds` is None where nothing was promised, or nothing measured. The latest conclusion `about` something
        takes the place of those before. Each is kept at once: this process may be ended before the next."""
        self._drop(self._latest.pop(about, None))
        mark = {True: "ok", False: "BROKEN", None: "-"}[holds]
        self.summary.append(f"{mark:8s}{text}")
        if holds is False:
            self.broken.append(text)
        if about:
            self._latest[about] = text
        self.save()

    def _drop(self, text: str | None) -> None:
        if text is not None:
            self.summary = [line for line in self.summary if line[8:] != text]
            self.broken = [each for each in self.broken if each != text]

    def attempt(self, what: str, work: Callable[[], None]) -> None:
        """Do it; what goes wrong is a broken promise, and what comes behind it goes on."""
        try:
            work()
        except Exception as error:
            self.line(traceback.format_exc())
            self.conclude(f"{what}: {type(error).__name__}: {str(error)[:200]}", False)

    def try_peer(self, what: str, run: Callable[[], object]) -> bool:
        """Whether an engine that Lathe is compared with runs: what it or its compiler raises costs its own figure."""
        try:
            run()
        except Exception as error:
            self.conclude(f"{what}: {type(error).__name__}: {str(error)[:200]}", None)
            return False
        return True

    def save(self) -> None:
        """The conclusions beside the tables, for who started this process."""
        summary_of(self.out).write_text(json.dumps({"summary": self.summary, "broken": self.broken}))

    def take(self, part: str, path: Path, status: int) -> None:
        """The tables and conclusions that a part has left, and whether it came to its end."""
        if path.exists():
            with self.out.open("a") as file:
                file.write(path.read_text())
        try:
            found = json.loads(summary_of(path).read_text())
        except (OSError, ValueError):
            self.conclude(f"{part}: ended with status {status} and no conclusions", False)
            return
        self.summary += found["summary"]
        self.broken += found["broken"]
        if status not in (0, 1):
            self.conclude(f"{part}: ended with status {status} before its end", False)


def summary_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


@dataclass(frozen=True)
class InProcesses:
    """Runs parts of a script in processes of their own: after a fault of the GPU, all that follows in a process fails.
    One that takes longer than `limit` seconds, or as many times that as `parts` says, is ended."""

    module: str
    arguments: Sequence[str]
    limit: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, part: str, out: Path) -> int:
        command = [sys.executable, "-m", self.module, *self.arguments, "--only", part, "--out", str(out)]
        try:
            return subprocess.run(command, timeout=self.limit * self.parts.get(part, 1)).returncode
        except subprocess.TimeoutExpired:
            return 124
