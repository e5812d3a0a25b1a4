"""Evaluates a model: agreement with ONNX Runtime, batching, nodes without a kernel, speed.

`evaluate` makes the evaluation; `evaluate_in_child` makes it in a child process, so that a model that crashes or
hangs costs one line of a table.
"""

from __future__ import annotations

import multiprocessing
import queue
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

import lathe
from lathe.core.errors import LatheError
from lathe.core.runtime.session.session import Session
from tests.onnx_runtime import REFUSALS, plain_session

Feeds = Mapping[str, NDArray[Any]]

_FREQUENT = 20  # runs of each shape before it is timed: a shape that is frequent gets code of its own
_SETTLE_S = 240.0
_TOLERANCE = 1e-3  # of the largest element
_ROUNDED = 2e-2  # for models that round to bytes inside: one or two steps of those
_MARGIN = 4.0  # a factor on the effect of rounding errors in the weights, which varies by chance
_LEAST = 1e-3  # smallest scale of a result: outputs near zero prove nothing
_TIMED_S = 0.6  # seconds for each engine
_PACKED = 64  # tokens of a run


@dataclass
class Evaluation:
    """The evaluation of one model.

    `result`: agrees, differs, refused (when compiling), fails (when running), "ORT no" (ONNX Runtime refuses it), and
    from `evaluate_in_child` also crashes.
    """

    name: str
    result: str = "agrees"
    detail: str = ""
    batchable: bool = False
    reason: str = ""  # why not batchable
    independent: bool | None = None  # whether single rows and batches give equal results in ONNX Runtime
    packable: bool = False
    unpacked: str = ""  # why not packable
    fallbacks: list[str] = field(default_factory=list)
    attention: int = 0  # nodes of fused attention
    compile_s: float = 0.0  # until the first session exists
    first_s: float = 0.0  # the first runs of all shapes, compilation included
    error: float = 0.0  # the largest, relative to the largest element
    shaken: float = 0.0  # change of ONNX Runtime's own results if weights change by a rounding error, likewise relative
    ratios: list[float] = field(default_factory=list)  # Lathe's time / ONNX Runtime's with optimizations, per feed
    warned: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Remarks besides the figures, one line each."""
        alone = f"not batched: {self.reason}" if self.reason else ""
        apart = f"not packed: {self.unpacked}" if self.unpacked else ""
        return [note for note in (self.detail, alone, apart, *self.fallbacks[:6], *self.warned) if note]


def evaluate(name: str, path: Path, feeds: Sequence[Feeds], timed: bool = False, packed: bool = False) -> Evaluation:
    """Evaluate the model at `path`. Both engines run on one thread.

    Outputs are compared without ONNX Runtime's optimizations. `timed`: Lathe tunes as for its users, and times are
    taken with those optimizations; otherwise nothing is measured. `packed`: sequences are packed as well, and compared.
    """
    verdict = Evaluation(name)
    try:
        runs = expected(path, feeds)
    except REFUSALS as error:
        verdict.result, verdict.detail = "ORT no", f"ONNX Runtime: {error}"
        return verdict
    verdict.independent = _independent(partial(plain_session(path).run, None), feeds)
    verdict.shaken = max((max(run.shaken, default=0.0) for run in runs), default=0.0)
    with tempfile.TemporaryDirectory() as cache, warnings.catch_warnings(record=True) as caught:
        _Trial(verdict, path, runs, cache, timed).all(packed)
        verdict.warned = [str(warning.message).splitlines()[0] for warning in caught]
    return verdict


@dataclass(frozen=True)
class Expected:
    """ONNX Runtime's outputs for some feeds, and how far each moves when the weights change by a rounding error."""

    feeds: Feeds
    outputs: list[Any]
    shaken: list[float]


