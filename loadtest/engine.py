"""Compares the engine with ONNX Runtime and OpenVINO on the same models: `python -m loadtest.engine` (`make bench`).

Engines take turns in short slices, round after round, so that a change of the machine's speed affects all of them
alike. "ahead" is the median over rounds of (best peer's time / Lathe's time) within the round: above 1 Lathe is faster.
An engine whose output differs from ONNX Runtime's by more than the tolerance gets no time, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from loadtest import zoo
from loadtest.model_builder import Feeds
from loadtest.models import OTHERS
from loadtest.timing import relative_error, slice_ms

Array = NDArray[np.float32]
Run = Callable[[], Array]

OURS, ORACLE = "lathe", "onnxruntime"
TOLERANCE = 1e-4  # of the largest output
WARM_UP = 0.1  # seconds
SETS = {"tuned": ("lenet", "mlp", "mobilenet", "resnet", "transformer"), "others": tuple(OTHERS)}


def lathe(model: bytes, feeds: Feeds, threads: int) -> Run:
    import lathe

    session = lathe.compile(model, threads=threads, max_batch=max(32, len(feeds["x"])))
    return lambda: session.run(feeds)["y"]


def onnxruntime(model: bytes, feeds: Feeds, threads: int) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)[0]


def openvino(model: bytes, feeds: Feeds, threads: int) -> Run:
    """OpenVINO compiled for exactly this batch size, which is its fastest configuration."""
    import openvino as ov

    network = ov.Core().read_model(model)
    network.reshape({name: list(array.shape) for name, array in feeds.items()})
    hints = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = ov.Core().compile_model(network, "CPU", hints).create_infer_request()
    return lambda: request.infer(feeds, share_inputs=True, share_outputs=True)[0]


ENGINES: dict[str, Callable[[bytes, Feeds, int], Run]] = {f.__name__: f for f in (lathe, onnxruntime, openvino)}


@dataclass(frozen=True)
class Row:
    """One model at one batch size: median milliseconds and relative error per engine."""

    model: str
    batch: int
    threads: int
    ms: dict[str, float]
    error: dict[str, float]
    ahead: float | None  # None when there is nothing to compare

    @property
    def wrong(self) -> list[str]:
        return [engine for engine, error in self.error.items() if not error <= TOLERANCE]


def ahead(rounds: Sequence[Mapping[str, float]]) -> float | None:
    """Median over rounds of the best peer's time over Lathe's; None without Lathe or without a peer."""
    peers = [engine for engine in rounds[0] if engine != OURS]
    if OURS not in rounds[0] or not peers:
        return None
    return statistics.median(min(r[peer] for peer in peers) / r[OURS] for r in rounds)


def measure(name: str, batch: int, engines: Sequence[str], threads: int, rounds: int, seconds: float) -> Row:
    model, feeds = zoo.model(name).SerializeToString(), zoo.feeds(name, batch)
    want = onnxruntime(model, feeds, threads)()
    runs = {engine: ENGINES[engine](model, feeds, threads) for engine in engines}
    error = {engine: relative_error(np.asarray(run()), want) for engine, run in runs.items()}
    agreeing = {engine: run for engine, run in runs.items() if error[engine] <= TOLERANCE}
    for run in agreeing.values():
        slice_ms(run, WARM_UP)
    measured = [{engine: slice_ms(run, seconds) for engine, run in agreeing.items()} for _ in range(rounds)]
    ms = {engine: statistics.median(r[engine] for r in measured) for engine in agreeing}
    return Row(name, batch, threads, ms, error, ahead(measured))


def table(rows: Sequence[Row], engines: Sequence[str]) -> Table:
    made = Table(title=f"milliseconds per call, {rows[0].threads} thread(s)", title_justify="left")
    for column in ("model", "batch", *engines, "ahead"):
        made.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        times = [f"{row.ms[e]:.3f}" if e in row.ms else f"[red]error {row.error[e]:.0e}[/red]" for e in engines]
        made.add_row(row.model, str(row.batch), *times, "-" if row.ahead is None else f"x{row.ahead:.2f}")
    return made


def summary(rows: Sequence[Row]) -> str:
    ratios = [row.ahead for row in rows if row.ahead is not None]
    if not ratios:
        return "no comparison: no other engine ran"
    mean = statistics.geometric_mean(ratios)
    return f"ahead by x{mean:.2f} in the geometric mean, worst x{min(ratios):.2f}, over {len(ratios)} cases"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m loadtest.engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=names, default=list(ENGINES))
    parser.add_argument("--set", choices=SETS, default="tuned", help="models that kernels were tuned for, or others")
    parser.add_argument("--models", type=names, help="names of models, instead of a set")
    parser.add_argument("--batches", type=lambda text: [int(b) for b in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slice", type=float, default=0.2, help="seconds per engine and round")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen, console, rows = parse(arguments), Console(), []
    for name in chosen.models or SETS[chosen.set]:
        for batch in chosen.batches:
            console.print(f"[dim]{name}, batch {batch}[/dim]")
            rows.append(measure(name, batch, chosen.engines, chosen.threads, chosen.rounds, chosen.slice))
    console.print(table(rows, chosen.engines))
    console.print(summary(rows))
    if chosen.json:
        report: list[dict[str, Any]] = [asdict(row) for row in rows]
        chosen.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
