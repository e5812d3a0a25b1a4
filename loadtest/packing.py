"""Measures sequences of different lengths, packed, padded and one by one: `python -m loadtest packing`.

A MiniLM encoder (Wang et al. 2020: six layers of width 384; random weights) makes one vector of each request; `--model`
takes another model, such as an exported one. Lengths are log-normal, with mean 40 and at most 128 tokens. All methods
take turns, round after round. "ahead" is the median over rounds of a method's time over that of packed runs. Then
requests arrive at random (Poisson) at 80 % of the rate of ONNX Runtime's best method, and queue behind earlier runs.
Exit status 1 if an answer differs from ONNX Runtime's. With --limits also if packed runs answer less than 1.5 times as
many requests per second as ONNX Runtime's best method, or if their p99 is not below ONNX Runtime's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import orjson
from numpy.typing import NDArray
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table

from loadtest.model_builder import OPSET, Builder, Feeds

WORDS, WIDTH, HEADS, LAYERS, LONGEST = 30522, 384, 12, 6, 128
MEAN, SPREAD = 40, 0.6  # mean length in tokens; standard deviation of the lengths' logarithm
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
PACKED = "packed"
TOLERANCE = 1e-4  # of the largest output

Run = Callable[[], NDArray[np.float32]]  # one row per request
RunBatch = Callable[[Sequence[Feeds]], object]
AHEAD = 1.5  # limit: times ONNX Runtime's requests per second
UTILIZATION = 0.8  # arrival rate in the open loop, as a share of ONNX Runtime's best rate


@dataclass(frozen=True)
class Row:
    """A method to answer all requests: its milliseconds, and its time over that of packed runs (`ahead`)."""

    way: str
    ms: float
    ahead: float


@dataclass(frozen=True)
class Latency:
    """Percentiles of the time from a request's arrival to its answer, in milliseconds."""

    way: str
    p50: float
    p99: float


def minilm() -> onnx.ModelProto:
    """A MiniLM encoder: [batch, sequence] ids, mask and types -> the masked mean of each sequence, L2-normalised."""
    b = Builder()
    length = b.op("Gather", b.op("Shape", INPUTS[0]), b.integers(1), axis=0)
    mask = b.op("Cast", INPUTS[1], to=TensorProto.FLOAT)
    hidden = b.op("Mul", b.op("Sub", b.scalar(1), mask), b.scalar(-1e9))
    bias = b.op("Unsqueeze", hidden, b.integers(1, 2))
    places = b.op("Slice", b.constant(np.arange(512)[None]), b.integers(0), length, b.integers(1))
    tables = ((WORDS, INPUTS[0]), (2, INPUTS[2]), (512, places))
    words, types, positions = (b.op("Gather", b.normal(rows, WIDTH, scale=0.5), ids) for rows, ids in tables)
    x = b.layernorm(b.op("Add", b.op("Add", words, types), positions), WIDTH)
    for _ in range(LAYERS):
        x = b.layernorm(b.op("Add", x, _attention(b, x, bias)), WIDTH)
        inner = b.gelu(b.linear(x, WIDTH, 4 * WIDTH))
        x = b.layernorm(b.op("Add", x, b.linear(inner, 4 * WIDTH, WIDTH)), WIDTH)
    weights = b.op("Unsqueeze", mask, b.integers(2))
    total, count = (b.op("ReduceSum", value, b.integers(1), keepdims=0) for value in (b.op("Mul", x, weights), weights))
    mean = b.op("Div", total, b.op("Clip", count, b.scalar(1e-9)))
    norm = b.op("Div", mean, b.op("ReduceL2", mean, axes=[1], keepdims=1))
    graph = helper.make_graph(
        b.nodes,
        "minilm",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in INPUTS],
        [helper.make_tensor_value_info(norm, TensorProto.FLOAT, ["batch", WIDTH])],
        b.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


