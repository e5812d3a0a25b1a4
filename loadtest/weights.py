"""Measures products with weights of few bits: `python -m loadtest weights`.

For each size and number of rows: a product of float32, products with weights of 4 and 8 bits in blocks, with rows of
float32 and with rows that are rounded to int8, and ONNX Runtime's with 4 bits, once with the rows in float32 (accuracy
level 0) and once rounded to 8 bits (level 4, its default for QDQ models). All take turns, round after round. With one
thread the time is the median of its processor's, so other work on the machine changes less; with several threads it is
the least of all rounds.

If the weights of 4 bits have 4 MiB or more, the caches are filled with other data before each call with one row: then
weights come from memory, as those of a language model. The bandwidth counts codes, scales and zero points. It is
compared with the rate at which as many threads read an array of as many bytes (`read`). Small weights stay in the
cache, and a call takes about as long as Python needs for it. The error is relative to the root mean square of the exact
result. With --limits the exit status is 1 if one row reaches less than 80 % of the measured read bandwidth, or many
rows take longer than with float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from loadtest.row_limits import add_result_options, finish

Run = Callable[[], NDArray[Any]]

_WORK = 1.5e8  # multiplications of a slice: some milliseconds
_LEAST_BANDWIDTH, _LEAST_SPEED = 0.8, 1.0
_EXACT, _READ = "float32", "read"
_INT8 = ", int8 rows"
_FROM_MEMORY = 1 << 22  # bytes of weights that come from memory
_EVICTED = 1 << 26  # bytes that are read before a call with one row: more than the caches hold
_LEVELS = {"ONNX Runtime, 4 bits": 0, "ONNX Runtime, 4 bits, rows of 8": 4}


@dataclass(frozen=True)
class Row:
    """One kind of product: microseconds of the processor, bytes of its weights, and the error of its results."""

    rows: int
    kind: str
    us: float
    weight_bytes: int
    error: float

    @property
    def gigabytes(self) -> float:
        """10^9 bytes of weights per second."""
        return self.weight_bytes / self.us / 1e3


def quantized_model(weights: NDArray[np.float32], bits: int, block: int) -> tuple[bytes, int]:
    """An ONNX model y = x @ weights with codes in blocks, and the bytes of its weights."""
    import lathe

    data = lathe.export(lathe.quantize_weights(_model(weights), bits=bits, block=block))
    depth, columns = weights.shape
    blocks = -(-depth // block) * columns
    return data, depth * columns * bits // 8 + blocks * 4 + blocks  # the kernel stores zero points as bytes


def _model(weights: NDArray[np.float32]) -> bytes:
    depth, columns = weights.shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", depth])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", columns])],
        [numpy_helper.from_array(weights, "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(made.SerializeToString())


def _nbits_model(weights: NDArray[np.float32], block: int, level: int) -> bytes:
    """ONNX Runtime's own operator, with the codes of its own quantizer."""
    from onnxruntime.capi._pybind_state import quantize_matmul_4bits

    depth, columns = weights.shape
    blocks = depth // block
    codes = np.zeros((columns, blocks, block // 2), np.uint8)
    scales, zeros = np.zeros(columns * blocks, np.float32), np.zeros(columns * -(-blocks // 2), np.uint8)
    quantize_matmul_4bits(codes, weights, scales, zeros.reshape(columns, -1), block, columns, depth, False)
    attrs = {"K": depth, "N": columns, "bits": 4, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", "q", "s", "z"], ["y"], domain="com.microsoft", **attrs)
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", depth])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", columns])],
        [numpy_helper.from_array(array, name) for array, name in ((codes, "q"), (scales, "s"), (zeros, "z"))],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def compare(depth: int, columns: int, counts: Sequence[int], rounds: int, threads: int = 1) -> list[Row]:
    """The rows of the table, for weights [depth, columns] of normally distributed numbers."""
    import onnxruntime as ort

    import lathe

    weights = np.random.default_rng(0).standard_normal((depth, columns)).astype(np.float32)
    sessions: dict[str, Any] = {_EXACT: lathe.compile(_model(weights), threads=threads)}
    sizes = {_EXACT: weights.nbytes}
    for bits, block in ((4, 32), (4, 128), (8, 128)):
        kind = f"{bits} bits, blocks of {block}"
        data, sizes[kind] = quantized_model(weights, bits, block)
        sessions[kind] = lathe.compile(data, threads=threads)
        sessions[kind + _INT8] = lathe.compile(data, threads=threads, precision="int8-activations", tune="off")
        sizes[kind + _INT8] = sizes[kind]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    peers = {}
    for kind, level in _LEVELS.items():
        peers[kind] = ort.InferenceSession(_nbits_model(weights, 32, level), options)
        sizes[kind] = depth * columns // 2 + -(-depth // 32) * columns * 4 + -(-depth // 64) * columns
    found = []
    for count in counts:
        x = np.random.default_rng(count).standard_normal((count, depth)).astype(np.float32)
        exact = x.astype(np.float64) @ weights
        runs: dict[str, Run] = {kind: _ours(session, x) for kind, session in sessions.items()}
        runs |= {kind: _theirs(peer, x) for kind, peer in peers.items()}
        if count == 1 and sizes["4 bits, blocks of 32"] >= _FROM_MEMORY:
            sizes[_READ] = sizes["4 bits, blocks of 32"]
            times = _interleaved({_READ: _reading(sizes[_READ], threads), **runs}, 1, 4 * rounds, threads, evicts=True)
            found.append(Row(count, _READ, times[_READ] * 1e6, sizes[_READ], 0.0))
        else:
            calls = max(1, int(_WORK / (count * depth * columns)))
            times = _interleaved(runs, calls, rounds, threads)
        for kind, run in runs.items():
            error = float(np.sqrt(((run() - exact) ** 2).mean() / (exact**2).mean()))
            found.append(Row(count, kind, times[kind] * 1e6, sizes[kind], error))
    return found


def _ours(session: Any, x: NDArray[np.float32]) -> Run:
    feeds = {"x": x}
    return lambda: session.run(feeds)["y"]


def _theirs(session: Any, x: NDArray[np.float32]) -> Run:
    feeds = {"x": x}
    return lambda: session.run(None, feeds)[0]


def _reading(nbytes: int, threads: int) -> Run:
    """Reads an array of `nbytes`, a part in each thread."""
    parts = np.array_split(np.ones(nbytes // 4, np.float32), threads)
    if threads == 1:
        return lambda: np.asarray(parts[0].max())
    pool = ThreadPoolExecutor(threads)
    return lambda: np.array([each.result() for each in [pool.submit(part.max) for part in parts]])


def _interleaved(runs: dict[str, Run], calls: int, rounds: int, threads: int, evicts: bool = False) -> dict[str, float]:
    """The seconds of a call, all kinds in turns: of one thread the median over rounds of its processor's time.

    Of several threads the least time of a round, as other work on the machine delays one of them. `evicts`: the caches
    are filled with other data before.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    other = np.ones(_EVICTED // 4, np.float32)
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for number in range(rounds + 1):  # the first round warms up
        for kind, run in runs.items():
            if evicts:
                other.max()
            start = clock()
            for _ in range(calls):
                run()
            if number:
                times[kind].append((clock() - start) / calls)
    typical = statistics.median if threads == 1 else min
    return {kind: typical(found) for kind, found in times.items()}


def broken_limits(table: Sequence[Row]) -> list[str]:
    """Returns a message for each row that misses a limit: one row's bandwidth, or many rows' speed against float32."""
    exact = {row.rows: row for row in table if row.kind == _EXACT}
    reading = next((row.gigabytes for row in table if row.kind == _READ), 0.0)  # 0: not measured
    found = []
    for row in table:
        peer = exact[row.rows]
        if row.kind in (_EXACT, _READ, *_LEVELS):
            continue
        if row.rows == 1 and row.gigabytes < _LEAST_BANDWIDTH * reading:
            found.append(f"{row.kind}: {row.gigabytes:.1f} of {reading:.1f} GB/s")
        if row.rows > 1 and peer.us < _LEAST_SPEED * row.us:
            found.append(f"{row.kind}, {row.rows} rows: {row.us:.0f} us, float32 {peer.us:.0f} us")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Exit status 1 with --limits if one is missed."""
    parser = argparse.ArgumentParser(prog="python -m loadtest weights", description=__doc__)
    parser.add_argument("--depth", type=int, default=4096, help="rows of the weights")
    parser.add_argument("--columns", type=int, default=4096, help="columns of the weights")
    parser.add_argument("--threads", type=int, default=1, help="threads of each product")
    parser.add_argument("--rows", default="1,4,16,128", help="numbers of rows of x, separated by commas")
    parser.add_argument("--rounds", type=int, default=9, help="rounds; the medians are shown")
    add_result_options(parser)
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.rows.split(",")]
    table = compare(options.depth, options.columns, counts, options.rounds, options.threads)
    _show(table)
    return finish(options, table, broken_limits(table))


def _show(table: Sequence[Row]) -> None:
    shown = Table("rows", "kind", "us", "GB/s of weights", "float32's time by this", "error")
    exact = {row.rows: row.us for row in table if row.kind == _EXACT}
    for row in table:
        ahead = exact[row.rows] / row.us
        shown.add_row(
            str(row.rows), row.kind, f"{row.us:.0f}", f"{row.gigabytes:.1f}", f"{ahead:.2f}", f"{row.error:.2%}"
        )
    Console(width=120).print(shown)


if __name__ == "__main__":
    sys.exit(main())
