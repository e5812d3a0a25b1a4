"""Linear models, support vector machines and trees of ai.onnx.ml against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lathe
from lathe.core.errors import ModelError
from tests.core.ops.small_models import agree as agree_at
from tests.core.ops.small_models import ml
from tests.core.ops.small_models import model as model_at
from tests.core.ops.test_ml import floats

OPSET = 3  # the newest in which ONNX Runtime takes the older operators of trees

TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"]
LABELS = [{"classlabels_ints": [7, 3, 5]}, {"classlabels_strings": ["x", "y", "z"]}]


def model(nodes: list[onnx.NodeProto], feeds: dict[str, Any], outputs: list[str]) -> bytes:
    return model_at(nodes, feeds, outputs, OPSET)


def agree(nodes: list[onnx.NodeProto], feeds: dict[str, Any], *outputs: str, rtol: float = 1e-6) -> None:
    agree_at(nodes, feeds, *outputs, ml=OPSET, rtol=rtol)


def classifier(op: str, **attrs: Any) -> onnx.NodeProto:
    tensors = {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in attrs.items()}
    return helper.make_node(op, ["x"], ["y", "z"], domain="ai.onnx.ml", **tensors)


def reference(node: onnx.NodeProto, x: Any) -> Any:
    return lathe.interpret(lathe.load(model([node], {"x": x}, list(node.output))), {"x": x})


def numbers(count: int, seed: int) -> list[float]:
    return np.random.default_rng(seed).normal(0, 1, count).astype(np.float32).tolist()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_linear_regressor(transform: str) -> None:
    attrs = {"coefficients": numbers(12, 1), "intercepts": numbers(3, 2), "targets": 3, "post_transform": transform}
    agree([ml("LinearRegressor", "x", **attrs)], {"x": floats(5, 4)}, "y", rtol=1e-5)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("labels", LABELS)
def test_linear_classifier(transform: str, labels: dict[str, Any]) -> None:
    attrs = {"coefficients": numbers(12, 1), "intercepts": numbers(3, 2), "post_transform": transform, **labels}
    agree([classifier("LinearClassifier", **attrs)], {"x": floats(9, 4)}, "y", "z", rtol=1e-5)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_one_score_for_two_classes(transform: str) -> None:
    attrs = {"coefficients": [1.0], "intercepts": [0.0], "post_transform": transform, "classlabels_ints": [3, 4]}
    x = np.float32([[0.1], [-0.2], [2], [0.6], [0]])
    agree([classifier("LinearClassifier", **attrs)], {"x": x}, "y", "z")


KERNELS = {"LINEAR": (0.0, 0.0, 0.0), "POLY": (0.3, 0.5, 3.0), "RBF": (0.25, 0.0, 0.0), "SIGMOID": (0.1, 0.2, 0.0)}


def support(kernel: str, **attrs: Any) -> dict[str, Any]:
    return {
        "kernel_type": kernel,
        "kernel_params": list(KERNELS[kernel]),
        "support_vectors": numbers(6 * 4, 3),
        **attrs,
    }


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("one_class", [0, 1])
def test_svm_regressor(kernel: str, one_class: int) -> None:
    attrs = support(kernel, coefficients=numbers(6, 4), rho=[0.25], n_supports=6, one_class=one_class)
    agree([ml("SVMRegressor", "x", **attrs)], {"x": floats(7, 4)}, "y", rtol=1e-4)


def test_svm_regressor_without_support_vectors_is_linear() -> None:
    agree(
        [ml("SVMRegressor", "x", coefficients=numbers(4, 1), rho=[0.5], kernel_params=[0.0] * 3)],
        {"x": floats(7, 4)},
        "y",
        rtol=1e-4,
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("probabilities", [False, True])
def test_svm_classifier(kernel: str, probabilities: bool) -> None:
    attrs = support(kernel, coefficients=numbers(12, 4), rho=numbers(3, 5), vectors_per_class=[1, 3, 2])
    if probabilities:
        attrs |= {"prob_a": [-1.0, -0.5, -2.0], "prob_b": [0.1, 0.0, -0.1]}
    agree([classifier("SVMClassifier", **attrs, **LABELS[1])], {"x": floats(9, 4)}, "y", "z", rtol=1e-3)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC"])
def test_svm_classifier_of_two_classes(transform: str) -> None:
    attrs = support("RBF", coefficients=numbers(6, 4), rho=[0.1], vectors_per_class=[4, 2], post_transform=transform)
    agree([classifier("SVMClassifier", **attrs, classlabels_ints=[0, 1])], {"x": floats(9, 4)}, "y", "z", rtol=1e-3)


def test_linear_svm_classifier() -> None:
    attrs = {"coefficients": numbers(12, 4), "rho": [0.5], "kernel_params": [0.0] * 3, **LABELS[0]}
    agree([classifier("SVMClassifier", **attrs)], {"x": floats(9, 4)}, "y", "z", rtol=1e-4)


def trees(prefix: str, ids: list[int], weights: list[float], mode: str = "BRANCH_LEQ", **attrs: Any) -> dict[str, Any]:
    """Two trees: one of depth 2 with leaves 2, 3, 4, and one of depth 1 with leaves 1 and 2; all leaves weigh `ids`."""
    leaves = [(0, 2), (0, 3), (0, 4), (1, 1), (1, 2)]
    return {
        "nodes_treeids": [0, 0, 0, 0, 0, 1, 1, 1],
        "nodes_nodeids": [0, 1, 2, 3, 4, 0, 1, 2],
        "nodes_featureids": [0, 1, 0, 0, 0, 1, 0, 0],
        "nodes_values": [0.5, -1.0, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0],
        "nodes_modes": [mode, mode, "LEAF", "LEAF", "LEAF", mode, "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 2, 0, 0, 0, 1, 0, 0],
        "nodes_falsenodeids": [4, 3, 0, 0, 0, 2, 0, 0],
        f"{prefix}_treeids": [tree for tree, _ in leaves for _ in ids],
        f"{prefix}_nodeids": [node for _, node in leaves for _ in ids],
        f"{prefix}_ids": ids * len(leaves),
        f"{prefix}_weights": (weights * 10)[: len(leaves) * len(ids)],
        **attrs,
    }


MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]
X = np.float32([[0.5, 0.25], [0.5, -1], [0, 0], [1, 1], [0.5, -2], [2, 0.25]])


@pytest.mark.sample(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_tree_regressor(mode: str, how: str) -> None:
    attrs = trees("target", [1, 0], [0.5, -2.0, 3.0, 1.25, 0.75, 4.0], mode, n_targets=2, base_values=[0.5, -0.5])
    agree([ml("TreeEnsembleRegressor", "x", **attrs, aggregate_function=how)], {"x": X}, "y")


def test_trees_of_other_types() -> None:
    """ONNX Runtime supports only floats for the regressor, but also integers for the classifier."""
    attrs = trees("target", [0], [0.5, -2.0, 3.0], n_targets=1)
    agree([ml("TreeEnsembleRegressor", "x", **attrs)], {"x": X.astype(np.float64)}, "y")
    attrs = trees("class", [0, 1, 2], [0.5, 0.25, 3.0, 1.25, 0.75, 4.0, -1.0], classlabels_int64s=[7, 3, 5])
    agree([classifier("TreeEnsembleClassifier", **attrs)], {"x": X.astype(np.int64)}, "y", "z")


@pytest.mark.sample(5)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("labels", [{"classlabels_int64s": [7, 3, 5]}, {"classlabels_strings": ["x", "y", "z"]}])
@pytest.mark.parametrize("base", [{}, {"base_values": [0.1, -0.2, 0.3]}])
def test_tree_classifier(transform: str, labels: dict[str, Any], base: dict[str, Any]) -> None:
    attrs = trees("class", [0, 2, 1], [0.5, 0.25, 3.0, 1.25, 0.75, 4.0, -1.0], post_transform=transform)
    agree([classifier("TreeEnsembleClassifier", **attrs, **labels, **base)], {"x": X}, "y", "z", rtol=1e-5)


@pytest.mark.sample(5)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("weights", [[0.2, 0.4, 0.1], [-0.5, 2.0, -1.0]])
@pytest.mark.parametrize("weighed", [0, 1])
@pytest.mark.parametrize("base", [{}, {"base_values": [0.1]}])
def test_one_weighed_class_of_two(transform: str, weights: list[float], weighed: int, base: dict[str, Any]) -> None:
    if weighed and base:
        base = {}  # ONNX Runtime adds it to the other class, which the specification does not mention
    attrs = trees("class", [weighed], weights, post_transform=transform, classlabels_int64s=[4, 9], **base)
    agree([classifier("TreeEnsembleClassifier", **attrs)], {"x": X}, "y", "z", rtol=1e-5)


def test_two_weighed_classes_have_the_label_of_the_larger_score() -> None:
    """As the specification says; ONNX Runtime looks only at the second class here."""
    attrs = trees("class", [0, 1], [0.7, 0.3, 0.1, 0.2], classlabels_int64s=[4, 9])
    found = reference(classifier("TreeEnsembleClassifier", **attrs), X)
    np.testing.assert_array_equal(found["y"], np.int64([4, 9])[found["z"].argmax(axis=1)])
    assert set(found["y"].tolist()) == {4, 9}


def test_trees_are_named_by_any_number() -> None:
    attrs = trees("target", [0], [0.5, -2.0, 3.0], n_targets=1)
    far = {0: 5, 1: -(1 << 60)}
    named = {key: [far[tree] for tree in attrs[key]] for key in ("nodes_treeids", "target_treeids")}
    plain, renamed = (reference(ml("TreeEnsembleRegressor", "x", **each), X)["y"] for each in (attrs, attrs | named))
    np.testing.assert_array_equal(plain, renamed)


def test_missing_values_follow_the_nodes_flag() -> None:
    attrs = trees("target", [0], [1.0, 2.0, 4.0, 8.0, 16.0], n_targets=1)
    attrs["nodes_missing_value_tracks_true"] = [1, 0, 0, 0, 0, 1, 0, 0]
    agree([ml("TreeEnsembleRegressor", "x", **attrs)], {"x": np.float32([[np.nan, np.nan], [np.nan, -5]])}, "y")


def test_splits_in_double_precision() -> None:
    attrs = trees("target", [0], [1.0, 2.0, 4.0, 8.0, 16.0], n_targets=1)
    third = 1 / 3
    attrs["nodes_values_as_tensor"] = np.float64([third, 0, 0, 0, 0, 0, 0, 0])
    attrs["target_weights_as_tensor"] = np.float64(attrs.pop("target_weights"))
    del attrs["nodes_values"]
    x = np.float64([[third, 0], [np.nextafter(third, 1), 0]])
    np.testing.assert_array_equal(reference(ml("TreeEnsembleRegressor", "x", **attrs), x)["y"], [[9], [12]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes_truenodeids": [0, 2, 0, 0, 0, 1, 0, 0]}, "is no forest"),
        ({"nodes_falsenodeids": [2, 3, 0, 0, 0, 2, 0, 0]}, "is no forest"),
        ({"nodes_truenodeids": [9, 2, 0, 0, 0, 1, 0, 0]}, "names a node that does not exist"),
        ({"nodes_featureids": [0, 1]}, "nodes_featureids has 2 items"),
        ({"nodes_featureids": [0, -1, 0, 0, 0, 1, 0, 0]}, "nodes_featureids has -1"),
        ({"nodes_modes": ["BRANCH_ODD"] * 8}, "BRANCH_ODD"),
        ({"nodes_nodeids": [0, 1, 2, 2, 4, 0, 1, 2]}, "two nodes of one name"),
        ({"nodes_nodeids": [0, 1, 2, 3, -4, 0, 1, 2]}, "nodes_nodeids goes from -4 to 3"),
        ({"nodes_nodeids": [0, 1, 2, 3, 1 << 40, 0, 1, 2]}, "expected 0 to 2147483647"),
        ({"target_treeids": [0, 0, 0, 1, 7]}, "names a node that does not exist"),
        ({"target_nodeids": [2, 3, 0, 1, 2]}, "not a leaf"),
        ({"target_ids": [0, 0, 1, 0, 0]}, "expected numbers below 1"),
        ({"target_weights": [1.0]}, "differ in length"),
        ({"aggregate_function": "PRODUCT"}, "expected one of AVERAGE"),
        ({"base_values": [1.0, 2.0]}, "2 base_values"),
        ({"post_transform": "TANH"}, "post_transform is 'TANH'"),
    ],
)
def test_malformed_trees_are_refused(changes: dict[str, Any], message: str) -> None:
    attrs = trees("target", [0], [1.0, 2.0, 4.0], n_targets=1) | changes
    with pytest.raises(ModelError, match=message):
        lathe.load(model([ml("TreeEnsembleRegressor", "x", **attrs)], {"x": X}, ["y"]))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            classifier("LinearClassifier", coefficients=numbers(9, 1), **LABELS[0]),
            "its coefficients are for 3 features",
        ),
        (classifier("LinearClassifier", coefficients=numbers(7, 1), **LABELS[0]), "7 coefficients for 3 columns"),
        (classifier("LinearClassifier", coefficients=numbers(8, 1)), "expected one kind"),
        (ml("LinearRegressor", "x", coefficients=[1.0] * 4, intercepts=[1.0, 2.0]), "has 2 intercepts"),
        (ml("SVMRegressor", "x", coefficients=[1.0] * 4, kernel_type="COSINE", rho=[0.0]), "kernel_type is 'COSINE'"),
        (ml("SVMRegressor", "x", coefficients=[1.0] * 4), "rho has 0 numbers"),
        (classifier("SVMClassifier", **LABELS[0], rho=[0.0], coefficients=[1.0] * 8), "expected 3 vectors"),
        (
            classifier(
                "SVMClassifier", **LABELS[0], rho=[0.0] * 3, vectors_per_class=[1, 1], support_vectors=[1.0] * 8
            ),
            "expected a number for each of 3 classes",
        ),
    ],
)
def test_malformed_models_are_refused(node: onnx.NodeProto, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        lathe.load(model([node], {"x": floats(2, 4)}, list(node.output)))


def test_rows_are_independent() -> None:
    attrs = trees("class", [0, 2, 1], [0.5, 0.25, 3.0], classlabels_int64s=[1, 2, 3])
    graph = lathe.load(model([classifier("TreeEnsembleClassifier", **attrs)], {"x": X}, ["y", "z"]))
    together = lathe.interpret(graph, {"x": X})
    for row, x in enumerate(X):
        alone = reference(classifier("TreeEnsembleClassifier", **attrs), x[None])
        np.testing.assert_array_equal(alone["z"][0], together["z"][row])


def test_many_trees_walk_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    node = ml("TreeEnsembleRegressor", "x", **trees("target", [0], [1.0, 2.0, 4.0], n_targets=1))
    whole = reference(node, X)["y"]
    monkeypatch.setattr("lathe.core.ops.ml.forest._WALKERS", 4)
    np.testing.assert_array_equal(reference(node, X)["y"], whole)
