"""Compares models of a folder with ONNX Runtime: steady runs, and the first run of each new shape.

    python -m loadtest exported FOLDER [--only NAME ...] [--figures steady|first] [--clock processor] [--json FILE]

A model is FOLDER/<name>/model.onnx with feeds-<i>.npz, and lengths-<i>.npz for its first runs, as
tests/exporters/make_transformers.py writes them. Each model runs in a process of its own, with an empty cache. Both
engines run on one thread.

Steady runs: all code is compiled. The engines take turns in short slices; "ahead" is the median over rounds of (ONNX
Runtime's time / Lathe's time) within the round: above 1 Lathe is faster.

First runs: the session has served one shape and its compilation has ended. Then each engine runs one new shape for the
first time: "first" is Lathe's time over ONNX Runtime's. Before the next shape, the measurement waits until Lathe's
background compilation has ended.

Exit status 1 if results differ or a model has no figures; with --limits also if a steady run at batch 1 or 8 has less
than 0.95 of ONNX Runtime's speed, or a first run takes more than twice ONNX Runtime's time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from loadtest.clock import CLOCKS, add_clock, call_ms
from loadtest.onnx_runtime_peer import largest_error, onnx_runtime

if TYPE_CHECKING:
    from lathe import Session

Feeds = dict[str, NDArray[Any]]

BATCHES = (1, 8)
MIN_STEADY_RATIO = 0.95  # limit of steady runs: share of ONNX Runtime's speed
MAX_FIRST_RATIO = 2.0  # limit of first runs: times ONNX Runtime's first run
TOLERANCE = 1e-3  # of the largest element
SETTLE_S = 240.0
OFTEN = 20  # untimed runs: more than `_FREQUENT_RUNS` (16) in core/runtime/session/executables.py


@dataclass(frozen=True)
class Steady:
    """The steady runs of one shape. `error` is the result of `largest_error`."""

    model: str
    feeds: str
    batch: int
    ours_ms: float
    theirs_ms: float
    ahead: float
    fallbacks: int
    error: float

    def __str__(self) -> str:
        times = f"{self.ours_ms:9.3f} ms, ONNX Runtime {self.theirs_ms:9.3f} ms, ahead x{self.ahead:.2f}"
        without = f", {self.fallbacks} nodes without a kernel" if self.fallbacks else ""
        return f"{self.model:32} batch {self.batch} {times}{without}{_wrong(self.error)}"


@dataclass(frozen=True)
class First:
    """The first run of a shape. `waited_ms` is the wall time of Lathe's run less its processor time."""

    model: str
    feeds: str
    shape: str
    ours_ms: float
    theirs_ms: float
    waited_ms: float
    error: float

    @property
    def ratio(self) -> float:
        return self.ours_ms / self.theirs_ms

    def __str__(self) -> str:
        times = f"{self.ours_ms:9.3f} ms, ONNX Runtime {self.theirs_ms:9.3f} ms, first x{self.ratio:.2f}"
        waited = f", waited {self.waited_ms:.0f} ms" if self.waited_ms > 1 else ""
        return f"{self.model:32} {self.shape:16} {times}{waited}{_wrong(self.error)}"


def _wrong(error: float) -> str:
    return f", DIFFERS by {error:.0e}" if error > TOLERANCE else ""


@dataclass
class Figures:
    """The measured rows. `unsettled`: models still compiling after SETTLE_S. `failed`: models without figures."""

    steady: list[Steady] = field(default_factory=list)
    first: list[First] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        self.steady += other.steady
        self.first += other.first
        self.unsettled += other.unsettled

    def lines(self) -> list[str]:
        return [
            *map(str, self.steady),
            *map(str, self.first),
            *(f"{each:32} still compiles" for each in self.unsettled),
        ]

    @property
    def wrong(self) -> list[Steady | First]:
        both: list[Steady | First] = [*self.steady, *self.first]
        return [row for row in both if row.error > TOLERANCE]

    @property
    def ratios(self) -> list[float]:
        """ONNX Runtime's time over Lathe's, of the steady runs at batch 1 and 8."""
        return [row.ahead for row in self.steady if row.batch in BATCHES]

    @property
    def missed(self) -> int:
        """The number of ratios that miss their limits."""
        return sum(ratio < MIN_STEADY_RATIO for ratio in self.ratios) + sum(
            row.ratio > MAX_FIRST_RATIO for row in self.first
        )


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement. `figures`: steady, first or both."""

    figures: str = "both"
    batches: tuple[int, ...] = BATCHES
    rounds: int = 7
    seconds: float = 0.05
    clock: str = "wall"
    tune: Literal["off", "default", "full"] = "default"


def measure(folder: Path, how: Settings) -> Figures:
    """The figures of one model."""
    found = Figures()
    if how.figures != "first":
        found.add(_in_session(folder, how, _steady))
    if how.figures != "steady":
        found.add(_in_session(folder, how, _first))
    return found


def _in_session(folder: Path, how: Settings, measured: Callable[[Path, Session, Any, Settings], Figures]) -> Figures:
    """Measure with a session of each engine. Lathe's cache is empty, so that every shape is new."""
    import lathe

    path = folder / "model.onnx"
    theirs = onnx_runtime(path)
    with (
        tempfile.TemporaryDirectory() as cache,
        lathe.compile(path, threads=1, tune=how.tune, cache_dir=cache) as ours,
    ):
        return measured(folder, ours, theirs, how)


