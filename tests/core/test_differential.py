"""Differential tests of compiled code against the interpreter and ONNX Runtime: operators, shapes, targets, threads.

`random_nets.py` grows graphs of common operators, `rare_steps.py` of all others. Hypothesis makes the choices, or a
seed if a search has to be reproducible.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lathe
from lathe.core.autodiff import gradients
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import VIEWS
from lathe.core.kernels.kernel_table import TABLE
from lathe.core.language.cached_graph import CacheLayout, step_graph
from lathe.core.passes.pipeline import optimize
from lathe.core.passes.proofs.pack import Packed, pack
from tests.core.encoders import Encoder
from tests.core.language.families import write_folder
from tests.core.random_nets import STEPS, Net, feeds
from tests.core.rare_steps import RARE_STEPS
from tests.core.test_random_graphs import assert_close, check

ROOT = Path(__file__).resolve().parents[2]
ALL_STEPS = (*RARE_STEPS, *RARE_STEPS, *STEPS)

# Run in a process of its own, because a process has one target.
OTHER_TARGET = """
import sys
from tests.core.test_differential import check_seed
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    check_seed(seed)
"""


def grown(seed: int) -> Graph:
    return Net(random.Random(seed).randrange).grow(2 + seed % 10, ALL_STEPS)


def check_seed(seed: int) -> None:
    try:
        check(grown(seed), 1 + seed % 4, (1, 4, 32)[seed % 3], seed)
    except Exception as error:
        raise AssertionError(f"the graph of seed {seed}") from error


def training_graph() -> Graph:
    """A convolution, pooling and a product, with the gradients of their weights."""
    b = Builder(Graph("training"))
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), 3, 9, 11)))
    rng = np.random.default_rng(0)
    weights = [
        b.input(name, TensorType(DType.FLOAT32, shape)) for name, shape in (("w", (5, 3, 3, 3)), ("v", (100, 4)))
    ]
    h = b("MaxPool", b("Relu", b("Conv", x, weights[0], pads=(1, 1, 1, 1))), kernel_shape=(2, 2), strides=(2, 2))
    y = b(
        "Mul", b("MatMul", b("Flatten", h, axis=1), weights[1]), b.constant(rng.standard_normal(4).astype(np.float32))
    )
    b.graph.outputs = [y]
    return gradients(b.graph, of=y.name, with_respect_to=["w", "v"])


def pooled_graph() -> Graph:
    """A convolution and a pool, which become one kernel that pools in registers."""
    b = Builder(Graph("pooled"))
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), 1, 28, 28)))
    weight = b.constant(np.random.default_rng(0).standard_normal((8, 1, 3, 3)).astype(np.float32))
    h = b("Relu", b("Conv", x, weight, pads=(1, 1, 1, 1)))
    b.graph.outputs = [b("MaxPool", h, kernel_shape=(2, 2), strides=(2, 2))]
    return b.graph


def regions_graph() -> Graph:
    """Regions of the images of a batch; ONNX Runtime has no RoiAlign of the newest opset."""
    b = Builder(Graph("regions"))
    x = b.input("x", TensorType(DType.FLOAT32, (1, symbol("batch"), 9, 11)))
    corners = b.constant(np.float32([[1, 0.5, 7, 6], [-2, 3, 4, 12]]))
    owners = b.constant(np.zeros(2, np.int64))
    attrs = {"output_height": 3, "output_width": 4, "sampling_ratio": 2}
    b.graph.outputs = [b("Relu", b("RoiAlign", b("Tanh", x), corners, owners, **attrs))]
    return b.graph


def dequantized_graph() -> Graph:
    """A product with weights of four bits in blocks, too large for a random step."""
    b, rng = Builder(Graph("dequantized")), np.random.default_rng(0)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), 256)))
    codes, zeros = (b.constant(rng.integers(0, 16, shape).astype(np.uint8)) for shape in ((256, 256), (4, 256)))
    scales = b.constant(rng.uniform(0.01, 0.1, (4, 256)).astype(np.float32))
    b.graph.outputs = [b("Relu", b("MatMul", x, b("DequantizeLinear", codes, scales, zeros, axis=0, block_size=64)))]
    return b.graph


def rounded_graph() -> Graph:
    """Rows that may become int8, whose results differ; tests/core/passes/test_roundable_rows.py compares them."""
    b = Builder(Graph("rounded"))
    b.graph.outputs = [b("RoundableRows", b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), 256))))]
    return b.graph


def chained_graph() -> Graph:
    """A depthwise convolution of a wide image between convolutions of single pixels."""
    b, rng = Builder(Graph("chained")), np.random.default_rng(0)
    h = b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), 8, 32, 32)))
    for shape, attrs in (
        ((64, 8, 1, 1), {}),
        ((64, 1, 3, 3), {"pads": (1, 1, 1, 1), "group": 64}),
        ((8, 64, 1, 1), {}),
    ):
        h = b("Relu", b("Conv", h, b.constant(rng.standard_normal(shape).astype(np.float32)), **attrs))
    b.graph.outputs = [h]
    return b.graph


def packed_graph() -> Graph:
    """The tokens of sequences of any length; tests/core/passes/test_pack.py draws more of them."""
    found = pack(lathe.load(Encoder().model().SerializeToString()))
    assert isinstance(found, Packed), found
    return found.tokens


def decoder_graph(folder: Path) -> Graph:
    """Tokens of a language model with experts over a cache; tests/core/language/test_cached_decoder.py runs more."""
    model = lathe.load_language_model(write_folder(folder, "qwen2-moe"))
    return step_graph(model.module, CacheLayout(pages=4, page_size=16))


def operators(graph: Graph) -> Iterator[str]:
    """The operators of a graph, of the optimized graph, and of its fused bodies."""
    for each in (graph, optimize(graph)[0]):
        yield from _operators(each.nodes)


def _operators(nodes: list[Node]) -> Iterator[str]:
    for node in nodes:
        yield node.op
        for body in node.subgraphs:
            yield from _operators(body.nodes)


@pytest.mark.slow
def test_every_compiled_operator_occurs_in_a_graph(tmp_path: Path) -> None:
    """A new kernel needs a step: here, or in one of the files named above."""
    graphs = [
        *map(grown, range(600)),
        training_graph(),
        pooled_graph(),
        regions_graph(),
        dequantized_graph(),
        chained_graph(),
        packed_graph(),
        rounded_graph(),
        decoder_graph(tmp_path),
    ]
    drawn = {op for graph in graphs for op in operators(graph)}
    compiled = {*TABLE, *VIEWS}
    assert compiled - drawn == set()


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_all_operators_agree(data: st.DataObject) -> None:
    drawn(data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1500, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_all_operators_agree_in_many_graphs(data: st.DataObject) -> None:
    drawn(data)


def drawn(data: st.DataObject) -> None:
    def choose(count: int) -> int:
        return data.draw(st.integers(0, count - 1))

    graph = Net(choose).grow(1 + choose(8), ALL_STEPS)
    check(graph, threads=1 + choose(4), max_batch=(1, 4, 32)[choose(3)])


@pytest.mark.sample(3, native=True)
@pytest.mark.parametrize("graph", [training_graph, pooled_graph, regions_graph, dequantized_graph])
@pytest.mark.parametrize("threads", [1, 4])
def test_graphs_that_no_random_step_makes(graph: Any, threads: int) -> None:
    made = graph()
    with lathe.compile(made, threads=threads, max_batch=4, tune="off") as session:
        for rows in (3, 1, 6):
            given_ = filled(made, rows)
            want = lathe.interpret(made, given_)
            for name, array in session.run(given_).items():
                assert_close(array, want[name], f"{name} of {rows} rows")


def filled(graph: Graph, rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    shapes = {value.name: value.tensor.evaluate({"batch": rows}) for value in graph.inputs}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("target", "first", "last"),
    [
        ("x86-64-v3", 300, 305),
        ("plain", 310, 313),
        pytest.param("x86-64-v3", 400, 560, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param("plain", 560, 640, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
@pytest.mark.skipif(os.uname().machine not in ("x86_64", "AMD64"), reason="these are x86-64 targets")
@pytest.mark.sample(2)
def test_other_targets_agree(target: str, first: int, last: int) -> None:
    environment = {**os.environ, "LATHE_TARGET": target, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OTHER_TARGET, str(first), str(last)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr


# -- extents of 0, and large ones -------------------------------------------------------------------------------------

LONG = 1_000_003


def _input(b: Builder, *shape: Any, dtype: DType = DType.FLOAT32) -> Value:
    return b.input("x", TensorType(dtype, shape))


LONG_GRAPHS = {
    "elementwise": lambda b: b("Tanh", b("Mul", _input(b, symbol("batch"), LONG), b.constant(np.float32(0.5)))),
    "broadcast": lambda b: b("Add", _input(b, symbol("batch"), LONG, 1), b.constant(np.ones((1, 1, 3), np.float32))),
    "one column": lambda b: b("MatMul", _input(b, symbol("batch"), LONG), b.constant(np.ones((LONG, 1), np.float32))),
    "one row": lambda b: b("MatMul", _input(b, symbol("batch"), 1), b.constant(np.ones((1, LONG), np.float32))),
    "reduction": lambda b: b("ReduceMax", _input(b, symbol("batch"), LONG), axes=(1,), keepdims=0),
    "softmax": lambda b: b("Softmax", _input(b, symbol("batch"), LONG), axis=1),
    "normalization": lambda b: b(
        "LayerNormalization", _input(b, symbol("batch"), LONG), b.constant(np.ones(LONG, np.float32)), axis=-1
    ),
    "transpose": lambda b: b("Transpose", _input(b, symbol("batch"), LONG, 3), perm=(0, 2, 1)),
    "slice": lambda b: b("Slice", _input(b, symbol("batch"), LONG), starts=(-5,), ends=(0,), axes=(1,), steps=(-7,)),
    "concat": lambda b: (lambda x: b("Concat", x, x, axis=1))(_input(b, symbol("batch"), LONG)),
    "gather": lambda b: b(
        "Gather", b.constant(np.arange(LONG, dtype=np.float32)), _input(b, symbol("batch"), 5, dtype=DType.INT64)
    ),
    "convolution": lambda b: b(
        "Conv", _input(b, symbol("batch"), 1, LONG), b.constant(np.ones((2, 1, 3), np.float32)), pads=(1, 1)
    ),
    "pooling": lambda b: b("MaxPool", _input(b, symbol("batch"), 1, LONG), kernel_shape=(3,), strides=(2,)),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LONG_GRAPHS)
def test_long_extents(name: str) -> None:
    """A prime far above any tile; more than one task per thread."""
    b = Builder(Graph(name))
    b.graph.outputs = [LONG_GRAPHS[name](b)]
    value = b.graph.inputs[0]
    rng = np.random.default_rng(0)
    with lathe.compile(b.graph, threads=3, max_batch=2, tune="off") as session:
        assert " 0 on the reference" in session.explain()
        for rows in (2, 1):
            shape = value.tensor.evaluate({"batch": rows})
            whole = value.dtype is DType.INT64
            x = rng.integers(-LONG, LONG, shape) if whole else rng.standard_normal(shape).astype(np.float32)
            got, want = session.run({"x": x}), lathe.interpret(b.graph, {"x": x})
            for key, array in want.items():
                assert_close(got[key], array, f"{key} of {rows} rows")


EMPTY_GRAPHS = {
    "elementwise": lambda b, x: b("Relu", x),
    "reduction": lambda b, x: b("ReduceSum", x, axes=(1,), keepdims=1),
    "maximum": lambda b, x: b("ReduceMax", x, axes=(1, 2)),
    "softmax": lambda b, x: b("Softmax", x, axis=2),
    "product": lambda b, x: b("MatMul", x, b.constant(np.ones((x.shape[2], 3), np.float32))),
    "transpose": lambda b, x: b("Transpose", x, perm=(0, 2, 1)),
    "concat": lambda b, x: b("Concat", x, x, axis=1),
    "padding": lambda b, x: b("Pad", x, pads=(0, 1, 2, 0, 1, 0), constant_value=1.5),
    "slice": lambda b, x: b("Slice", x, starts=(5,), ends=(9,), axes=(1,)),
    "tile": lambda b, x: b("Tile", x, repeats=(1, 2, 0)),
    "expand": lambda b, x: b("Expand", b("ReduceSum", x, axes=(1,), keepdims=1), shape=(1, 4, x.shape[2])),
}  # fmt: skip


@pytest.mark.parametrize("extents", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("name", EMPTY_GRAPHS)
def test_empty_extents(name: str, extents: tuple[int, int]) -> None:
    b = Builder(Graph(name))
    x = _input(b, symbol("batch"), *extents)
    b.graph.outputs = [b("Identity", EMPTY_GRAPHS[name](b, x))]
    with lathe.compile(b.graph, threads=2, tune="off") as session:
        for rows in (3, 0):
            data = np.ones((rows, *extents), np.float32)
            got, want = session.run({"x": data}), lathe.interpret(b.graph, {"x": data})
            for key, array in want.items():
                np.testing.assert_array_equal(got[key], array, err_msg=f"{rows} rows")
                assert got[key].shape == array.shape


# -- concurrent runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [7, 100])
@pytest.mark.sample(2)
def test_a_thousand_runs_from_eight_threads(seed: int) -> None:
    """Concurrent runs of different batch sizes in one session; each gives the same results as alone."""
    graph = grown(seed)
    with lathe.compile(graph, threads=3, max_batch=8, tune="off") as session:
        alone = [(given_, session.run(given_)) for given_ in (feeds(graph, rows, rows) for rows in (1, 2, 3, 5, 8, 0))]
        together = threading.Barrier(8)

        def runs(worker: int) -> int:
            together.wait()
            for i in range(125):
                given_, want = alone[(worker + i) % len(alone)]
                got = session.run(given_)
                for name, array in want.items():
                    np.testing.assert_array_equal(got[name], array, err_msg=name)
            return 125

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(runs, range(8))) == 1000
