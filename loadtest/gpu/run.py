"""The run: measures cases one by one within a time limit, in processes that may crash, and records each at once.

    python -m loadtest.gpu --minutes 9 --out gpu-results.jsonl --cache gpu-cache.tar.xz

A part gets its share of the time, plus the time that earlier parts left. Within a part, cases without a record come
first, then those that were interrupted. Results of the same code are not measured again. Exit status: 0; 1 if a promise
was broken; 2 if there is no device, or the file is no results file.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lathe.core.codegen.jit import compiler_version
from lathe.core.errors import ArtifactError, LatheError
from lathe.core.runtime.artifact.store import Store
from lathe.core.runtime.device import portable_cache
from lathe.core.runtime.device.devices import canonical
from loadtest.gpu.case import Bench, Case, Options
from loadtest.gpu.parts import CASES, PARTS, SHARES
from loadtest.gpu.results import Results

_ENDING = 8.0  # seconds reserved for writing at the end
_TRIES = 4  # worker processes that a part may lose before it is abandoned
_SMALL = Options(
    batches=(1, 2), models=("small",), zoo=("mlp", "gru"), trained=("mlp",), tune="off", problems=1, slice=0.02,
    rounds=2, product=64, copy=1 << 16,
)  # fmt: skip

Line = dict[str, Any]
Start = Callable[[Sequence[Case], Bench], Iterator[Line | None]]  # a worker's lines; None: a second without one


@dataclass
class Clock:
    """The remaining time in seconds. Tests replace `now`."""

    end: float
    now: Callable[[], float] = time.monotonic

    @property
    def left(self) -> float:
        return self.end - self.now()


class Run:
    """Fills a results file. `start` starts a worker."""

    def __init__(self, results: Results, options: Options, store: Store, start: Start) -> None:
        self.results, self.options, self.store, self.start = results, options, store, start
        self.code = compiler_version()[:12]
        self.left_out = 0  # cache files that did not fit into the results file

    def run_parts(self, parts: Sequence[str], clock: Clock) -> None:
        """Measure the parts in order. A part's share is of the whole time; unused time goes to later parts.

        Stops after the part "probe" if that found no device.
        """
        begun, whole, share = clock.now(), clock.left, 0.0
        total = sum(SHARES[part] for part in parts)
        for part in parts:
            share += SHARES[part] / total
            self._part(part, Clock(begun + whole * share, clock.now))
            if part == "probe" and not self.has_device():
                return

    def has_device(self) -> bool:
        """True if the probe found the device."""
        record = self.results.cases(self.code).get("probe/device")
        return record is not None and record["ok"] is not False

    def _part(self, part: str, clock: Clock) -> None:
        todo, tries = self._todo(part), 0
        while todo and clock.left > 1 and tries < _TRIES:
            before = len(todo)
            todo = self._worker(todo, clock)
            tries += len(todo) > 0
            if len(todo) == before:
                break  # the worker ended before its first case
        self.keep_cache()

    def _todo(self, part: str) -> list[Case]:
        found = self.results.cases(self.code)
        cases = [case for case in CASES[part](self.options) if not _is_done(found.get(case.key))]
        return sorted(cases, key=lambda case: case.key in found)

    def _worker(self, todo: Sequence[Case], clock: Clock) -> list[Case]:
        """Run one worker until it ends, a case exceeds its limit, or time is up. Returns the remaining cases.

        A case that crashed the worker or exceeded its limit is recorded, and is not among them.
        """
        known = {key: record["figures"] for key, record in self.results.cases(self.code).items()}
        remaining, at, began = list(todo), None, clock.now()
        lines = self.start(todo, Bench(self.options, known))
        try:
            for line in lines:
                if line is not None and "begin" in line:
                    at, began = _take(remaining, line["begin"]), clock.now()
                    if clock.left <= 1:
                        return [at, *remaining]
                elif line is not None and "case" in line:
                    self._note(at or _take(remaining, line["case"]), line)
                    at = None
                elif line is not None:
                    self._lost(at, f"exit status {line['status']}", clock.now() - began)
                    return remaining
                if at is not None and clock.now() - began > at.limit:
                    self._lost(at, f"timeout after {at.limit:.0f} s", clock.now() - began)
                    return remaining
                if clock.left <= 0:
                    return [*([at] if at else []), *remaining]
        finally:
            lines.close()  # type: ignore[attr-defined]  # a generator, whose close kills the process
        return remaining

    def _note(self, case: Case, line: Line) -> None:
        facts = {name: line[name] for name in ("ok", "text", "figures", "seconds")}
        self.results.add("case", part=case.part, name=case.name, code=self.code, ended="", **facts)
        print(f"{_mark(line['ok']):8s}{case.part:10s}{line['text']}", flush=True)

    def _lost(self, case: Case | None, why: str, seconds: float) -> None:
        """Record a case that crashed its process or exceeded its limit."""
        if case is None:
            return
        facts = {"ok": False, "text": f"{case.name}: {why}", "figures": {}, "seconds": round(seconds, 3), "ended": why}
        self.results.add("case", part=case.part, name=case.name, code=self.code, **facts)
        print(f"{'LOST':8s}{case.part:10s}{case.name}: {why}", flush=True)

    def keep_cache(self) -> None:
        """Append new kernels and tuning results to the results file, for the next run. An OSError is ignored."""
        with suppress(OSError):
            self.left_out = sum(not self.results.add_cache_file(*each) for each in portable_cache.contents(self.store))


def _take(cases: list[Case], key: str) -> Case:
    """Remove the case with this key from `cases` and return it."""
    return cases.pop(next(index for index, case in enumerate(cases) if case.key == key))


def _is_done(record: Any) -> bool:
    return record is not None and not record["ended"]


def _mark(ok: bool | None) -> str:
    return {True: "ok", False: "BROKEN", None: "-"}[ok]


def in_process(cache: Path, errors: Path) -> Start:
    """A start function for worker processes with this cache folder. Their stderr goes to the file `errors`."""
    environment = {
        **os.environ, "LATHE_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip

    def start(cases: Sequence[Case], bench: Bench) -> Iterator[Line | None]:
        given = json.dumps({**bench.to_json(), "cases": [asdict(case) for case in cases]})
        command = [sys.executable, "-m", "loadtest.gpu.worker"]
        pipe = subprocess.PIPE
        with (
            errors.open("ab") as log,
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=environment) as child,
        ):
            try:
                assert child.stdin is not None and child.stdout is not None
                child.stdin.write(given.encode())
                child.stdin.close()
                yield from _lines(child.stdout.fileno())
                yield {"status": child.wait()}
            finally:
                child.kill()

    return start


def _lines(descriptor: int) -> Iterator[Line | None]:
    """Complete lines of JSON as they arrive; None for every second without one."""
    waiting = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(1.0):
                yield None
                continue
            data = os.read(descriptor, 1 << 16)
            if not data:
                return
            *lines, waiting = (waiting + data).split(b"\n")
            yield from map(json.loads, lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results.jsonl"), help="results file to write or to continue"
    )
    parser.add_argument("--cache", type=Path, help="file of kernels compiled ahead of time, see --prepare")
    parser.add_argument("--device", default="cuda", help='cuda, cuda:1; "simulated" tests the run itself')
    parser.add_argument("--only", type=names, default=PARTS, help=f"parts, comma-separated: {', '.join(PARTS)}")
    parser.add_argument("--batches", type=lambda text: tuple(map(int, names(text))))
    parser.add_argument("--precisions", type=names)
    parser.add_argument("--models", type=names, help="models to time, comma-separated")
    parser.add_argument("--tune", help="seconds of tuning per model and precision, or off")
    parser.add_argument("--small", action="store_true", help="use small models and few cases, to test the run itself")
    parser.add_argument("--show", action="store_true", help="print the results without the cache, and measure nothing")
    parser.add_argument("--prepare", metavar="TARGET", help="compile a run's kernels for a GPU (sm_90) into --cache")
    return parser.parse_args(arguments)


def options_of(chosen: argparse.Namespace) -> Options:
    """The options of the command line. ValueError for an unknown part."""
    base = replace(_SMALL if chosen.small else Options(), device=chosen.device)
    given = {name: getattr(chosen, name) for name in ("batches", "precisions", "models", "tune")}
    unknown = set(chosen.only) - set(PARTS)
    if unknown:
        raise ValueError(f"--only {', '.join(sorted(unknown))}: expected {', '.join(PARTS)}")
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def main(arguments: Sequence[str] | None = None, start: Start | None = None) -> int:
    """Run the command. `start` starts a worker, by default a process. Returns the exit status."""
    began = time.monotonic()
    chosen = parse(arguments)
    try:
        options = options_of(chosen)
        if chosen.prepare:
            return _prepare(chosen, options)
        results = Results(chosen.out)
        if chosen.show:
            print(results.without_cache(), end="")
            return 0
        return _measure(chosen, options, results, Clock(began + chosen.minutes * 60 - _ENDING), start)
    except (ValueError, LatheError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _measure(chosen: argparse.Namespace, options: Options, results: Results, clock: Clock, start: Start | None) -> int:
    canonical(options.device)
    with tempfile.TemporaryDirectory(prefix="lathe-gpu-") as folder:
        store = Store(Path(folder))
        if chosen.cache is not None:
            portable_cache.read_tar(chosen.cache, store)
        for name, data in results.carried():
            with suppress(ArtifactError):  # it has an older format
                portable_cache.add(store, name, data)
        errors = chosen.out.with_name(f"{chosen.out.name}.log")
        run = Run(results, options, store, start or in_process(Path(folder), errors))
        found = results.cases(run.code)
        results.add(
            "run", code=run.code, options=asdict(options), minutes=chosen.minutes, known=len(found),
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )  # fmt: skip
        run.run_parts([part for part in PARTS if part in chosen.only], clock)
        return _conclude(run, chosen)


def _conclude(run: Run, chosen: argparse.Namespace) -> int:
    """Print a line for each part, and return the exit status."""
    found = run.results.cases(run.code)
    print()
    for part in (part for part in PARTS if part in chosen.only):
        keys = [case.key for case in CASES[part](run.options)]
        ended = [found[key] for key in keys if _is_done(found.get(key))]
        broken = sum(each["ok"] is False for each in ended)
        lost = sum(key in found for key in keys) - len(ended)
        left = len(keys) - len(ended) - lost
        print(f"{part:10s} {len(ended)} of {len(keys)} cases, {broken} broken, {lost} lost, {left} not reached")
    if run.left_out:
        print(f"{run.left_out} files of the cache had no room in {chosen.out}")
    if "probe" in chosen.only and not run.has_device():
        return 2
    return 1 if any(record["ok"] is False for record in found.values()) else 0


def _prepare(chosen: argparse.Namespace, options: Options) -> int:
    from loadtest.gpu.ahead_of_time import prepare

    if chosen.cache is None:
        raise ValueError("--prepare needs --cache, the file to write")
    started = time.monotonic()
    count = prepare(chosen.prepare, replace(options, device=chosen.prepare), chosen.cache)
    size = chosen.cache.stat().st_size / 2**20
    print(f"{chosen.cache}: {count} kernels, {size:.1f} MiB, in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
