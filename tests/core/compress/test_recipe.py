"""Methods of compression as data: the graphs of `lathe.quantize` and `lathe.quantize_weights`, and clear refusals."""

from __future__ import annotations

import json
from typing import Any, get_args

import numpy as np
import onnxruntime as ort
import pytest

import lathe
from lathe.core.compress.layer_report import report_layers
from lathe.core.compress.recipe import (
    METHODS,
    Channels,
    Dynamic,
    Method,
    Mixed,
    Static,
    WeightOnly,
    Zeros,
    method_from_values,
)
from lathe.core.errors import DataError, UnsupportedError
from tests.core.small_models import model
from tests.random_numbers import RNG, made_at_import

F = np.float32


def wide() -> bytes:
    """Two products of [64, 64]."""
    rows = (", ".join(f"{value:.4f}" for value in RNG.standard_normal(4096)) for _ in "wv")
    constants = ", ".join(f"float[64,64] {name} = {{{row}}}" for name, row in zip("wv", rows, strict=True))
    return model("float[n,64] x => float[n,64] y", "h = MatMul(x, w) r = Relu(h) y = MatMul(r, v)", constants)


WIDE = made_at_import(wide)
DATA: dict[str, Any] = made_at_import(lambda: {"x": RNG.standard_normal((64, 64)).astype(F)})


def stable_text(value: object) -> str | None:
    """The text of a parameter as a part of a test's name; None if it contains an address, which each run changes."""
    text = str(value)
    return None if " at 0x" in text else text


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("values", "made"),
    [
        ({"kind": "static"}, lambda: lathe.quantize(WIDE, DATA, threads=1)),
        (
            {"kind": "static", "calibration": "mse", "symmetric": True, "per_tensor": True, "correct_bias": True},
            lambda: lathe.quantize(
                WIDE, DATA, calibration="mse", symmetric=True, per_channel=False, corrects_bias=True, threads=1
            ),
        ),
        (
            {"kind": "static", "smoothing": 0.5, "activations": "int8", "percentile": 99.0},
            lambda: lathe.quantize(WIDE, DATA, smoothing=0.5, activations="int8", percentile=99.0, threads=1),
        ),
        (
            {"kind": "static", "rounding": "adaround", "equalize": True},
            lambda: lathe.quantize(WIDE, DATA, rounding="adaround", equalizes=True, threads=1),
        ),
        (
            {"kind": "static", "rounding": "stochastic", "seed": 5},
            lambda: lathe.quantize(WIDE, DATA, rounding="stochastic", seed=5, threads=1),
        ),
        ({"kind": "dynamic"}, lambda: lathe.quantize_dynamic(WIDE)),
        (
            {"kind": "dynamic", "per_tensor": True, "rounding": "stochastic", "seed": 2},
            lambda: lathe.quantize_dynamic(WIDE, per_channel=False, rounding="stochastic", seed=2),
        ),
        ({"kind": "channels"}, lambda: lathe.prune_channels(WIDE)),
        (
            {"kind": "channels", "share": 0.3, "measure": "l1", "multiple": 8},
            lambda: lathe.prune_channels(WIDE, 0.3, "l1", 8),
        ),
        ({"kind": "zeros", "sparsity": 0.9, "together": True}, lambda: lathe.prune_weights(WIDE, 0.9, is_global=True)),
        ({"kind": "zeros", "pattern": "2:4"}, lambda: lathe.prune_weights(WIDE, pattern="2:4")),
        ({"kind": "weight-only"}, lambda: lathe.quantize_weights(WIDE)),
        (
            {"kind": "weight-only", "weights": "gptq", "bits": 8, "block": 0, "symmetric": True},
            lambda: lathe.quantize_weights(WIDE, DATA, 8, 0, "gptq", symmetric=True, threads=1),
        ),
        (
            {"kind": "weight-only", "rounding": "stochastic", "seed": 3},
            lambda: lathe.quantize_weights(WIDE, rounding="stochastic", seed=3),
        ),
        (
            {"kind": "weight-only", "rounding": "adaround"},
            lambda: lathe.quantize_weights(WIDE, DATA, rounding="adaround", threads=1),
        ),
    ],
    ids=stable_text,
)
def test_a_table_makes_the_graph_that_the_arguments_make(values: dict[str, Any], made: Any) -> None:
    expected = lathe.export(made())
    assert lathe.export(lathe.compress(WIDE, values, DATA, threads=1)) == expected
    method = method_from_values(json.loads(json.dumps(values)))
    assert lathe.export(lathe.compress(lathe.load(WIDE), method, DATA, threads=1)) == expected


def test_every_kind_has_a_table_of_its_own_name() -> None:
    assert set(get_args(get_args(Method)[0])) == set(METHODS.values())
    for kind, table in METHODS.items():
        assert table.model_fields["kind"].default == kind


def test_a_static_method_measures_sensitivities_if_it_is_told_to() -> None:
    graph = lathe.load(WIDE)
    batches = [{"x": DATA["x"][:32]}, {"x": DATA["x"][32:]}]
    plain, measured = (Static(sensitivity=flag).compress(graph, iter(batches), 1) for flag in (False, True))
    assert lathe.export(plain.graph) == lathe.export(measured.graph)
    assert not plain.choices and len(measured.choices) == 2
    assert all(0 < layer.error < 0.05 and layer.exact_ns > 0 and layer.is_quantized for layer in measured.choices)