def _steady(folder: Path, ours: Session, theirs: Any, how: Settings) -> Figures:
    found = Figures()
    files = [(file, read(file)) for file in sorted(folder.glob("feeds-*.npz"))]
    counted = [each for each in files if batch_of(each[1]) in how.batches] or files
    for file, feeds in counted:
        pair = (partial(ours.run, feeds), partial(theirs.run, None, feeds))
        for _ in range(OFTEN):
            ours.run(feeds)
        if not ours.settle(SETTLE_S):
            found.unsettled.append(folder.name)
        error = largest_error(ours.run(feeds), theirs.run(None, feeds))
        rounds = [[call_ms(run, how.seconds, CLOCKS[how.clock]) for run in pair] for _ in range(how.rounds)]
        mine, other = (statistics.median(each) for each in zip(*rounds, strict=True))
        ahead = statistics.median(b / a for a, b in rounds)
        fallbacks = ours.explain().count("FALLBACK")
        found.steady.append(Steady(folder.name, file.stem, batch_of(feeds), mine, other, ahead, fallbacks, error))
    return found


def _first(folder: Path, ours: Session, theirs: Any, how: Settings) -> Figures:
    served, *others = sorted(folder.glob("feeds-*.npz"))
    found = Figures()
    ours.run(read(served))
    theirs.run(None, read(served))
    for place, file in enumerate(sorted(folder.glob("lengths-*.npz")) or others):
        feeds = read(file)
        if not ours.settle(SETTLE_S):
            found.unsettled.append(folder.name)
        results: dict[bool, Any] = {}
        times: dict[bool, tuple[float, float]] = {}
        for is_ours in (True, False) if place % 2 else (False, True):  # the second finds the feeds in the cache
            run = partial(ours.run, feeds) if is_ours else partial(theirs.run, None, feeds)
            begin = time.perf_counter(), time.thread_time()
            results[is_ours] = run()
            times[is_ours] = time.perf_counter() - begin[0], time.thread_time() - begin[1]
        mine, other = (times[is_ours][how.clock == "processor"] * 1e3 for is_ours in (True, False))
        waited = (times[True][0] - times[True][1]) * 1e3
        error = largest_error(results[True], results[False])
        found.first.append(First(folder.name, file.stem, shape_of(feeds), mine, other, waited, error))
    return found


def read(file: Path) -> Feeds:
    with np.load(file) as stored:
        return {name: stored[name] for name in stored.files}


def batch_of(feeds: Feeds) -> int:
    """The number of rows."""
    return next((len(array) for array in feeds.values() if array.ndim), 1)


def shape_of(feeds: Feeds) -> str:
    """The shape of the largest input, such as 8x128."""
    return "x".join(map(str, max(feeds.values(), key=lambda array: array.size).shape)) if feeds else ""


def measure_in_child(folder: Path, how: Settings) -> Figures | str:
    """The figures of a model, or the reason why there are none.

    A child process measures, so that a crash costs one row.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, folder, how).result()
        except BrokenProcessPool:
            return "crashed"
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def summary(rows: Figures) -> list[str]:
    """The summary lines; of steady runs only those at batch 1 and 8."""
    lines = []
    if ratios := rows.ratios:
        slower = sum(ratio < MIN_STEADY_RATIO for ratio in ratios)
        lines.append(
            f"ahead by x{statistics.geometric_mean(ratios):.2f} in the geometric mean of {len(ratios)} cases, worst "
            f"x{min(ratios):.2f}, {slower} below x{MIN_STEADY_RATIO}"
        )
    if rows.first:
        firsts = [row.ratio for row in rows.first]
        slow = sum(first > MAX_FIRST_RATIO for first in firsts)
        lines.append(
            f"first runs take x{statistics.median(firsts):.2f} of ONNX Runtime's time in the median, at most "
            f"x{max(firsts):.2f}; {slow} of {len(firsts)} take more than x{MAX_FIRST_RATIO:g}"
        )
    if rows.wrong:
        lines.append(f"{len(rows.wrong)} results differ")
    if rows.failed:
        lines.append(f"{len(rows.failed)} models have no figures")
    return lines or ["nothing to compare"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest exported", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", help="only models whose names contain one of these")
    parser.add_argument("--figures", choices=("steady", "first", "both"), default="both", help="which runs to time")
    parser.add_argument(
        "--batches",
        type=lambda text: tuple(int(each) for each in text.split(",")),
        default=BATCHES,
        help="batch sizes of steady runs; all, if a model has feeds of none of them",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slice", type=float, default=0.05, help="seconds per engine and round")
    parser.add_argument("--tune", choices=("off", "default", "full"), default="default", help="as in lathe.compile")
    add_clock(parser)
    parser.add_argument("--limits", action="store_true", help="exit with 1 if a ratio misses its limit")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    how = Settings(options.figures, options.batches, options.rounds, options.slice, options.clock, options.tune)
    rows = Figures()
    for folder in sorted(path.parent for path in options.folder.glob("*/model.onnx")):
        if options.only and not any(part in folder.name for part in options.only):
            continue
        found = measure_in_child(folder, how)
        if isinstance(found, str):
            print(f"{folder.name:32} {found}", flush=True)
            rows.failed.append(folder.name)
            continue
        print("\n".join(found.lines()), flush=True)
        rows.add(found)
    print("\n".join(summary(rows)))
    if options.json:
        options.json.write_text(json.dumps(asdict(rows), indent=1) + "\n")
    return 1 if rows.wrong or rows.failed or (options.limits and rows.missed) else 0


if __name__ == "__main__":
    sys.exit(main())
