"""Runs models as others export them, and says of each: does it agree, does it batch and pack, what has no kernel.

    python -m tests.exporters.corpus FOLDER [--only NAME ...] [--json FILE]

A model is FOLDER/<name>/model.onnx with feeds-<i>.npz and, where its framework gave them, outputs-<i>.npz. The oracle
is ONNX Runtime without optimizations, and the framework. Each model has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import core
from tests.onnx_runtime import plain_session

Feeds = Mapping[str, NDArray[Any]]
AGREES = 1e-3  # of the largest element


@dataclass
class Found:
    """What was found about a model. `independent`: whether rows alone give what they give together, in ONNX Runtime."""

    name: str
    verdict: str = ""
    worst: float = 0.0
    batchable: bool = False
    independent: bool | None = None
    packable: bool = False
    fallbacks: int = 0
    compile_seconds: float = 0.0
    fused_attention: int = 0
    reasons: list[str] = field(default_factory=list)


def examine(folder: Path) -> Found:
    """All that can be found without measuring times."""
    found, path = Found(folder.name), folder / "model.onnx"
    feeds = [_arrays(file) for file in sorted(folder.glob("feeds-*.npz"))]
    theirs = plain_session(str(path))
    names = [output.name for output in theirs.get_outputs()]
    try:
        expected = [dict(zip(names, theirs.run(None, feed), strict=True)) for feed in feeds]
    except Exception as error:
        found.verdict, found.reasons = "ORT no", [f"ONNX Runtime: {error}"]
        return found
    found.independent = _independent(lambda feed: theirs.run(None, feed), feeds)
    begin = time.perf_counter()
    try:
        session = core.compile(path, threads=1, tune="off", new_shapes="wait")
        results = [session.run(feed) for feed in feeds]
    except Exception as error:
        found.verdict, found.reasons = "refused", [f"{type(error).__name__}: {error}"]
        return found
    found.compile_seconds = time.perf_counter() - begin
    found.worst = max(map(_difference, results, expected))
    found.verdict = "agrees" if found.worst < AGREES else "differs"
    found.batchable = session.batching.batchable
    if not found.batchable:
        found.reasons.append(f"not batched: {session.batching.reason}")
    lines = session.explain().splitlines()
    fallbacks = [line.strip() for line in lines if "FALLBACK" in line]
    found.fallbacks = len(fallbacks)
    found.fused_attention = sum("FusedAttention" in line for line in lines)
    found.reasons += fallbacks[:5]
    with core.compile(path, threads=1, tune="off", packing=64) as packed:
        found.packable = packed.packing is not None and packed.packing.packable
        if packed.packing is not None and not packed.packing.packable:
            found.reasons.append(f"not packed: {packed.packing.reason}")
        if found.packable:
            found.worst = max(found.worst, *map(_difference, packed.run_packed(feeds), expected))
            found.verdict = "agrees" if found.worst < AGREES else "differs"
    return found


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def _difference(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """The largest difference, over the largest element of its output."""
    worst = 0.0
    for ours, other in zip(got.values(), wanted.values(), strict=True):
        if not isinstance(other, np.ndarray) or other.dtype.kind not in "fiub":
            worst = max(worst, 0.0 if str(ours) == str(other) else np.inf)
        elif ours.shape != other.shape or ours.dtype != other.dtype:
            return np.inf
        elif other.size:
            a, b = ours.astype(np.float64), other.astype(np.float64)
            if not np.array_equal(np.isnan(a), np.isnan(b)):
                return np.inf
            largest = max(np.abs(np.nan_to_num(b)).max(), 1e-6)
            worst = max(worst, float(np.abs(np.nan_to_num(a - b)).max() / largest))
    return worst


def _independent(run: Any, feeds: Sequence[Feeds]) -> bool | None:
    """Whether each row alone gives what it gives among the others; None where inputs have no rows in common."""
    feed = max(feeds, key=lambda each: next(iter(each.values())).shape[:1] or (0,))
    rows = {array.shape[0] if array.ndim else 0 for array in feed.values()}
    if len(rows) != 1 or rows.pop() < 2:
        return None
    together = run(feed)
    count = len(next(iter(feed.values())))
    alone = [run({name: array[[row]] for name, array in feed.items()}) for row in range(count)]
    for index, whole in enumerate(together):
        parts = [each[index] for each in alone]
        if any(not isinstance(part, np.ndarray) or part.shape[:1] != (1,) for part in parts):
            return False
        joined = np.concatenate(parts)
        if joined.shape != whole.shape or not np.allclose(joined, whole, 1e-3, 1e-4 * max(np.abs(whole).max(), 1e-6)):
            return False
    return True


def _examined(folder: Path, answers: Any) -> None:
    answers.put(examine(folder))


def examined(folder: Path, seconds: float = 600) -> Found:
    """The same in a child process: a model that crashes or hangs is one line of the table."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=_examined, args=(folder, answers))
    child.start()
    try:
        return _answer(child, answers, time.monotonic() + seconds) or Found(folder.name, "crashed or never ended")
    finally:
        child.kill()
        child.join()


def _answer(child: Any, answers: Any, deadline: float) -> Found | None:
    """What a child finds; None where it ends without an answer, or not in time."""
    while time.monotonic() < deadline:
        with suppress(queue.Empty):
            found: Found = answers.get(timeout=1)
            return found
        if not child.is_alive() and answers.empty():
            return None
    return None


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.exporters.corpus", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    folders = sorted(path.parent for path in options.folder.glob("*/model.onnx"))
    for folder in folders:
        if options.only is None or any(part in folder.name for part in options.only):
            found = examined(folder)
            marks = f"{'batched' if found.batchable else '-':8} {'packed' if found.packable else '-':7}"
            truth = {True: "rows independent", False: "rows mixed", None: "?"}[found.independent]
            print(
                f"{found.name:32} {found.verdict:8} {found.worst:8.1e} {marks} {truth:16} {found.fallbacks:3} on the "
                f"reference, {found.fused_attention} attention, {found.compile_seconds:5.1f} s",
                flush=True,
            )
            for reason in found.reasons:
                print(f"    {reason[:230]}", flush=True)
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