def _attention(b: Builder, x: str, bias: str) -> str:
    def heads(axes: list[int]) -> str:
        return b.op("Transpose", b.reshape(b.linear(x, WIDTH, WIDTH), 0, 0, HEADS, WIDTH // HEADS), perm=axes)

    query, key, value = heads([0, 2, 1, 3]), heads([0, 2, 3, 1]), heads([0, 2, 1, 3])
    scores = b.op("Div", b.op("MatMul", query, key), b.scalar(math.sqrt(WIDTH // HEADS)))
    mixed = b.op("MatMul", b.op("Softmax", b.op("Add", scores, bias), axis=-1), value)
    return b.linear(b.reshape(b.op("Transpose", mixed, perm=[0, 2, 1, 3]), 0, 0, WIDTH), WIDTH, WIDTH)


def requests(count: int, seed: int = 0) -> list[Feeds]:
    """`count` requests of one sequence each, with random lengths and tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(math.log(MEAN) - SPREAD**2 / 2, SPREAD, count).round().clip(1, LONGEST).astype(int)
    return [_request(rng.integers(0, WORDS, (1, length))) for length in lengths]


def _request(ids: NDArray[np.int64]) -> Feeds:
    return dict(zip(INPUTS, (ids, np.ones_like(ids), np.zeros_like(ids)), strict=True))


def padded(feeds: Sequence[Feeds], length: int = 0) -> Feeds:
    """Several requests as one batch, padded with zeros to `length`, or to the longest request if it is 0."""
    length = length or max(feed[INPUTS[0]].shape[1] for feed in feeds)
    return {
        name: np.concatenate([np.pad(feed[name], ((0, 0), (0, length - feed[name].shape[1]))) for feed in feeds])
        for name in feeds[0]
    }


def read_by(model: bytes, feeds: Sequence[Feeds]) -> list[Feeds]:
    """The requests without the inputs that the model lacks; some models have no token types."""
    names = {value.name for value in onnx.load_from_string(model).graph.input}
    return [{name: array for name, array in feed.items() if name in names} for feed in feeds]


def ways(model: bytes, feeds: Sequence[Feeds], threads: int) -> dict[str, Run]:
    """The methods to compare, by name.

    Lathe runs packed, one by one with the same code, and padded. ONNX Runtime runs one by one, padded, and padded in
    groups of eight sorted by length.
    """
    import lathe

    theirs, place = onnxruntime(model, threads)
    packed = lathe.compile(model, threads=threads, packing=1024)
    fixed = lathe.compile(model, threads=threads, new_shapes="wait")
    output = list(packed.outputs)[place]
    order = sorted(range(len(feeds)), key=lambda i: feeds[i][INPUTS[0]].shape[1])
    groups = [order[i : i + 8] for i in range(0, len(order), 8)]

    def sorted_groups() -> NDArray[np.float32]:
        rows = np.concatenate([theirs.run(None, padded([feeds[i] for i in group]))[place] for group in groups])
        return np.asarray(rows[np.argsort(order)])

    return {
        PACKED: lambda: np.concatenate([each[output] for each in packed.run_packed(feeds)]),
        "one by one": lambda: np.concatenate([packed.run(feed)[output] for feed in feeds]),
        "padded": lambda: fixed.run(padded(feeds, LONGEST))[output],
        "ONNX Runtime one by one": lambda: np.concatenate([theirs.run(None, feed)[place] for feed in feeds]),
        "ONNX Runtime padded": lambda: theirs.run(None, padded(feeds))[place],
        "ONNX Runtime sorted, padded by eights": sorted_groups,
    }


def onnxruntime(model: bytes, threads: int) -> tuple[Any, int]:
    """A session of ONNX Runtime, and the index of its first output of rank 2, which has one row per request."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session, next(i for i, output in enumerate(session.get_outputs()) if len(output.shape) == 2)


def latencies(model: bytes, feeds: Sequence[Feeds], threads: int, rate: float, count: int) -> list[Latency]:
    """Latencies at `rate` requests/s: packed runs, and ONNX Runtime one by one and in batches of at most eight."""
    import lathe

    theirs, _ = onnxruntime(model, threads)
    packed = lathe.compile(model, threads=threads, packing=1024)
    policies: dict[str, tuple[RunBatch, int]] = {
        PACKED: (packed.run_packed, 16),
        "ONNX Runtime one by one": (lambda group: theirs.run(None, group[0]), 1),
        "ONNX Runtime padded by eights": (lambda group: theirs.run(None, padded(group)), 8),
    }
    arrivals = np.random.default_rng(1).exponential(1 / rate, count).cumsum()
    sent = [feeds[index % len(feeds)] for index in range(count)]
    found = []
    for way, (run, most) in policies.items():
        run(sent[:1])
        times = open_loop(run, sent, arrivals, most) * 1e3
        found.append(Latency(way, float(np.percentile(times, 50)), float(np.percentile(times, 99))))
    return found


def open_loop(run: RunBatch, sent: Sequence[Feeds], arrivals: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Seconds from each arrival to its answer. Requests that have arrived run together, at most `most` at once."""
    times, done, begin = np.zeros(len(sent)), 0, time.perf_counter()
    while done < len(sent):
        time.sleep(max(arrivals[done] - (time.perf_counter() - begin), 0))
        arrived = int(np.searchsorted(arrivals, time.perf_counter() - begin))
        last = min(max(arrived, done + 1), done + most)
        run(sent[done:last])
        times[done:last] = time.perf_counter() - begin - arrivals[done:last]
        done = last
    return times


def measure(runs: dict[str, Run], rounds: int) -> list[Row]:
    """Time all methods. ValueError if the answers of one differ from ONNX Runtime's."""
    expected = runs["ONNX Runtime one by one"]()
    for way, run in runs.items():
        error = float(np.abs(run() - expected).max() / np.abs(expected).max())
        if not error < TOLERANCE:
            raise ValueError(f"{way}: differs from ONNX Runtime by {error:.1e} of the largest output")
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(rounds):
        for way, run in runs.items():
            started = time.perf_counter()
            run()
            times[way].append(time.perf_counter() - started)
    packed = times[PACKED]
    return [
        Row(way, 1e3 * statistics.median(own), statistics.median(a / b for a, b in zip(own, packed, strict=True)))
        for way, own in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest packing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="an ONNX file with a matrix among its outputs, instead of MiniLM")
    parser.add_argument("--limits", action="store_true", help="exit with 1 if a figure misses its limit")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen, console = parser.parse_args(arguments), Console()
    model = chosen.model.read_bytes() if chosen.model else minilm().SerializeToString()
    feeds = read_by(model, requests(chosen.requests))
    tokens = sum(feed[INPUTS[0]].size for feed in feeds)
    try:
        rows = measure(ways(model, feeds, chosen.threads), chosen.rounds)
    except ValueError as error:
        console.print(f"[red]{error}[/red]")
        return 1
    made = Table(title=f"{len(feeds)} requests, {tokens} tokens, {chosen.threads} thread(s)", title_justify="left")
    for column in ("way", "ms", "requests/s", "ahead"):
        made.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        made.add_row(row.way, f"{row.ms:.1f}", f"{1e3 * len(feeds) / row.ms:.0f}", f"{row.ahead:.2f}")
    console.print(made)
    best = min(row.ms for row in rows if row.way.startswith("ONNX Runtime"))
    rate = UTILIZATION * 1e3 * len(feeds) / best
    waits = latencies(model, feeds, chosen.threads, rate, chosen.rounds * len(feeds))
    made = Table(title=f"{rate:.0f} requests/s, {UTILIZATION:.0%} of ONNX Runtime's best", title_justify="left")
    for column in ("way", "p50 ms", "p99 ms"):
        made.add_column(column, justify="left" if column == "way" else "right")
    for wait in waits:
        made.add_row(wait.way, f"{wait.p50:.1f}", f"{wait.p99:.1f}")
    console.print(made)
    if chosen.json:
        report = {"ways": [asdict(row) for row in rows], "latencies": [asdict(wait) for wait in waits]}
        chosen.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    return 1 if chosen.limits and misses(rows, waits) else 0


def misses(rows: Sequence[Row], waits: Sequence[Latency]) -> bool:
    """True if packed runs miss a limit: AHEAD, or a p99 below each of ONNX Runtime's."""
    ahead = min(row.ahead for row in rows if row.way.startswith("ONNX Runtime"))
    tails = {wait.way: wait.p99 for wait in waits}
    best = min(p99 for way, p99 in tails.items() if way.startswith("ONNX Runtime"))
    return ahead < AHEAD or tails[PACKED] >= best


if __name__ == "__main__":
    sys.exit(main())
