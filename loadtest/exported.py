"""Models of a folder beside ONNX Runtime: steady runs, and the first run of each new shape.

    python -m loadtest exported FOLDER [--only NAME ...] [--json FILE]

A model is FOLDER/<name>/model.onnx with feeds-<i>.npz, as tests/exporters/make_transformers.py writes them. Each model
has a process of its own. Both engines run on one thread and take turns in short slices; "ahead" is the median over
rounds of (ONNX Runtime's time / Lathe's time) within the round: above 1 Lathe is faster. "first" is Lathe's time for
the first run of a shape, over ONNX Runtime's for its first run; the session has settled on the shapes before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Feeds = dict[str, NDArray[Any]]

SHORT_MS = 0.05  # shorter runs are timed by the thousand: one call is not much longer than reading the clock
SETTLE_S = 240.0


@dataclass(frozen=True)
class Row:
    """One model on one file of feeds. `first` is None for the first file, whose run has the session's first compile."""

    model: str
    batch: int
    ours_ms: float
    theirs_ms: float
    ahead: float
    first: float | None
    fallbacks: int


def call_ms(run: Callable[[], Any], seconds: float) -> float:
    """The median time of a call in milliseconds, from calls for `seconds`, at least one."""
    begin = time.perf_counter()
    run()
    calls = 1000 if (time.perf_counter() - begin) * 1e3 < SHORT_MS else 1
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times) * 1e3


def measure(folder: Path, rounds: int, seconds: float) -> list[Row]:
    """A row for each file of feeds."""
    import onnxruntime as ort

    import core

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    path = folder / "model.onnx"
    theirs = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    rows = []
    with core.compile(path, threads=1) as ours:
        for index, file in enumerate(sorted(folder.glob("feeds-*.npz"))):
            with np.load(file) as stored:
                feeds: Feeds = {name: stored[name] for name in stored.files}
            pair = (lambda feeds=feeds: ours.run(feeds), lambda feeds=feeds: theirs.run(None, feeds))
            first = first_ratio(*pair)
            ours.settle(SETTLE_S)
            measured = [tuple(call_ms(run, seconds) for run in pair) for _ in range(rounds)]
            mine, other = (statistics.median(each) for each in zip(*measured, strict=True))
            ahead = statistics.median(b / a for a, b in measured)
            fallbacks = ours.explain().count("FALLBACK")
            batch = next((len(array) for array in feeds.values() if array.ndim), 1)
            rows.append(Row(folder.name, batch, mine, other, ahead, first if index else None, fallbacks))
    return rows


def first_ratio(ours: Callable[[], Any], theirs: Callable[[], Any]) -> float:
    """The time of one run of ours over that of theirs."""
    times = []
    for run in (theirs, ours):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times[1] / times[0]


def measured(folder: Path, rounds: int, seconds: float) -> list[Row] | str:
    """The rows, or why there are none; in a child process, so that a model that crashes is one line of the table."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, folder, rounds, seconds).result()
        except BrokenProcessPool:
            return "crashed"
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def summary(rows: Sequence[Row]) -> str:
    """What the rows are together, those of batches 1 and 8."""
    ratios = [row.ahead for row in rows if row.batch in (1, 8)]
    if not ratios:
        return "nothing to compare"
    slower = sum(ratio < 0.95 for ratio in ratios)
    firsts = [row.first for row in rows if row.first is not None]
    late = sum(first > 2 for first in firsts)
    return (
        f"ahead by x{statistics.geometric_mean(ratios):.2f} in the geometric mean of {len(ratios)} cases, worst "
        f"x{min(ratios):.2f}, {slower} below x0.95; {late} of {len(firsts)} first runs take more than twice ONNX "
        "Runtime's time"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest exported", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", help="models whose names have one of these parts")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slice", type=float, default=0.05, help="seconds per engine and round")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    rows: list[Row] = []
    for folder in sorted(path.parent for path in options.folder.glob("*/model.onnx")):
        if options.only and not any(part in folder.name for part in options.only):
            continue
        found = measured(folder, options.rounds, options.slice)
        if isinstance(found, str):
            print(f"{folder.name:32} {found}", flush=True)
            continue
        for row in found:
            first = "" if row.first is None else f"first x{row.first:.2f}"
            print(
                f"{row.model:32} batch {row.batch} {row.ours_ms:9.3f} ms, ONNX Runtime {row.theirs_ms:9.3f} ms, "
                f"ahead x{row.ahead:.2f} {row.fallbacks or ''} {first}",
                flush=True,
            )
        rows += found
    print(summary(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
