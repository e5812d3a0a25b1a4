"""Weights of few bits: files that ONNX Runtime runs alike, and errors no larger than its own quantizer's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi._pybind_state import quantize_matmul_4bits

import lathe
from lathe.core.compress.block_grids import choose_grid, limits_of
from lathe.core.compress.gptq import round_with_corrections
from lathe.core.compress.moments import Moments
from lathe.core.compress.weight_only import WeightQuantization, quantize_weights
from lathe.core.errors import DataError, UnsupportedError
from tests.core.small_models import model
from tests.random_numbers import RNG

F = np.float32
K, H, N = 96, 160, 48


def layers(first: Any, second: Any, channels: Any) -> bytes:
    """A normalization, two products with an activation between them; the second weight is transposed."""
    proto = onnx.load_model_from_string(
        model(
            f"float[n,{K}] x => float[n,{N}] y",
            "l = LayerNormalization(x, g, z) h = MatMul(l, v) a = Relu(h) y = Gemm<transB = 1>(a, w, c)",
            f"float[{N}] c = {{{', '.join(['0.5'] * N)}}}",
        )
    )
    named = {"g": channels, "z": np.zeros(K, F), "v": first, "w": np.ascontiguousarray(second.T)}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in named.items())
    return bytes(proto.SerializeToString())


@pytest.fixture
def network() -> bytes:
    first, second = (RNG.standard_normal(shape).astype(F) / 8 for shape in ((K, H), (H, N)))
    return layers(first, second, np.exp(RNG.standard_normal(K) * 1.5).astype(F))


@pytest.fixture
def rows() -> np.ndarray:
    """Rows of numbers that depend on each other."""
    return (RNG.standard_normal((600, 24)) @ RNG.standard_normal((24, K))).astype(F)


def batches(array: np.ndarray) -> list[dict[str, np.ndarray]]:
    return [{"x": array[start : start + 128]} for start in range(0, len(array), 128)]


def run(data: bytes, x: np.ndarray) -> np.ndarray:
    with lathe.compile(data, threads=1, tune="off") as session:
        return np.asarray(session.run({"x": x})["y"])


def plainly(data: bytes, x: np.ndarray) -> np.ndarray:
    """ONNX Runtime's result without optimizations, which would round the rows to 8 bits."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()))


@pytest.mark.sample(3)
@pytest.mark.parametrize("method", ["nearest", "gptq", "awq"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "block"), [(4, 32), (4, 128), (4, 0), (8, 16), (8, 0)])
def test_onnx_runtime_runs_it_alike(
    network: bytes, rows: np.ndarray, bits: int, block: int, symmetric: bool, method: Any
) -> None:
    options = WeightQuantization(bits, block, symmetric, method)
    data = lathe.export(quantize_weights(lathe.load(network), options, batches(rows), threads=1))
    onnx.checker.check_model(onnx.load_model_from_string(data), full_check=True)
    exact, got, theirs = plainly(network, rows[:50]), run(data, rows[:50]), plainly(data, rows[:50])
    assert error(got, theirs) < 1e-4
    assert error(got, exact) < {4: 0.2, 8: 0.02}[bits]


@pytest.mark.sample(3)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_and_awq_lose_less_than_rounding(network: bytes, rows: np.ndarray, bits: int, symmetric: bool) -> None:
    """On rows that were not used for calibration."""
    exact, found = plainly(network, rows[500:]), {}
    for method in ("nearest", "gptq", "awq"):
        options = WeightQuantization(bits, 32, symmetric, method)  # type: ignore[arg-type]
        small = quantize_weights(lathe.load(network), options, batches(rows[:500]), threads=1)
        found[method] = error(run(lathe.export(small), rows[500:]), exact)
    assert found["gptq"] < 0.75 * found["nearest"]
    assert found["awq"] < 0.95 * found["nearest"]