@pytest.mark.parametrize(
    "method",
    [Static(), Dynamic(), WeightOnly(bits=4), WeightOnly(bits=4, activations="int8")],
    ids=["static", "dynamic", "weight-only", "int8-activations"],
)
def test_the_report_of_layers_has_the_errors_that_onnx_runtime_finds(method: Any) -> None:
    graph = lathe.load(WIDE)
    made = method.compress(graph, [DATA], 1).graph
    layers = report_layers(graph, made, DATA, 1)
    own = getattr(method, "activations", "")
    types = {"static": ("uint8", "int8"), "dynamic": ("uint8", "int8"), "weight-only": (own, "uint4")}[method.kind]
    assert [(layer.op, layer.weights, layer.inputs_type, layer.weights_type) for layer in layers] == [
        ("MatMul", 4096, *types)
    ] * 2
    exact, got = (ort.InferenceSession(content).run(None, DATA)[0] for content in (WIDE, lathe.export(made)))
    error = np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean())
    assert layers[-1].error == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, r"kind: expected one of static, mixed, dynamic, weight-only, channels, zeros, got None"),
        ({"kind": ["static"]}, r"kind: expected one of static, .*, zeros, got \['static'\]"),
        ({"kind": "static", "calibrate": "mse"}, r"calibrate: there is no such key, did you mean `calibration`\?"),
        ({"kind": "static", "smoothing": 1}, r"smoothing: expected less than 1, got 1"),
        ({"kind": "mixed"}, r"budget: is missing"),
        ({"kind": "mixed", "budget": 0.0}, r"budget: expected more than 0, got 0\.0"),
        ({"kind": "static", "skip": "c1"}, r"skip: expected a list, got 'c1'"),
        ({"kind": "static", "skip": ["none"]}, r"skip: expected names of nodes, got none"),
        ({"kind": "static", "rounding": "up"}, r"rounding: expected 'nearest', .*'adaround', got 'up'"),
        (
            {"kind": "dynamic", "rounding": "adaround"},
            r"rounding: expected 'nearest', 'stochastic', 'floor' or 'ceil', got 'adaround'",
        ),
        ({"kind": "dynamic", "calibration": "mse"}, r"calibration: there is no such key"),
        ({"kind": "channels", "share": 1.0}, r"share: expected less than 1, got 1\.0"),
        ({"kind": "channels", "measure": "l3"}, r"measure: expected 'l1' or 'l2', got 'l3'"),
        ({"kind": "channels", "multiple": 0}, r"multiple: expected at least 1, got 0"),
        ({"kind": "zeros", "sparsity": 0.0}, r"sparsity: expected more than 0, got 0\.0"),
        ({"kind": "zeros", "pattern": "4:2"}, r"pattern: expected N:M with N below M"),
        ({"kind": "weight-only", "seed": -1}, r"seed: expected at least 0, got -1"),
        ({"kind": "weight-only", "seed": object()}, r"expected text, numbers, booleans, lists and tables"),
    ],
    ids=stable_text,
)
def test_an_invalid_table_is_refused_by_field(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        lathe.compress(WIDE, values, DATA)


def test_a_check_finds_what_cannot_be_compressed_without_a_run() -> None:
    narrow = lathe.load(model("float[n,4] x => float[n,4] y", "y = Add(x, one)", "float[4] one = {1, 1, 1, 1}"))
    for method in (Static(), Mixed(budget=0.1), Dynamic(), WeightOnly(), Channels(), Zeros()):
        with pytest.raises(UnsupportedError, match=r"expected (a .*MatMul or Gemm|layers with channels) .*got none"):
            method.check(narrow)
        method.check(lathe.load(WIDE))
        with pytest.raises(UnsupportedError, match=r"skip: expected names of nodes, got z"):
            method.model_copy(update={"skip": ("z",)}).check(lathe.load(WIDE))


@pytest.mark.parametrize("made", [lambda: lathe.quantize(WIDE, DATA, threads=1), lambda: lathe.quantize_dynamic(WIDE)])
def test_a_model_of_integers_is_not_compressed_again(made: Any) -> None:
    """Not by any method, from a table or from a function; a model whose weights alone have few bits is."""
    integers = made()
    complaint = r"expected a model that computes with floats, but node '.+' \(MatMul.*\) computes with integers"
    for method in (Static(), Mixed(budget=0.1), Dynamic(), WeightOnly(), Channels(), Zeros()):
        with pytest.raises(UnsupportedError, match=complaint):
            method.check(integers)
    for again in (
        lambda: lathe.quantize(integers, DATA),
        lambda: lathe.quantize(lathe.export(integers), DATA, budget=0.1),
        lambda: lathe.quantize_weights(integers),
        lambda: lathe.quantize_dynamic(integers),
        lambda: lathe.prune_channels(integers),
        lambda: lathe.prune_weights(integers),
    ):
        with pytest.raises(UnsupportedError, match=complaint):
            again()
    Static().check(lathe.quantize_weights(WIDE))
    Static().check(lathe.load(model(
        "uint8[n,64] b => uint8[n,64] q",
        "x = DequantizeLinear(b, s) h = Relu(x) y = MatMul(h, w) q = QuantizeLinear(y, s)",
        f"float s = {{0.1}}, float[64,64] w = {{{', '.join(['0.5'] * 4096)}}}",
    )))  # fmt: skip


def test_methods_that_need_data_say_so() -> None:
    needing = (Static(), Mixed(budget=0.1), WeightOnly(weights="gptq"), WeightOnly(rounding="adaround"))
    assert all(method.needs_data for method in needing)
    assert not any(method.needs_data for method in (WeightOnly(), Dynamic(), Channels(), Zeros()))
    with pytest.raises(DataError, match=r"expected at least one batch of data"):
        lathe.compress(WIDE, Static())