def expected(path: Path, feeds: Sequence[Feeds]) -> list[Expected]:
    """ONNX Runtime's outputs for each feed, with their changes under rounding errors in the weights.

    If a model rounds to bytes inside, a tiny difference before can become a whole step of a byte, and grow."""
    first, *others = (plain_session(each) for each in (path, *(_shaken(path, seed) for seed in range(3))))
    found = []
    for given in feeds:
        outputs = first.run(None, dict(given))
        moved = [[difference(a, b)[0] for a, b in zip(each.run(None, dict(given)), outputs, strict=True)]
                 for each in others]  # fmt: skip
        found.append(Expected(given, outputs, [max(column) for column in zip(*moved, strict=True)]))
    return found


def _shaken(path: Path, seed: int) -> bytes:
    """The model with a rounding error added to all weights."""
    proto, random = onnx.load(path), np.random.default_rng(seed)
    for tensor in proto.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype in (np.float16, np.float32) and array.size > 8:  # fewer may be the scales of a Resize
            step = np.finfo(array.dtype).eps * random.choice([-0.5, 0.5], array.shape)
            moved = (array.astype(np.float64) * (1 + step)).astype(array.dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved, tensor.name))
    return bytes(proto.SerializeToString())


def difference(mine: Any, other: Any) -> tuple[float, str]:
    """The largest difference over the largest element, and a description of other errors.

    For integers: the share of elements that differ. Sequences and maps are compared element by element. Text must be
    equal.
    """
    if isinstance(other, dict) and isinstance(mine, dict) and mine.keys() == other.keys():
        mine, other = [mine[key] for key in other], list(other.values())
        if other and all(isinstance(number, float) for number in other):
            mine, other = np.array(mine), np.array(other)
    if isinstance(other, list) and isinstance(mine, list) and len(mine) == len(other):
        found = [difference(a, b) for a, b in zip(mine, other, strict=True)]
        return max((error for error, _ in found), default=0.0), next((text for _, text in found if text), "")
    if not isinstance(other, np.ndarray) or other.dtype.kind not in "fiub":
        same = str(np.asarray(mine).tolist()) == str(np.asarray(other).tolist())
        return 0.0, "" if same else "another text, map or sequence"
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return 0.0, f"{mine.dtype}{list(mine.shape)}, expected {other.dtype}{list(other.shape)}"
    if other.dtype.kind != "f":
        return int(np.count_nonzero(mine != other)) / max(mine.size, 1), ""
    a, b = mine.astype(np.float64), other.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return 0.0, "infinite or no number at other places"
    at = np.isfinite(b)
    return float(np.abs(a[at] - b[at]).max(initial=0) / max(np.abs(b[at]).max(initial=0), _LEAST)), ""


@dataclass
class _Trial:
    """The evaluation of one model in progress."""

    verdict: Evaluation
    path: Path
    runs: list[Expected]
    cache: str
    timed: bool

    def all(self, packed: bool) -> None:
        start, found = time.perf_counter(), self.verdict
        try:
            session = self._compiled()
        except LatheError as error:
            found.result, found.detail = "refused", str(error)
            return
        found.compile_s = time.perf_counter() - start
        with session:
            try:
                self._run(session)
            except LatheError as error:
                found.result, found.detail = "fails", str(error)
                return
            if self.timed:
                self._time(session)
        if packed:
            self._pack()

    def _compiled(self, packing: int | None = None) -> Session:
        make = partial(lathe.compile, self.path, threads=1, cache_dir=self.cache, packing=packing)
        return make() if self.timed else make(tune="off", new_shapes="wait")

    def _run(self, session: Session) -> None:
        start, found = time.perf_counter(), self.verdict
        found.batchable = session.batching.batchable
        found.reason = "" if found.batchable else session.batching.reason
        self._compare([session.run(run.feeds) for run in self.runs])
        found.first_s = time.perf_counter() - start
        session.settle(_SETTLE_S)  # runs before the stand-in is there do not count
        for run in self.runs * _FREQUENT:
            session.run(run.feeds)
        if not session.settle(_SETTLE_S):
            found.warned.append("not all code is there yet")
        self._compare([session.run(run.feeds) for run in self.runs])
        lines = session.explain().splitlines()
        found.fallbacks = sorted({line.strip() for line in lines if "FALLBACK" in line})
        found.attention = sum("FusedAttention" in line for line in lines)

    def _compare(self, results: Sequence[Mapping[str, Any]]) -> None:
        found = self.verdict
        allowed = max(_ROUNDED if _has_bytes(self.path) else _TOLERANCE, _MARGIN * found.shaken)
        for run, result in zip(self.runs, results, strict=True):
            for (name, mine), other in zip(result.items(), run.outputs, strict=True):
                error, wrong = difference(mine, other)
                found.error = max(found.error, error)
                if wrong or error > allowed:
                    shapes = {key: list(value.shape) for key, value in run.feeds.items()}
                    wrong = wrong or f"{error:.1e} of the largest element"
                    found.result, found.detail = "differs", f"output '{name}' for {shapes}: {wrong}"

    def _time(self, session: Session) -> None:
        fast = _optimized(self.path)
        for run in self.runs:
            ours, theirs = _times([partial(session.run, run.feeds), partial(fast.run, None, dict(run.feeds))])
            self.verdict.ratios.append(round(ours / theirs, 2))

    def _pack(self) -> None:
        with self._compiled(_PACKED) as session:
            packing = session.packing
            self.verdict.packable = packing is not None and packing.packable
            if packing is not None and packing.packable:
                self._compare(session.run_packed([run.feeds for run in self.runs]))
            elif packing is not None:
                self.verdict.unpacked = packing.reason


