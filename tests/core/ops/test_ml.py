"""Operators of the ai.onnx.ml domain against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import ModelError
from lathe.core.frontends.export import export
from tests.core.ops.small_models import agree, ml, model


def floats(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(4).normal(0, 3, shape).astype(dtype)


@pytest.mark.parametrize("x", [floats(3, 4), floats(4), floats(2, 3, 4), np.int64([[1, 2, 3, 4]])])
def test_feature_extractor(x: Any) -> None:
    agree([ml("ArrayFeatureExtractor", "x", "i")], {"x": x, "i": np.int64([3, 0])}, "y")


def test_binarizer() -> None:
    agree([ml("Binarizer", "x", threshold=0.5)], {"x": floats(3, 4, 5)}, "y")


WORDS = np.array([["a", "b"], ["d", "c"]], object)


@pytest.mark.parametrize(
    ("x", "table"),
    [
        (WORDS, {"keys_strings": ["a", "b", "c"], "values_int64s": [0, 1, 2], "default_int64": 42}),
        (WORDS, {"keys_strings": ["a", "b"], "values_strings": ["x", "y"]}),
        (WORDS, {"keys_strings": ["a"], "values_floats": [0.5]}),
        (np.int64([3, 1]), {"keys_int64s": [1, 2], "values_floats": [0.5, 1.5], "default_float": 9.0}),
        (
            np.int64([[3, -1], [7, 0], [2**62, -(2**63)], [2**63 - 1, 8]]),
            {"keys_int64s": [-1, 3, 7], "values_floats": [0.5, 1.5, 2.5], "default_float": 9.0},
        ),
        (
            np.float32([3, -1, -0.0, 2.5, 7, 8, np.inf, -np.inf, np.nan, 1e30]),
            {"keys_floats": [-1.0, 3.0, 0.0, 7.0], "values_int64s": [1, 2, 3, 4], "default_int64": 9},
        ),
        (np.float32([1 << 25, 3e38, (1 << 25) + 4]), {"keys_floats": [3e38], "values_floats": [1.0]}),
        (
            np.float32([1 << 25, (1 << 25) - 1, (1 << 25) + 4]),
            {"keys_floats": [float(1 << 25), float((1 << 25) + 4)], "values_int64s": [5, 6]},
        ),
        (np.int64([1, 1 << 40, 5]), {"keys_int64s": [1 << 40, 1], "values_int64s": [7, 8], "default_int64": -3}),
        (np.int64([2, 5, 9]), {"keys_int64s": [5, 2], "values_strings": ["five", "two"]}),
        (np.float32([1.5, np.nan, 2]), {"keys_floats": [1.5, np.nan], "values_int64s": [7, 8]}),
        (
            np.float64([1.5, 2]),
            {"keys_tensor": np.float64([2]), "values_tensor": np.int64([5]), "default_tensor": np.int64([6])},
        ),
    ],
)
def test_label_encoder(x: Any, table: dict[str, Any]) -> None:
    agree([ml("LabelEncoder", "x", **table)], {"x": x}, "y")


@pytest.mark.parametrize(
    ("default", "message"),
    [
        (np.array(["a"], object), "default_tensor is string, expected int32 as values_tensor"),
        (np.array([1.5]), "default_tensor is float64, expected int32"),
        (np.array([1, 2], np.int32), "2 defaults"),
    ],
)
def test_a_default_of_another_type_is_refused(default: Any, message: str) -> None:
    tables = {"keys_tensor": np.array([1, 2]), "values_tensor": np.array([3, 4], np.int32), "default_tensor": default}
    with pytest.raises(ModelError, match=message):
        lathe.load(model([ml("LabelEncoder", "x", **tables)], {"x": np.array([1])}, ["y"]))


def test_of_two_values_of_a_key_the_last_one_counts() -> None:
    """ONNX Runtime takes the first one, the evaluator of ONNX the last."""
    table = {"keys_int64s": [-1, 3, 7, 3], "values_floats": [0.5, 1.5, 2.5, 3.5]}
    feeds = {"x": np.int64([3, 7])}
    data = model([ml("LabelEncoder", "x", **table)], feeds, ["y"])
    with lathe.compile(data, threads=1, tune="off") as session:
        assert session.run(feeds)["y"].tolist() == lathe.interpret(lathe.load(data), feeds)["y"].tolist() == [3.5, 2.5]


def forest(dtype: Any = np.float32, **attrs: Any) -> dict[str, Any]:
    """Two trees over two features: one of three nodes, one of a single node."""
    given: dict[str, Any] = {
        "n_targets": 2,
        "tree_roots": [0, 3],
        "nodes_modes": np.uint8([0, 1, 3, 2]),
        "nodes_featureids": [0, 1, 0, 1],
        "nodes_splits": np.array([0.5, -1.0, 1.5, 0.25], dtype),
        "nodes_truenodeids": [1, 0, 2, 4],
        "nodes_trueleafs": [0, 1, 1, 1],
        "nodes_falsenodeids": [2, 1, 3, 5],
        "nodes_falseleafs": [0, 1, 1, 1],
        "leaf_targetids": [0, 1, 0, 1, 0, 1],
        "leaf_weights": np.array([5.25, 12.5, -12.25, 7.5, 0.5, -0.5], dtype),
    }
    return given | attrs


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("how", [0, 1, 2, 3])
def test_trees_against_a_walk_by_hand(dtype: Any, how: int) -> None:
    x = floats(40, 2, dtype=dtype)
    expected = [_by_hand(row, how) for row in x]
    attrs = forest(dtype, aggregate_function=how)
    got = lathe.interpret(lathe.load(model([ml("TreeEnsemble", "x", **attrs)], {"x": x}, ["y"])), {"x": x})["y"]
    np.testing.assert_allclose(got, np.array(expected, dtype), 1e-6)
    assert got.dtype == dtype


def _by_hand(row: Any, how: int) -> list[float]:
    if row[0] <= 0.5:
        first = (0, 5.25) if row[1] < -1.0 else (1, 12.5)
    else:
        first = (0, -12.25) if row[0] > 1.5 else (1, 7.5)
    second = (0, 0.5) if row[1] >= 0.25 else (1, -0.5)
    targets = [[weight for target, weight in (first, second) if target == i] for i in (0, 1)]
    combine = [lambda w: sum(w) / 2, sum, lambda w: min(w, default=0), lambda w: max(w, default=0)][how]
    return [combine(weights) for weights in targets]


def test_trees_against_onnx_runtime() -> None:
    agree([ml("TreeEnsemble", "x", **forest())], {"x": floats(40, 2)}, "y")


@pytest.mark.parametrize(("how", "weight"), [(2, -np.inf), (2, np.inf), (3, -np.inf), (3, np.inf)])
def test_leaf_weights_may_be_infinite(how: int, weight: float) -> None:
    weights = np.full(6, weight, np.float32)
    attrs = forest(aggregate_function=how, leaf_weights=weights, leaf_targetids=[0] * 6)
    agree([ml("TreeEnsemble", "x", **attrs)], {"x": floats(5, 2)}, "y")
    assert scores(floats(5, 2), **{name: attrs[name] for name in attrs}).tolist() == [[weight, 0]] * 5


def scores(x: Any, **attrs: Any) -> Any:
    data = model([ml("TreeEnsemble", "x", **forest(**attrs))], {"x": x}, ["y"])
    return lathe.interpret(lathe.load(data), {"x": x})["y"]


def test_post_transforms() -> None:
    """ONNX Runtime ignores targets without a leaf here; the operator's specification does not."""
    x = floats(40, 2)
    plain = scores(x)
    powers = np.exp(plain)
    np.testing.assert_allclose(scores(x, post_transform=1), powers / powers.sum(1, keepdims=True), 1e-5)
    np.testing.assert_allclose(scores(x, post_transform=2), powers / (1 + powers), 1e-5)
    powers[plain == 0] = 0
    np.testing.assert_allclose(scores(x, post_transform=3), powers / powers.sum(1, keepdims=True), 1e-5)


