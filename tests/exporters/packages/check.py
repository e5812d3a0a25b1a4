"""One model through ONNX Runtime and Lathe: do they agree, do rows share a batch, what falls back, how fast it is."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import core
from core.errors import LatheError
from core.ir.graph import Array
from core.runtime.session import Session
from tests.exporters.packages.table import Feeds, Model, models
from tests.onnx_runtime import plain_session

_SETTLE_S = 240.0
_TOLERANCE = 1e-3  # of the largest element
_ROUNDED = 2e-2  # where results are rounded to bytes inside: a step or two of those
_MARGIN = 4.0  # what moves by chance may move that much more
_LEAST = 1e-3  # of what a result is a part at least: probabilities that are all next to nothing tell nothing
_TIMED_S = 0.6  # for each of the two


@dataclass
class Report:
    """What came of one model. `result`: agrees, differs, refused (when compiling), fails (when running)."""

    name: str
    result: str = "agrees"
    detail: str = ""
    batchable: bool = False
    reason: str = ""  # why not batchable
    fallbacks: list[str] = field(default_factory=list)
    compile_s: float = 0.0  # until the first session is there
    first_s: float = 0.0  # the first runs of all shapes, with the code they wait for
    error: float = 0.0  # the largest, as a part of the largest element
    shaken: float = 0.0  # how far ONNX Runtime's own results move when the weights move by a rounding, likewise
    ratios: list[float] = field(default_factory=list)  # Lathe's time by ONNX Runtime's with optimizations, per feed
    warned: list[str] = field(default_factory=list)


def check(name: str, path: Path, model: Model) -> Report:
    """The report of the model at `path`. Both run on one thread; what they give is compared without ONNX Runtime's
    optimizations, and the times with them."""
    report, runs = Report(name), expected(path, [model.feeds(*size) for size in model.sizes])
    report.shaken = max(max(run.shaken) for run in runs)
    allowed = max(_ROUNDED if _has_bytes(path) else _TOLERANCE, _MARGIN * report.shaken)
    with tempfile.TemporaryDirectory() as cache, warnings.catch_warnings(record=True) as caught:
        start = time.perf_counter()
        try:
            session = core.compile(path, threads=1, cache_dir=cache)
        except LatheError as error:
            report.result, report.detail = "refused", str(error)
            return report
        report.compile_s = time.perf_counter() - start
        with session:
            _run(session, runs, allowed, report, path)
        report.warned = [str(warning.message).splitlines()[0] for warning in caught]
    return report


@dataclass(frozen=True)
class Expected:
    """What ONNX Runtime gives for some feeds, and how far each output moves when the weights move by a rounding."""

    feeds: Feeds
    outputs: list[Array]
    shaken: list[float]


def expected(path: Path, feeds: list[Feeds]) -> list[Expected]:
    """Where a model rounds to bytes inside, the least difference before may be a step of a byte after, and grow from
    there; ONNX Runtime's own results say how much."""
    first, *others = (plain_session(each) for each in (path, *(_shaken(path, seed) for seed in range(3))))
    found = []
    for given in feeds:
        outputs = [np.asarray(output) for output in first.run(None, given)]
        moved = [[_difference(np.asarray(a), b)[0] for a, b in zip(each.run(None, given), outputs, strict=True)]
                 for each in others]  # fmt: skip
        found.append(Expected(given, outputs, [max(column) for column in zip(*moved, strict=True)]))
    return found


def _has_bytes(path: Path) -> bool:
    return any("Quantize" in node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def _shaken(path: Path, seed: int) -> bytes:
    """The model with all of its weights rounded another way."""
    proto, random = onnx.load(path), np.random.default_rng(seed)
    for tensor in proto.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype in (np.float16, np.float32) and array.size > 8:  # fewer may be the scales of a Resize
            step = np.finfo(array.dtype).eps * random.choice([-0.5, 0.5], array.shape)
            moved = (array.astype(np.float64) * (1 + step)).astype(array.dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved, tensor.name))
    return bytes(proto.SerializeToString())


def _run(session: Session, runs: list[Expected], allowed: float, report: Report, path: Path) -> None:
    start = time.perf_counter()
    report.batchable = session.batching.batchable
    report.reason = "" if report.batchable else session.batching.reason
    try:
        _compare(session, runs, allowed, report)
        report.first_s = time.perf_counter() - start
        session.settle(_SETTLE_S)
        _compare(session, runs, allowed, report)
    except LatheError as error:
        report.result, report.detail = "fails", str(error)
        return
    report.fallbacks = sorted({line.strip() for line in session.explain().splitlines() if "FALLBACK" in line})
    fast = _optimized(path)
    for run in runs:
        ours, theirs = _times([partial(session.run, run.feeds), partial(fast.run, None, run.feeds)])
        report.ratios.append(round(ours / theirs, 2))


def _compare(session: Session, runs: list[Expected], allowed: float, report: Report) -> None:
    for run in runs:
        for (name, mine), other in zip(session.run(run.feeds).items(), run.outputs, strict=True):
            error, wrong = _difference(mine, other)
            report.error = max(report.error, error)
            if wrong or error > allowed:
                shapes = {key: list(value.shape) for key, value in run.feeds.items()}
                report.result = "differs"
                report.detail = f"output '{name}' for {shapes}: {wrong or f'{error:.1e} of the largest element'}"


def _difference(mine: Array, other: Array) -> tuple[float, str]:
    """The largest difference as a part of the largest element, and what is wrong besides."""
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return 0.0, f"{mine.dtype}{list(mine.shape)}, expected {other.dtype}{list(other.shape)}"
    if mine.dtype.kind != "f":
        count = int(np.count_nonzero(mine != other))
        return count / max(mine.size, 1), ""
    a, b = mine.astype(np.float64), other.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return 0.0, "infinite or no number at other places"
    at = np.isfinite(b)
    return float(
        np.abs(a - b, where=at, out=np.zeros_like(a)).max(initial=0) / max(np.abs(b[at]).max(initial=0), _LEAST)
    ), ""


def _optimized(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _times(calls: list[Callable[[], object]]) -> list[float]:
    """The median time of each call in seconds; they take turns."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + _TIMED_S * len(calls)
    while len(times[-1]) < 5 or (time.perf_counter() < end and len(times[-1]) < 500):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def main(name: str, path: str) -> None:
    """The report of one model of the table on standard output, as JSON: what a child process does."""
    by_name: Mapping[str, Model] = {model.member: model for _, model in models()}
    print(json.dumps(asdict(check(name, Path(path), by_name[name]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