def _has_bytes(path: Path) -> bool:
    return any("Quantize" in node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def _independent(run: Callable[[Any], Any], feeds: Sequence[Feeds]) -> bool | None:
    """Whether each row alone gives the results that it gives in the batch.

    None if inputs differ in their number of rows, have one row, or ONNX Runtime refuses single rows."""
    feed = max(feeds, key=lambda each: next(iter(each.values())).shape[:1] or (0,), default={})
    rows = {array.shape[0] if array.ndim else 0 for array in feed.values()}
    if len(rows) != 1 or (count := rows.pop()) < 2:
        return None
    try:
        together = run(dict(feed))
        alone = [run({name: array[[row]] for name, array in feed.items()}) for row in range(count)]
    except REFUSALS:
        return None
    for index, whole in enumerate(together):
        parts = [each[index] for each in alone]
        if any(not isinstance(part, np.ndarray) or part.shape[:1] != (1,) for part in parts):
            return False
        error, wrong = difference(np.concatenate(parts), whole)
        if wrong or error > _TOLERANCE:
            return False
    return True


def _optimized(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _times(calls: list[Callable[[], object]]) -> list[float]:
    """The median seconds of each call; the calls take turns."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + _TIMED_S * len(calls)
    while len(times[-1]) < 5 or (time.perf_counter() < end and len(times[-1]) < 500):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def evaluate_in_child(name: str, path: Path, feeds: Sequence[Feeds], seconds: float, **options: bool) -> Evaluation:
    """Run `evaluate` in a child process with a time limit in seconds."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=_answer, args=(answers, name, path, [dict(each) for each in feeds], options))
    child.start()
    try:
        verdict = _awaited(child, answers, time.monotonic() + seconds)
        why = f"it ended with {child.exitcode}" if child.exitcode is not None else f"no end after {seconds:.0f} s"
        return verdict or Evaluation(name, "crashes", why)
    finally:
        child.kill()
        child.join()


def _answer(answers: Any, name: str, path: Path, feeds: list[Feeds], options: Mapping[str, bool]) -> None:
    answers.put(evaluate(name, path, feeds, **options))


def _awaited(child: Any, answers: Any, deadline: float) -> Evaluation | None:
    """The child's result; None if it ends without one, or not in time."""
    while (left := deadline - time.monotonic()) > 0:
        with suppress(queue.Empty):
            found: Evaluation = answers.get(timeout=min(left, 1))
            return found
        if not child.is_alive() and answers.empty():
            return None
    return None
