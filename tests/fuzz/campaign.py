"""Checks many mutated models in child processes.

    python -m tests.fuzz.campaign --cases 50000 --jobs 2 --seed 0
    python -m tests.fuzz.campaign --replay 0:1234 --save smallest.onnx

Every bug is reported with the seed that reproduces it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import corpus, minimise

_ROOT = Path(__file__).resolve().parents[2]
WORKER = "tests.fuzz.worker"  # the module that children run
_SILENCE = 60.0  # seconds without output of a child, after which it counts as hanging


@dataclass(frozen=True)
class Bug:
    """A case that was neither refused nor correct."""

    seed: str
    text: str


@dataclass
class Findings:
    """The number of cases by outcome, and the bugs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    bugs: list[Bug] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        lines = [f"{sum(self.outcomes.values())} cases: {counts}; {len(self.bugs)} bugs"]
        return "\n".join([*lines, *(f"  {bug.seed} {bug.text}" for bug in self.bugs)])


def run(cases: int, jobs: int, seed: int = 0) -> Findings:
    """Check cases 0 to `cases` of a seed in `jobs` processes at a time."""
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        path = Path(folder) / "corpus"
        corpus.save(path, corpus.models())
        for part in pool.map(lambda job: _watch(path, seed, range(job, cases, jobs)), range(jobs)):
            findings.outcomes += part.outcomes
            findings.bugs += part.bugs
    return findings


def _watch(path: Path, seed: int, cases: range) -> Findings:
    """Run children over `cases`; after a case that ended a child, a new child continues."""
    findings, left = Findings(), cases
    while left:
        done, ending = _child(path, seed, left, findings)
        left = left[done:]
        if ending and left:
            findings.outcomes["bug"] += 1
            findings.bugs.append(Bug(f"{seed}:{left[0]}", ending))
            left = left[1:]
    return findings


def _child(path: Path, seed: int, cases: range, findings: Findings) -> tuple[int, str]:
    """The number of cases that a child finished, and how it ended if it failed."""
    arguments = [str(path), str(seed), str(cases.start), str(cases.stop), str(cases.step)]
    cache = str(path.with_name("cache"))
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OPENBLAS_NUM_THREADS": "1", "LATHE_CACHE_DIR": cache}
    command = [sys.executable, "-m", WORKER, *arguments]
    child = subprocess.Popen(
        command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stderr is not None
    done = 0
    with child:
        watchdog = _Watchdog(child)
        for line in child.stdout:
            watchdog.reset()
            kind, index, *rest = line.split(maxsplit=2)
            if kind != "start":
                done += 1
                _note(findings, kind, f"{seed}:{index}", rest[0].strip() if rest else "")
        watchdog.stop()
        words = child.stderr.read().strip().splitlines()
    return done, _ending(child.returncode, watchdog.due_count, words)


def _note(findings: Findings, kind: str, seed: str, text: str) -> None:
    findings.outcomes[text if kind == "done" else "bug"] += 1
    if kind == "bug":
        findings.bugs.append(Bug(seed, text))


def _ending(code: int, silent: bool, words: Sequence[str]) -> str:
    if silent:
        return f"hangs: no word for {_SILENCE} s"
    if code == -signal.SIGPROF:
        return "hangs: takes more processor time than a case may"
    if code < 0:
        return f"crashes: {signal.Signals(-code).name}"
    return f"ends the process: {words[-1] if words else code}" if code else ""


class _Watchdog:
    """Kills a child that writes nothing for `_SILENCE` seconds."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.due_count = False
        self._timer = self._started()

    def _started(self) -> threading.Timer:
        timer = threading.Timer(_SILENCE, self._kill)
        timer.daemon = True
        timer.start()
        return timer

    def _kill(self) -> None:
        self.due_count = True
        self._child.kill()

    def reset(self) -> None:
        self._timer.cancel()
        self._timer = self._started()

    def stop(self) -> None:
        self._timer.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.replay:
        data = minimise.smallest(arguments.replay, corpus.models())
        print(minimise.report(data))
        if arguments.save:
            arguments.save.write_bytes(data)
        return 0
    findings = run(arguments.cases, arguments.jobs, arguments.seed)
    print(findings)
    return bool(findings.bugs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.campaign", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", help="a seed that a report names: show the smallest model with the same bug")
    parser.add_argument("--save", type=Path, help="where to write the replayed model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
