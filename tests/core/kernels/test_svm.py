"""Support vector machines against the reference: kernels, classes of uneven sizes, probabilities, batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import NodeKernel, single_node
from tests.core.targets import each_target

FEATURES = 5
X = TensorType(DType.FLOAT32, (symbol("n"), FEATURES))
PARAMETERS = {"LINEAR": (0.0, 0.0, 0.0), "POLY": (0.3, 0.5, 3.0), "RBF": (0.25, 0.0, 0.0), "SIGMOID": (0.1, 0.2, 0.0)}
COUNTS = (1, 2, 7, 8, 19)


def machine_attributes(kernel: str, *sizes: int, probable: bool = False) -> dict[str, Any]:
    """Attributes of a machine with these numbers of support vectors per class; one class makes a regressor."""
    random, classes = np.random.default_rng(len(sizes)), len(sizes)
    supports, pairs = sum(sizes), max(classes * (classes - 1) // 2, 1)

    def numbers(count: int, scale: float = 1.0) -> tuple[float, ...]:
        return tuple(random.normal(0, scale, count).astype(np.float32).tolist())

    attrs: dict[str, Any] = {
        "kernel_type": kernel, "kernel_params": PARAMETERS[kernel], "support_vectors": numbers(supports * FEATURES),
        "coefficients": numbers(supports * max(classes - 1, 1)), "rho": numbers(pairs, 0.1),
    }  # fmt: skip
    if classes == 1:
        return {**attrs, "n_supports": supports}
    if probable:
        attrs |= {"prob_a": tuple(-np.abs(numbers(pairs, 2))), "prob_b": numbers(pairs, 0.3)}
    return {**attrs, "vectors_per_class": sizes, "classlabels_ints": tuple(range(7, 7 + classes))}


def rows(count: int) -> Array:
    return np.random.default_rng(count).normal(size=(count, FEATURES)).astype(np.float32)


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize("kernel", PARAMETERS)
@pytest.mark.parametrize("one_class", [0, 1])
def test_regressors(target: Target, kernel: str, one_class: int) -> None:
    machine = NodeKernel("SVMRegressor", X, target=target, one_class=one_class, **machine_attributes(kernel, 83))
    for count in COUNTS:
        machine.check(rows(count), rtol=1e-4, atol=1e-4)


@pytest.mark.sample(5)
@each_target
@pytest.mark.parametrize("kernel", PARAMETERS)
@pytest.mark.parametrize("sizes", [(5, 40), (17, 1, 30), (1,) * 7, (0, 9, 0, 4)])
@pytest.mark.parametrize("probable", [False, True])
def test_classifiers(target: Target, kernel: str, sizes: tuple[int, ...], probable: bool) -> None:
    attrs = machine_attributes(kernel, *sizes, probable=probable)
    machine = NodeKernel("SVMClassifier", X, outputs=2, target=target, **attrs)
    for count in COUNTS:
        machine.check(rows(count), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_are_split_among_threads(threads: int) -> None:
    machine = NodeKernel("SVMClassifier", X, outputs=2, **machine_attributes("RBF", 20, 30, 40, probable=True))
    machine.check(rows(700), threads=threads, rtol=1e-4, atol=1e-4)
    assert [each.shape for each in machine(np.empty((0, FEATURES), np.float32))] == [(0,), (0, 3)]


@pytest.mark.parametrize("probable", [False, True])
def test_nan_features(probable: bool) -> None:
    x = rows(9)
    x[1, 2], x[4, 0], x[8] = np.nan, np.inf, -np.inf
    machine = NodeKernel("SVMClassifier", X, outputs=2, **machine_attributes("RBF", 8, 9, 10, probable=probable))
    machine.check(x, rtol=1e-4, atol=1e-4)


def test_near_vectors_far_from_the_origin() -> None:
    """Squared distances are sums of squared differences; differences of squares would lose them in rounding."""
    attrs = machine_attributes("RBF", 30) | {"kernel_params": (10.0, 0.0, 0.0)}
    vectors = np.array(attrs["support_vectors"], np.float32).reshape(-1, FEATURES) + 1000
    attrs["support_vectors"] = tuple(vectors.ravel().tolist())
    near = vectors[:9] + np.float32(0.125)
    NodeKernel("SVMRegressor", X, **attrs).check(near, rtol=1e-5, atol=1e-5)


UNCOVERED: dict[str, dict[str, Any]] = {
    "named": {"classlabels_ints": None, "classlabels_strings": ("a", "b")},
    "transformed": {"post_transform": "SOFTMAX"},
    "linear": {"vectors_per_class": None, "support_vectors": None, "coefficients": (0.5,) * 2 * FEATURES},
}


@pytest.mark.parametrize("name", UNCOVERED)
def test_unsupported_machines_run_on_the_reference(name: str) -> None:
    attrs = machine_attributes("RBF", 3, 4)
    covered = NodeKernel("SVMClassifier", X, outputs=2, **attrs)
    changed = {key: value for key, value in (attrs | UNCOVERED[name]).items() if value is not None}
    graph = single_node("SVMClassifier", X, outputs=2, **changed)
    assert select(Request(graph.nodes[0], graph.constants, covered.target)) is None
