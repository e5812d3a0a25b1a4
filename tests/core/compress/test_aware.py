"""Quantization-aware training: the model under training computes what its quantized form computes in ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from sklearn.datasets import load_digits

import lathe
from lathe import train
from lathe.core.compress.aware import (
    ACTIVATION_CODES,
    WEIGHT_CODES,
    AwareQuantization,
    add_fake_quantization,
    as_quantized,
)
from lathe.core.errors import DataError, UnsupportedError
from lathe.core.ir.graph import Graph
from lathe.core.train import losses, optimizers
from tests.core.compress.test_static import RESIDUAL, ort_run, run
from tests.random_numbers import RNG

F = np.float32
VALUES = {"int8": 255, "int4": 16, "int2": 4, "ternary": 3, "trained_ternary": 3, "binary": 2, "power_of_two": 15}


def trained(graph: Graph, x: np.ndarray, target: np.ndarray, updates: int, rate: float = 1e-3) -> Graph:
    step = train.step(graph, losses.MeanSquaredError(), optimizers.Adam(rate), threads=1)
    for _ in range(updates):
        step.run({"x": x, "target": target})
    return step.graph()


@pytest.mark.sample(4)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("activations", ACTIVATION_CODES)
@pytest.mark.parametrize("weights", WEIGHT_CODES)
def test_training_computes_what_onnx_runtime_computes(weights: Any, activations: Any, per_channel: bool) -> None:
    """After some updates: convolutions, a residual sum, a product and a Gemm."""
    x = RNG.standard_normal((40, 3, 8, 8)).astype(F)
    exact = ort_run(RESIDUAL, {"x": x})
    options = AwareQuantization(weights, activations, per_channel, keeps_ends=False)
    graph = trained(add_fake_quantization(lathe.load(RESIDUAL), [{"x": x}], options, threads=1), x, exact, 5)
    small = as_quantized(graph)
    data = lathe.export(small)
    onnx.checker.check_model(onnx.load_model_from_string(data), full_check=True)
    mine, theirs, written = run(graph, {"x": x}), ort_run(data, {"x": x}), run(data, {"x": x})
    largest = np.abs(exact).max()
    quantum = 0.02 if activations == "int8" else 1e-4  # the last digit of a sum may round a number to the next code
    assert np.abs(theirs - mine).max() < quantum * largest
    assert np.abs(written - theirs).max() < quantum * largest
    counts = Counter(node.op for node in small.nodes)
    assert not counts["FakeQuantize"] + counts["CodedWeight"]
    assert counts["QuantizeLinear"] == (5 if activations == "int8" else 0)
    for place, node in enumerate(each for each in graph.nodes if each.op in ("Conv", "MatMul", "Gemm")):
        same = next(each for each in small.nodes if each.op == node.op and each.name == node.name)
        stored = same.required_input(1)
        producer = stored.producer
        assert producer is not None, place
        codes = small.constants.get(producer.required_input(0))
        if codes is not None and codes.dtype.kind in "iV":
            assert len(np.unique(codes.astype(int))) <= VALUES[weights]


@pytest.mark.sample(4)
@pytest.mark.parametrize("weights", WEIGHT_CODES)
def test_training_regains_accuracy(weights: Any) -> None:
    """The bundled digits, two epochs: better than without training, on rows that were not trained on."""
    digits = load_digits()
    x, y = digits.images.astype(F)[:, None], digits.target
    order = np.random.default_rng(0).permutation(len(x))
    rows, rest = order[:1200], order[1200:]
    model = lathe.load("model_repo/digits/2/model.onnx")
    model.outputs = [next(node.output for node in model.nodes if node.op == "Softmax").producer.required_input(0)]  # type: ignore[union-attr]
    model.remove_dead()
    graph = add_fake_quantization(model, [{"image": x[rows[:256]]}], AwareQuantization(weights), threads=1)
    step = train.step(graph, losses.CrossEntropy(), optimizers.Adam(1e-3), threads=1)
    for _ in range(2):
        for start in range(0, len(rows), 64):
            some = rows[start : start + 64]
            step.run({"image": x[some], "target": y[some]})

    def accuracy(graph: Graph) -> float:
        return float((run(graph, {"image": x[rest]}).argmax(axis=1) == y[rest]).mean())

    before, after = accuracy(as_quantized(graph)), accuracy(as_quantized(step.graph()))
    assert after >= max(before - 0.005, 0.96)
    assert before < 0.98 or weights in ("int8", "int4", "power_of_two")


def test_the_ends_keep_eight_bits_and_skipped_nodes_stay_float32() -> None:
    graph = lathe.load(RESIDUAL)
    for place, node in enumerate(graph.nodes):
        node.name = f"node{place}"
    x = RNG.standard_normal((8, 3, 8, 8)).astype(F)
    small = as_quantized(add_fake_quantization(graph, [{"x": x}], AwareQuantization("binary"), threads=1))
    products = [node for node in small.nodes if node.op in ("Conv", "MatMul", "Gemm")]
    stored = [node.required_input(1).producer.required_input(0) for node in products]  # type: ignore[union-attr]
    assert [str(value.dtype) for value in stored] == ["int8", "int4", "int4", "int8"]
    name = next(node.name for node in graph.nodes if node.op == "Gemm")
    options = AwareQuantization(skip=frozenset({name}))
    small = as_quantized(add_fake_quantization(graph, [{"x": x}], options, threads=1))
    gemm = next(node for node in small.nodes if node.op == "Gemm")
    assert small.constant_of(gemm.required_input(1)) is not None


@pytest.mark.slow
def test_the_compiler_multiplies_bytes_with_weights_of_four_bits() -> None:
    x = RNG.standard_normal((8, 3, 8, 8)).astype(F)
    options = AwareQuantization("int4", keeps_ends=False)
    small = as_quantized(add_fake_quantization(lathe.load(RESIDUAL), [{"x": x}], options, threads=1))
    with lathe.compile(lathe.export(small), tune="off", threads=1) as session:
        assert "4 products of bytes" in session.explain()


def test_wrong_choices_and_missing_data_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"weights: expected one of int8, int4, .*, got 'int3'"):
        AwareQuantization("int3")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="activations: expected one of int8, float32, got 'int4'"):
        AwareQuantization(activations="int4")  # type: ignore[arg-type]
    graph = lathe.load(RESIDUAL)
    with pytest.raises(DataError, match="expected at least one batch of data, got none"):
        add_fake_quantization(graph, [])
    with pytest.raises(UnsupportedError, match="skip: expected names of nodes, got none"):
        add_fake_quantization(graph, [], AwareQuantization(skip=frozenset({"none"})))
