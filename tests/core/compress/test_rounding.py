"""Rounding modes and learned rounding, against all choices of small weights and against ONNX Runtime."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import lathe
from lathe.core.compress.grids import make_grid
from lathe.core.compress.learned_rounding import learn_rounding
from lathe.core.compress.product_moments import as_matrices, collect_product_moments, from_matrices
from lathe.core.compress.products import prepare
from lathe.core.compress.rounding import ROUNDINGS
from lathe.core.compress.static import StaticQuantization, calibrate, quantize_static
from lathe.core.compress.weight_only import WeightQuantization, quantize_weights
from lathe.core.errors import DataError, UnsupportedError
from lathe.core.ir.types import DType
from tests.core.small_models import model
from tests.random_numbers import RNG

F = np.float32
LAYERS = [
    ("n,4,9,9", "y = Conv<pads = [1,1,1,1]>(x, w)", (6, 4, 3, 3)),
    ("n,4,9,8", "y = Conv<strides = [2,1], pads = [0,1,2,0]>(x, w)", (6, 4, 3, 2)),
    ("n,4,9,9", 'y = Conv<strides = [2,2], auto_pad = "SAME_UPPER", group = 2>(x, w)', (6, 2, 3, 3)),
    ("n,4,9,9", "y = Conv<dilations = [2,1], pads = [2,0,1,0]>(x, w)", (6, 4, 3, 3)),
    ("n,4,9", "y = Conv<group = 4>(x, w)", (8, 1, 3)),
    ("n,5,16", "y = MatMul(x, w)", (16, 12)),
    ("n,16", "y = Gemm<transB = 1>(x, w)", (12, 16)),
]


def layer(shape: str, node: str, weights: np.ndarray) -> bytes:
    result = {"Conv": shape.replace("9", "h").replace("8", "v").replace("n,4", f"n,{len(weights)}")}
    last = result.get(node[4:8], ",".join([*shape.split(",")[:-1], "12"]))
    proto = onnx.load_model_from_string(model(f"float[{shape}] x => float[{last}] y", node))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    return bytes(proto.SerializeToString())


def run(data: bytes, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0], np.float64)


def correlated(rows: int, width: int) -> np.ndarray:
    return RNG.standard_normal((rows, 5)) @ RNG.standard_normal((5, width)) + RNG.standard_normal((rows, width)) / 4


def errors(codes: np.ndarray, weights: np.ndarray, scale: np.ndarray, gram: np.ndarray) -> np.ndarray:
    difference = codes * scale - weights
    return np.asarray((difference * (gram @ difference)).sum(axis=0))


def test_learned_rounding_is_close_to_the_best_of_all_choices() -> None:
    """In the mean over 60 columns of 8 weights with inputs that depend on each other; 256 choices a column."""
    weights, x = RNG.standard_normal((8, 60)).astype(F), correlated(500, 8)
    gram, scale = (x.T @ x / len(x)).astype(F), np.abs(weights).max(axis=0) / 7
    down = np.floor(weights / scale)
    best = np.min([errors(down + np.array(up)[:, None], weights, scale, gram) for up in product((0, 1), repeat=8)], 0)
    codes = learn_rounding(weights, gram, scale, 0, (-8, 7))
    nearest = errors(np.rint(weights / scale), weights, scale, gram)
    found = errors(codes, weights, scale, gram)
    assert ((codes == down) | (codes == down + 1)).all()
    assert (found <= nearest * (1 + 1e-5)).all()
    assert np.median(found / best) < 1.2
    assert found.mean() < 1.6 * best.mean() < 0.7 * nearest.mean()


def test_learned_codes_stay_within_the_limits() -> None:
    weights, x = RNG.standard_normal((16, 9)).astype(F) * 3, correlated(200, 16)
    codes = learn_rounding(weights, (x.T @ x).astype(F), np.full(9, 0.25), 3, (0, 15))
    assert codes.min() == 0
    assert codes.max() == 15


@pytest.mark.sample(3)
@pytest.mark.parametrize(("shape", "node", "dims"), LAYERS)
def test_the_moments_give_the_error_that_onnx_runtime_measures(shape: str, node: str, dims: tuple[int, ...]) -> None:
    """The mean square of the layer's results with the weights D is the trace of D^T G D, also with padding."""
    difference = RNG.standard_normal(dims).astype(F)
    data = layer(shape, node, difference)
    graph = prepare(lathe.load(data))
    x = RNG.standard_normal((10, *map(int, shape.split(",")[1:]))).astype(F)
    ((_, moments),) = collect_product_moments(graph, {0: difference}, [{"x": x[:4]}, {"x": x[4:]}], threads=1)
    matrices = as_matrices(graph.nodes[0], difference)
    assert np.array_equal(from_matrices(graph.nodes[0], matrices, dims), difference)
    mine = sum(
        errors(np.zeros_like(one), -one, np.ones(1), gram).sum()
        for one, gram in zip(matrices, moments.grams, strict=True)
    )
    theirs = run(data, x)
    axis = 1 if node[4:8] == "Conv" else -1
    assert mine == pytest.approx((theirs**2).mean() * theirs.shape[axis], rel=1e-4)


