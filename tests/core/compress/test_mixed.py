"""Integers only where they are faster, within a budget of error: the choice, its reasons, and the measured error."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import lathe
from lathe.core.compress import mixed
from lathe.core.compress.mixed import quantize_within, relative_error
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Graph
from tests.core.small_models import model
from tests.random_numbers import RNG

F = np.float32
# Each of 100 ns in float32: a (80 ns in integers), b (40), c (99), d (20).
TIMES = {"a": 80, "b": 40, "c": 99, "d": 20}


@pytest.fixture
def network() -> Graph:
    """Two sums: one of embeddings, which no product computes, and a residual of two products."""
    proto = onnx.load_model_from_string(
        model(
            "float[n,16] x => float[n,16] y",
            "e = Add(x, p) s = Add(x, e) t = Relu(s) h = MatMul(t, a) r = Relu(h) u = MatMul(r, b) v = Add(u, h)"
            " w = Relu(v) k = MatMul(w, c) l = Tanh(k) y = MatMul(l, d)",
            f"float[16] p = {{{', '.join(['0.5'] * 16)}}}",
        )
    )
    for name, size in zip("abcd", (1, 1, 1, 0.01), strict=True):
        array = (RNG.standard_normal((16, 16)) * size / 4).astype(F)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    graph = lathe.load(proto.SerializeToString())
    for node in graph.nodes:
        node.name = node.inputs[1].name if node.op == "MatMul" and node.inputs[1] is not None else node.name
    return graph


@pytest.fixture
def batches() -> list[dict[str, np.ndarray]]:
    return [{"x": RNG.standard_normal((64, 16)).astype(F)} for _ in range(2)]


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of the network's products: those of `TIMES` if they are quantized."""
    monkeypatch.setattr(mixed, "_times", lambda *_: [dict.fromkeys(TIMES, 100), dict(TIMES)])


def run(graph: Graph, feeds: Any) -> Any:
    data = lathe.export(graph)
    return ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


@pytest.mark.slow
def test_the_error_stays_within_the_budget(network: Graph, batches: Any) -> None:
    exact = run(network, batches[0])
    errors, counts = [], []
    for budget in (1e-6, 0.01, 0.03, 1.0):
        small, choices, error = quantize_within(network, batches, budget, threads=1)
        measured = relative_error(np.float64(run(small, batches[0])), np.float64(exact))
        assert error <= budget
        assert measured <= max(1.2 * error, 1e-6)
        errors.append(error)
        counts.append(sum(choice.is_quantized for choice in choices))
    assert counts[0] == 0 and counts[-1] == 3 and counts == sorted(counts)
    assert errors[0] == 0 and errors[-1] > 0


def test_every_product_is_reported_with_the_reason(network: Graph, batches: Any) -> None:
    _, choices, _ = quantize_within(network, batches, 1.0, threads=1)
    reasons = {choice.name: (choice.is_quantized, choice.reason) for choice in choices}
    assert reasons == {
        "a": (True, "1.2 times as fast"),
        "b": (True, "2.5 times as fast"),
        "c": (False, "integers are not faster here"),
        "d": (True, "5.0 times as fast"),
    }
    assert all(choice.weights == 256 and choice.op == "MatMul" and choice.error > 0 for choice in choices)
    _, choices, _ = quantize_within(network, batches, 1e-6, threads=1)
    assert {choice.reason for choice in choices} == {
        "integers are not faster here",
        "its error alone exceeds the budget",
    }


def test_a_sum_is_quantized_with_the_products_that_compute_it(network: Graph, batches: Any) -> None:
    """The sum of a and b has a quantized input; the sum of inputs before all products never has."""
    small, choices, _ = quantize_within(network, batches, 1.0, threads=1)
    assert {choice.name for choice in choices if choice.is_quantized} == {"a", "b", "d"}
    sums = [node for node in small.nodes if node.op == "Add"]
    quantized = [
        any(value is not None and value.producer is not None and value.producer.op == "DequantizeLinear"
            for value in node.inputs)
        for node in sums
    ]  # fmt: skip
    assert quantized.count(True) == 1


def test_times_are_those_of_the_kernels(network: Graph, batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    graphs = [network, lathe.quantize(network, batches, threads=1)]
    for found in mixed._times(graphs, batches[0]):
        assert all(found[name] > 0 for name in TIMES)


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan")])
def test_a_budget_is_above_zero(network: Graph, batches: Any, budget: float) -> None:
    with pytest.raises(UnsupportedError, match="budget: expected a number above 0, got"):
        quantize_within(network, batches, budget)