def test_probit_is_the_quantile_of_the_normal_distribution() -> None:
    weights = np.float32([0.5, 0.975, 0.8413447, 0.25, 0, 0])
    got = scores(np.float32([[0, 0]]), post_transform=4, leaf_weights=weights, leaf_targetids=[0, 1, 0, 1, 1, 1])
    assert np.isnan(got[0, 0])
    np.testing.assert_allclose(got[0, 1], 1.959964, 1e-4)


def test_membership_and_missing_values() -> None:
    members = np.float32([1.5, 2.5, np.nan, -1.0])
    attrs = forest(nodes_modes=np.uint8([6, 1, 6, 2]), membership_values=members)
    x = np.float32([[1.5, 0], [-1, 3], [0, 0], [2.5, -4]])
    agree([ml("TreeEnsemble", "x", **attrs)], {"x": x}, "y")
    attrs = forest(nodes_missing_value_tracks_true=[1, 0, 1, 0])
    got = lathe.interpret(
        lathe.load(model([ml("TreeEnsemble", "x", **attrs)], {"x": x}, ["y"])), {"x": np.float32([[np.nan] * 2] * 4)}
    )["y"]
    np.testing.assert_array_equal(got, [[0, 12.0]] * 4)  # node 0: true, node 1: false, the second tree: false


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"nodes_truenodeids": [0, 0, 2, 4]}, "have a cycle"),
        ({"nodes_truenodeids": [1, 0, 2, 6]}, "leads to a node or leaf that does not exist"),
        ({"leaf_targetids": [0, 1, 0, 1, 0, 2]}, "expected numbers below 2"),
        ({"tree_roots": [4]}, "tree_roots"),
        ({"nodes_featureids": [0, 1]}, "nodes_featureids has 2 items"),
        ({"nodes_missing_value_tracks_true": [1, 0, 1]}, "nodes_missing_value_tracks_true has 3 items, expected one"),
        ({"nodes_modes": np.uint8([9, 1, 3, 2])}, "nodes_modes has 9, expected 0 to 6"),
        ({"nodes_modes": np.uint8([6, 1, 3, 2])}, "no membership_values"),
    ],
)
def test_malformed_trees_are_refused(attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        lathe.load(model([ml("TreeEnsemble", "x", **forest(**attrs))], {"x": floats(2, 2)}, ["y"]))


def test_export_imports_the_domain() -> None:
    graph = lathe.load(model([ml("TreeEnsemble", "x", **forest())], {"x": floats(2, 2)}, ["y"]))
    assert str(lathe.load(export(graph))) == str(graph)