@pytest.mark.sample(5)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("shape", "node", "dims"), LAYERS)
def test_learned_rounding_of_static_weights_loses_less(
    shape: str, node: str, dims: tuple[int, ...], per_channel: bool
) -> None:
    """The weights alone are rounded here: the products of the stored weights run in float32 in ONNX Runtime."""
    weights = RNG.standard_normal(dims).astype(F)
    extents = tuple(map(int, shape.split(",")[1:]))
    x = (correlated(300, int(np.prod(extents))).reshape(-1, *extents) / 4 + 1).astype(F)  # as after a ReLU: a mean
    exact, found = run(layer(shape, node, weights), x[200:]), {}
    for rounding in ("nearest", "adaround", "floor"):
        options = StaticQuantization(per_channel=per_channel, rounding=rounding)  # type: ignore[arg-type]
        small = quantize_static(lathe.load(layer(shape, node, weights)), [{"x": x[:200]}], options, threads=1)
        product = next(each for each in small.nodes if each.op in ("Conv", "MatMul", "Gemm"))
        stored = product.required_input(1).producer
        assert stored is not None
        codes, scale = (small.constants[stored.required_input(place)] for place in (0, 1))
        spread = [1] * codes.ndim
        spread[stored.attrs["axis"]] = -1  # type: ignore[call-overload]
        rounded = (codes * scale.reshape(spread)).astype(F)
        found[rounding] = np.sqrt(((run(layer(shape, node, rounded), x[200:]) - exact) ** 2).mean())
        onnx.checker.check_model(onnx.load_model_from_string(lathe.export(small)), full_check=True)
    assert found["adaround"] < 0.9 * found["nearest"] < 0.9 * found["floor"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("method", ["nearest", "awq"])
def test_learned_rounding_of_weights_of_few_bits_loses_less(bits: int, symmetric: bool, method: Any) -> None:
    """On rows that were not used, in ONNX Runtime."""
    weights = RNG.standard_normal((96, 48)).astype(F)
    data = layer("n,96", "y = MatMul(x, w)", weights)
    proto = onnx.load_model_from_string(data)
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 48
    data = proto.SerializeToString()
    x = correlated(700, 96).astype(F)
    exact, found = run(data, x[600:]), {}
    for rounding in ("nearest", "adaround"):
        options = WeightQuantization(bits, 32, symmetric, method, rounding)  # type: ignore[arg-type]
        small = lathe.export(quantize_weights(lathe.load(data), options, [{"x": x[:600]}], threads=1))
        if bits == 4:
            got = run(small, x[600:])
        else:  # ONNX Runtime has no types of 2 bits
            with lathe.compile(small, threads=1, tune="off") as session:
                got = session.run({"x": x[600:]})["y"]
        found[rounding] = np.sqrt(((got - exact) ** 2).mean())
    assert found["adaround"] < 0.8 * found["nearest"]


def test_rounding_modes_choose_the_neighbours_that_they_name() -> None:
    grid = make_grid(-1.27, 1.27, DType.INT8, symmetric=True)
    numbers = RNG.uniform(-1.2, 1.2, 20_000).astype(F)
    ratio = numbers / grid.scale
    assert np.array_equal(grid.quantized(numbers, rounding="floor"), np.floor(ratio))
    assert np.array_equal(grid.quantized(numbers, rounding="ceil"), np.ceil(ratio))
    drawn = grid.quantized(numbers, rounding="stochastic", seed=3)
    assert abs((drawn - ratio).mean()) < 5 * np.sqrt(1 / 6 / len(ratio)), "5 standard deviations of the mean"
    assert np.array_equal(drawn, grid.quantized(numbers, rounding="stochastic", seed=3))
    assert not np.array_equal(drawn, grid.quantized(numbers, rounding="stochastic", seed=4))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_every_rounding_of_a_static_model_runs_alike_in_onnx_runtime(rounding: Any) -> None:
    shape, node, dims = LAYERS[0]
    data, x = layer(shape, node, RNG.standard_normal(dims).astype(F)), RNG.standard_normal((20, 4, 9, 9)).astype(F)
    small = lathe.export(
        quantize_static(lathe.load(data), [{"x": x}], StaticQuantization(rounding=rounding), threads=1)
    )
    with lathe.compile(small, threads=1, tune="off") as session:
        mine = session.run({"x": x})["y"]
    assert np.abs(mine - run(small, x)).max() < 1e-4 * np.abs(mine).max()


def test_unknown_roundings_and_missing_data_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"rounding: expected one of nearest, stochastic, .*, got 'up'"):
        StaticQuantization(rounding="up")  # type: ignore[arg-type]
    graph = lathe.load(layer("n,64", "y = Gemm<transB = 1>(x, w)", np.ones((12, 64), F)))
    options = WeightQuantization(rounding="adaround", least_elements=1)
    with pytest.raises(DataError, match="expected at least one batch of data for adaround, got none"):
        quantize_weights(graph, options)
    with pytest.raises(DataError, match=r"%x: expected finite numbers"):
        calibrate(graph, [{"x": np.full((1, 64), np.inf, F)}], StaticQuantization(rounding="adaround"))