@pytest.mark.parametrize("symmetric", [False, True])
def test_rounding_to_the_nearest_loses_no_more_than_onnx_runtimes_quantizer(symmetric: bool) -> None:
    weights = RNG.standard_normal((K, N)).astype(F)
    packed, zeros = np.zeros((N, K // 32, 16), np.uint8), np.zeros((N, (K // 32 + 1) // 2), np.uint8)
    scales = np.zeros(N * (K // 32), F)
    quantize_matmul_4bits(packed, weights, scales, zeros, 32, N, K, symmetric)
    halves = np.stack([packed & 15, packed >> 4], axis=-1).reshape(N, K // 32, 32).astype(F)
    points = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(N, -1)[:, : K // 32].astype(F)
    theirs = (halves - (8 if symmetric else points[..., None])) * scales.reshape(N, K // 32, 1)
    grid = choose_grid(weights, 4, 32, symmetric)
    mine = grid.dequantized(grid.quantized(weights))
    loss = ((theirs.reshape(N, K).T - weights) ** 2).sum()
    assert loss < 0.1 * (weights**2).sum(), "the format of its codes is read rightly"
    assert ((mine - weights) ** 2).sum() <= loss


def test_gptq_is_optimal_brain_quantization() -> None:
    """Against its definition: after each row, the others take the values that minimise the error (least squares)."""
    weights, x = RNG.standard_normal((6, 5)).astype(F), RNG.standard_normal((400, 6))
    gram = (x.T @ x / len(x)).astype(F)
    grid, codes = round_with_corrections(weights, gram, 4, 0, symmetric=True)
    damped = gram + 0.01 * np.diag(gram).mean() * np.eye(6)
    left = weights.astype(np.float64)
    for row in range(6):
        low, high = limits_of(grid.dtype)
        expected = (np.rint(left[row] / grid.scale[0])).clip(low, high)
        np.testing.assert_array_equal(codes[row], expected)
        step = expected * grid.scale[0] - left[row]
        rest = slice(row + 1, 6)
        # The minimum over the later rows d of the quadratic form of (step, d).
        left[rest] += -np.linalg.solve(damped[rest, rest], np.outer(damped[rest, row], step)) if row < 5 else 0


def test_a_block_across_two_groups_of_corrections_gets_them_all() -> None:
    """Blocks of 96 rows, corrections in groups of 128: as good as blocks that do not cross a group."""
    weights = RNG.standard_normal((384, 40)).astype(F)
    x = RNG.standard_normal((2000, 60)) @ RNG.standard_normal((60, 384))
    gram = (x.T @ x / len(x)).astype(F)

    def loss(block: int) -> float:
        grid, codes = round_with_corrections(weights, gram, 4, block, symmetric=False)
        difference = grid.dequantized(codes) - weights
        return float((difference * (gram @ difference)).sum())

    assert loss(96) < 1.05 * loss(128)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_roundings(bits: int, symmetric: bool) -> None:
    weights = RNG.standard_normal((64, 300)).astype(F)
    grid = choose_grid(weights, bits, 32, symmetric)
    low, high = limits_of(grid.dtype)
    scale = np.repeat(grid.scale, 32, axis=0)
    whole = weights / scale + np.repeat(grid.zero, 32, axis=0)  # in codes; a negative scale turns the order round
    is_within = (whole >= low) & (whole <= high)
    for rounding, sign in (("floor", -1), ("ceil", 1)):
        step = (grid.quantized(weights, rounding) - whole)[is_within] * sign  # type: ignore[arg-type]
        assert step.min() > -1e-4 and step.max() < 1.0001
    mean = np.mean([grid.dequantized(grid.quantized(weights, "stochastic", seed)) for seed in range(400)], axis=0)
    assert np.abs((mean - weights) / scale)[is_within].max() < 0.15
    first, again = (grid.quantized(weights, "stochastic", 7) for _ in range(2))
    np.testing.assert_array_equal(first, again)


def test_a_range_is_clipped_where_that_loses_less() -> None:
    weights = RNG.standard_normal((64, 20)).astype(F)
    weights[5] *= 6
    grid = choose_grid(weights, 4, 0, symmetric=True)
    whole = np.abs(weights).max(axis=0) / 8
    plain = (np.rint(weights / whole).clip(-8, 7) * whole - weights) ** 2
    assert ((grid.dequantized(grid.quantized(weights)) - weights) ** 2).sum() < 0.9 * plain.sum()


def test_moments_are_those_of_all_rows() -> None:
    rows = RNG.standard_normal((700, 9)).astype(F)
    moments = Moments.empty(9)
    for part in (rows[:100].reshape(4, 25, 9), rows[100:101], rows[101:]):
        moments.add(part)
    np.testing.assert_allclose(moments.gram, rows.T @ rows / 700, atol=1e-5)
    np.testing.assert_allclose(moments.mean_size, np.abs(rows).mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(moments.largest, np.abs(rows).max(axis=0))


def test_products_of_one_input_share_the_factors_of_awq(rows: np.ndarray) -> None:
    """The input is divided once, and a reader that is no such product keeps the undivided one."""
    proto = onnx.load_model_from_string(
        model(f"float[n,{K}] x => float[n,{H}] y", "s = Sigmoid(x) a = MatMul(s, v) b = MatMul(s, w) c = Mul(a, b)"
              " d = ReduceSum<keepdims = 1>(s, t) y = Add(c, d)", "int64[1] t = {1}")
    )  # fmt: skip
    named = {name: RNG.standard_normal((K, H)).astype(F) for name in "vw"}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in named.items())
    data = proto.SerializeToString()
    small = quantize_weights(lathe.load(data), WeightQuantization(8, 32, method="awq"), batches(rows), threads=1)
    assert sum(node.op == "Mul" and node.inputs[0].name == "s" for node in small.nodes) == 1  # type: ignore[union-attr]
    assert error(plainly(lathe.export(small), rows), plainly(data, rows)) < 0.02


def test_memory_bounds_the_moments_that_are_collected_together(
    network: bytes, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = WeightQuantization(4, 32, method="gptq")
    whole = lathe.export(quantize_weights(lathe.load(network), options, batches(rows), threads=1))
    monkeypatch.setattr("lathe.core.compress.calibration.MOST_BYTES", Moments.nbytes(H))
    assert lathe.export(quantize_weights(lathe.load(network), options, iter(batches(rows)), threads=1)) == whole


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"bits": 3}, "bits: expected one of 2, 4, 8, got 3"),
        ({"block": 20}, "block: expected one of 0, 16, 32, 64, 128, 256, got 20"),
        ({"method": "hqq"}, "method: expected one of nearest, gptq, awq, got 'hqq'"),
        ({"rounding": "even"}, "rounding: expected one of nearest, stochastic, floor, ceil, adaround, got 'even'"),
        ({"method": "gptq", "rounding": "floor"}, "rounding: expected nearest with gptq, got 'floor'"),
        ({"skip": ["nothing"]}, "skip: expected names of nodes, got nothing"),
    ],
)
def test_unknown_choices_are_refused(network: bytes, choices: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        lathe.quantize_weights(network, **choices)


def test_what_is_missing_is_named(network: bytes, rows: np.ndarray) -> None:
    with pytest.raises(DataError, match="at least one batch of data for awq, got none"):
        lathe.quantize_weights(network, method="awq")
    with pytest.raises(DataError, match=r"batch 0: %.*: expected finite numbers"):
        lathe.quantize_weights(network, {"x": rows * np.float32(np.nan)}, method="gptq")
    tiny = model("float[n,8] x => float[n,3] y", "y = MatMul(x, w)", f"float[8,3] w = {{{', '.join('1' * 24)}}}")
    with pytest.raises(UnsupportedError, match="constant weights of 4096 or more elements, got none"):
        lathe.quantize_weights(tiny)
