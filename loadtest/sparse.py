"""Measures products with weights of many zeros: `python -m loadtest sparse`.

For each product: the kernel that a model without zeros gets, and the one over the weights that are not zero, as two
models with equal inputs. Both take turns, round after round; the time is that of the processor of one thread, so other
work on the machine changes less. Zeros are at random places. With --limits the exit status is 1 if a product of the
largest batch is less than twice as fast with 90 % zeros.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from loadtest.row_limits import add_result_options, finish

SHAPES = "56x56x64x256,56x56x256x64,28x28x512x128,14x14x1024x256,7x7x2048x512,512x512,768x3072,3072x768,1024x1024"
_LIMIT_ZEROS, _LEAST_SPEED = 0.9, 2.0
_ROUND_SECONDS = 0.01


@dataclass(frozen=True)
class Row:
    """A product, such as `56x56x64x256` (image, channels in and out) or `512x512`; microseconds of the processor."""

    product: str
    zeros: float
    batch: int
    kernel: str
    dense_us: float
    sparse_us: float

    @property
    def speed(self) -> float:
        return self.dense_us / self.sparse_us


def model(sizes: Sequence[int], zeros: float) -> bytes:
    """An ONNX model of a 1x1 convolution (height, width, channels, results) or a MatMul (inputs, results).

    The images are channels-last, and only the first line of the result is an output, so that a run does little else.
    """
    *image, depth, columns = sizes
    random = np.random.default_rng(0)
    weight = random.standard_normal((depth, columns)).astype(np.float32)
    weight[random.random(weight.shape) < zeros] = 0
    if image:
        weight = np.ascontiguousarray(weight.T).reshape(columns, depth, 1, 1)
        nodes = [
            helper.make_node("Transpose", ["x"], ["first"], perm=[0, 3, 1, 2]),
            helper.make_node("Conv", ["first", "w"], ["sums"]),
            helper.make_node("Transpose", ["sums"], ["last"], perm=[0, 2, 3, 1]),
            helper.make_node("Slice", ["last", "begin", "end"], ["y"]),
        ]
    else:
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    constants: dict[str, NDArray[Any]] = {"w": weight, "begin": np.zeros(2, np.int64), "end": np.array([2**62, 1])}
    result = [1, *image[1:], columns] if image else [columns]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *image, depth])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", *result])],
        [numpy_helper.from_array(array, name) for name, array in constants.items() if image or name == "w"],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(made.SerializeToString())


def compare(products: Sequence[str], shares: Sequence[float], batches: Sequence[int], rounds: int) -> list[Row]:
    """The rows of the table."""
    import lathe

    found = []
    for name in products:
        sizes = [int(size) for size in name.split("x")]
        *image, depth, _ = sizes
        dense = lathe.compile(model(sizes, 0.0), threads=1)
        for share in shares:
            sparse = lathe.compile(model(sizes, share), threads=1)
            for batch in batches:
                x = np.random.default_rng(batch).standard_normal((batch, *image, depth)).astype(np.float32)
                times = _interleaved((dense, sparse), {"x": x}, rounds)
                found.append(Row(name, share, batch, _kernel(sparse), *(seconds * 1e6 for seconds in times)))
    return found


def _kernel(session: Any) -> str:
    """Whether the product leaves out zeros."""
    return "sparse" if "sparse, about" in session.explain() else "dense"


def _interleaved(sessions: Sequence[Any], feeds: dict[str, NDArray[np.float32]], rounds: int) -> list[float]:
    """The medians over rounds of the processor seconds of a run, the sessions in turns."""
    times: list[list[float]] = [[] for _ in sessions]
    calls = []
    for session in sessions:
        session.run(feeds)
        start = time.thread_time()
        session.run(feeds)
        calls.append(max(1, int(_ROUND_SECONDS / max(time.thread_time() - start, 1e-7))))
    for _ in range(rounds):
        for session, count, found in zip(sessions, calls, times, strict=True):
            start = time.thread_time()
            for _ in range(count):
                session.run(feeds)
            found.append((time.thread_time() - start) / count)
    return [statistics.median(found) for found in times]


def broken_limits(table: Sequence[Row]) -> list[str]:
    """Returns a message for each product of 90 % zeros and the largest batch that is not twice as fast."""
    largest = max(row.batch for row in table)
    return [
        f"{row.product}, {row.batch} rows or images: {row.speed:.2f} times as fast"
        for row in table
        if row.batch == largest and row.zeros == _LIMIT_ZEROS and row.speed < _LEAST_SPEED
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Exit status 1 with --limits if one is missed."""
    parser = argparse.ArgumentParser(prog="python -m loadtest sparse", description=__doc__)
    parser.add_argument("--products", default=SHAPES, help="sizes joined by x, separated by commas")
    parser.add_argument("--zeros", default="0.7,0.8,0.9,0.95", help="shares of zeros, separated by commas")
    parser.add_argument("--batches", default="1,8", help="numbers of rows or images, separated by commas")
    parser.add_argument("--rounds", type=int, default=9, help="rounds; the medians are shown")
    add_result_options(parser)
    options = parser.parse_args(arguments)
    shares = [float(share) for share in options.zeros.split(",")]
    batches = [int(batch) for batch in options.batches.split(",")]
    table = compare(options.products.split(","), shares, batches, options.rounds)
    _show(table)
    return finish(options, table, broken_limits(table))


def _show(table: Sequence[Row]) -> None:
    shown = Table("product", "zeros", "batch", "kernel", "all weights, us", "with zeros, us", "times as fast")
    for row in table:
        shown.add_row(
            row.product, f"{row.zeros:.0%}", str(row.batch), row.kernel,
            f"{row.dense_us:.0f}", f"{row.sparse_us:.0f}", f"{row.speed:.2f}",
        )  # fmt: skip
    Console(width=120).print(shown)


if __name__ == "__main__":
    sys.exit(main())
