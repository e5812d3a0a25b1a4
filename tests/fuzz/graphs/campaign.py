"""Checks random graphs in child processes, each in one random configuration.

    python -m tests.fuzz.graphs.campaign --count 20000 --jobs 2
    python -m tests.fuzz.graphs.campaign --replay 1234

A seed always makes the same graph. Results are stored in a folder (`--state`), and the next call continues from there.
Each new kind of disagreement is minimised, and a script that shows it is written beside the results.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fuzz.graphs import coverage
from tests.fuzz.graphs.config import target_of
from tests.fuzz.graphs.state import State

ROOT = Path(__file__).resolve().parents[3]
WORKER = "tests.fuzz.graphs.worker"  # the module that children run
_PART = 100  # seeds for each child
_SILENCE = 120.0  # seconds without output of a child, after which it counts as hanging
_SCRIPTS = {"differs": 25, "rows": 12}  # scripts for each of these kinds of disagreement
_FEW_SCRIPTS = 2  # scripts for each other kind
_BEYOND = 1000  # seeds above this many times the number of cells aim at cells that other seeds leave empty
_OURS = "checks"  # the phase in which Lathe runs


def run(seeds: Sequence[int], jobs: int, state: State, seconds: float = float("inf"), scripts: bool = True) -> None:
    """Check the seeds that are not in the state yet, up to a time limit."""
    end = time.monotonic() + seconds
    guard = threading.Lock()
    left = [seed for seed in seeds if seed not in state.seeds]

    def watch(part: list[int]) -> None:
        while part and time.monotonic() < end:
            done = 0
            for result in child(part, state.folder, end):
                done += 1
                with guard:
                    state.add(result)
                if result["kind"] not in ("agrees", "excluded"):
                    print(f"seed {result['seed']}: {result['kind']}", flush=True)
            part = part[done:]

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(watch, _parts(left)))
        if scripts:
            list(pool.map(lambda seed: minimised(seed, state.folder), _worth_a_script(state)))


def _worth_a_script(state: State) -> list[int]:
    """A few seeds without a script for each kind of disagreement."""
    found = []
    for kind, seeds in state.findings.items():
        most = _SCRIPTS.get(kind.partition(":")[0], _FEW_SCRIPTS)
        found += [seed for seed in sorted(seeds)[:most] if not (state.folder / f"seed-{seed}.py").exists()]
    return found


def _parts(seeds: Sequence[int]) -> list[list[int]]:
    """The seeds in parts of one target each, because a process has one target."""
    parts: list[list[int]] = []
    for first in range(0, len(seeds), 8 * _PART):
        groups: dict[str, list[int]] = {}
        for seed in seeds[first : first + 8 * _PART]:
            groups.setdefault(target_of(seed), []).append(seed)
        parts += [group[at : at + _PART] for group in groups.values() for at in range(0, len(group), _PART)]
    return parts


def environment(seed: int, folder: Path) -> dict[str, str]:
    """The environment of a child that checks this seed."""
    target = target_of(seed)
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "LATHE_CACHE_DIR": str(folder / "cache"),
        "LATHE_CHECK_PLANS": "1", **({"LATHE_TARGET": target} if target else {}),
    }  # fmt: skip


def child(seeds: Sequence[int], folder: Path, end: float) -> Iterator[dict[str, Any]]:
    """The results of one child: for all seeds, or up to the seed that ended it."""
    command = [sys.executable, "-m", WORKER, *map(str, seeds)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(seeds[0], folder), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    words: list[str] = []
    reader = threading.Thread(target=lambda: words.extend(process.stderr or ()), daemon=True)
    reader.start()
    at: dict[str, Any] = {"seed": seeds[0], "phase": "begins"}
    timer = _Timer(process)
    with process:
        for line in process.stdout:
            timer.reset()
            at = json.loads(line)
            if "kind" in at:
                timer.stop()
                yield at
                timer.reset()
                if time.monotonic() > end:
                    timer.stop()
                    process.kill()
                    return
        timer.stop()
    reader.join()
    if process.returncode or timer.due_count:
        yield _ended(at, seeds, process.returncode, timer.due_count, words)


class _Timer:
    """Kills a child that writes nothing for `_SILENCE` seconds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self.due_count = process, False
        self._start()

    def _start(self) -> None:
        self._timer = threading.Timer(_SILENCE, self._fire)
        self._timer.daemon = True
        self._timer.start()

    def _fire(self) -> None:
        self.due_count = True
        self._process.kill()

    def reset(self) -> None:
        self._timer.cancel()
        self._start()

    def stop(self) -> None:
        self._timer.cancel()


def _ended(at: dict[str, Any], seeds: Sequence[int], code: int, silent: bool, words: Sequence[str]) -> dict[str, Any]:
    """The result of the seed that crashed a child."""
    if "kind" in at:  # between two seeds
        at = {"seed": seeds[min(seeds.index(at["seed"]) + 1, len(seeds) - 1)], "phase": "begins"}
    if silent:
        how = f"says nothing for {_SILENCE:.0f} s"
    elif code < 0:
        how = signal.Signals(-code).name
    else:
        how = words[-1].strip()[:200] if words else f"exit {code}"
    if at["phase"] in ("grows", "asks") and code < 0:
        return {"seed": at["seed"], "kind": "excluded", "text": f"ONNX Runtime ends the process ({how})"}
    return {"seed": at["seed"], "kind": f"ends ({at['phase']}): {how}", "text": "".join(words)[-2000:]}


def aimed_at_empty(state: State, times: int) -> list[int]:
    """Seeds above all others: `times` seeds for each cell of the coverage table that is empty without a reason."""
    cells = coverage.aims()
    missing = coverage.unexplained(coverage.counted(list(state.results())))
    first = _BEYOND * len(cells)
    return [first + cells.index(cell) + time * len(cells) for cell in missing for time in range(times)]


def minimised(seed: int, folder: Path) -> None:
    """Minimise the disagreement of a seed, and write a script for it to the folder."""
    command = [sys.executable, "-m", "tests.fuzz.graphs.minimise", str(seed), str(folder)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(seed, folder), capture_output=True, text=True, timeout=600
        )
        print(done.stdout + done.stderr[-2000:], flush=True)
    except subprocess.TimeoutExpired:
        print(f"seed {seed} could not be made small within 600 s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.replay is not None:
        arguments.state.mkdir(parents=True, exist_ok=True)
        minimised(arguments.replay, arguments.state)
        return 0
    state = State(arguments.state)
    if not arguments.coverage:
        seeds = range(arguments.first, arguments.first + arguments.count)
        run(seeds, arguments.jobs, state, arguments.seconds, not arguments.no_scripts)
        for each in range(1, arguments.fill + 1):
            run(aimed_at_empty(state, each), arguments.jobs, state, arguments.seconds, not arguments.no_scripts)
        print(state)
    table = coverage.page(list(state.results()))
    (arguments.state / "coverage.md").write_text(table)
    if arguments.coverage:
        print(table)
    return bool(state.findings)


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.graphs.campaign", description=summary)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this many seconds")
    parser.add_argument("--fill", type=int, default=0, help="then aim this many times at each cell that is still empty")
    parser.add_argument("--state", type=Path, default=ROOT / ".lathe" / "fuzz-graphs", help="the folder of results")
    parser.add_argument("--no-scripts", action="store_true", help="do not make disagreements small")
    parser.add_argument("--replay", type=int, help="make the disagreement of this seed small, and write its script")
    parser.add_argument("--coverage", action="store_true", help="only print the table of what was reached")
    return parser


if __name__ == "__main__":
    sys.exit(main())
