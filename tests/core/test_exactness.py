"""The error of compiled models against the interpreter in float64."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.ir.graph import Attr, Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.inference import infer_graph
from loadtest import zoo

LIMIT = 1e-4  # of the largest output
QUICK = ("lenet", "mlp")


def in_float64(graph: Graph) -> Graph:
    """The same model with every float32 a float64."""
    wide = graph.clone()
    for value in wide.inputs:
        value.type = TensorType(_wider(value.dtype), value.tensor.shape)
    for value, array in list(wide.constants.items()):
        if array.dtype == np.float32:
            wide.constants[value] = array.astype(np.float64)
            value.type = TensorType(DType.FLOAT64, array.shape)
    for node in wide.nodes:
        node.attrs = {name: _wide_attr(attr) for name, attr in node.attrs.items()}
    infer_graph(wide)
    return wide


def _wider(dtype: DType) -> DType:
    return DType.FLOAT64 if dtype is DType.FLOAT32 else dtype


def _wide_attr(attr: Attr) -> Attr:
    if isinstance(attr, DType):
        return _wider(attr)
    return attr.astype(np.float64) if isinstance(attr, np.ndarray) and attr.dtype == np.float32 else attr


def error(name: str, rows: int, threads: int) -> float:
    """The largest error of any output, relative to the largest output."""
    graph = lathe.load(zoo.model(name).SerializeToString())
    feeds = zoo.feeds(name, rows)
    wide = {key: array.astype(np.float64) if array.dtype == np.float32 else array for key, array in feeds.items()}
    exact = lathe.interpret(in_float64(graph), wide)
    with lathe.compile(graph, threads=threads, max_batch=4, tune="off") as session:
        got = session.run(feeds)
    assert all(array.dtype == np.float64 for array in exact.values() if array.dtype.kind == "f")
    return max(float(np.abs(got[key] - want).max() / np.abs(want).max()) for key, want in exact.items())


@pytest.mark.parametrize("name", QUICK)
def test_models_are_exact_enough(name: str) -> None:
    assert error(name, rows=2, threads=2) < LIMIT


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name not in QUICK])
def test_all_models_are_exact_enough(name: str) -> None:
    assert error(name, rows=1, threads=1) < LIMIT


def test_the_measure_sees_an_error() -> None:
    """Weights that are off by a thousandth must exceed the limit."""
    graph = lathe.load(zoo.model("mlp").SerializeToString())
    feeds = zoo.feeds("mlp", 2)
    exact = lathe.interpret(in_float64(graph), {"x": feeds["x"].astype(np.float64)})["y"]
    for value, array in list(graph.constants.items()):
        graph.constants[value] = array * np.float32(1.001) if array.dtype == np.float32 else array
    off = lathe.interpret(graph, feeds)["y"]
    assert np.abs(off - exact).max() / np.abs(exact).max() > LIMIT
