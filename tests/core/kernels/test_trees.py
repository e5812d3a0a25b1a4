"""Decision trees against the reference: comparisons, missing values, uneven depths, several targets, batches."""

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


def tree_attributes(
    seed: int, trees: int, targets: int, mode: str = "BRANCH_LEQ", missing: bool = False
) -> dict[str, Any]:
    """Attributes of a regressor over trees of random form, some of a single leaf."""
    random = np.random.default_rng(seed)
    nodes: list[tuple[int, int, int, float, str, int, int]] = []
    leaves: list[tuple[int, int, int, float]] = []
    for tree in range(trees):
        pending, count = [(0, 0)], 1
        while pending:
            node, depth = pending.pop()
            if depth < 1 + tree % 9 and (random.random() < 0.8 or depth == 0) and tree % 5:
                split = float(np.round(random.normal(), 1))
                nodes.append((tree, node, int(random.integers(FEATURES)), split, mode, count, count + 1))
                pending += [(count, depth + 1), (count + 1, depth + 1)]
                count += 2
            else:
                nodes.append((tree, node, 0, 0.0, "LEAF", 0, 0))
                weighed = range(targets) if random.random() < 0.5 else [int(random.integers(targets))]
                leaves += [(tree, node, target, float(np.float32(random.normal()))) for target in weighed]
    names = ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
    attrs: dict[str, Any] = {
        f"nodes_{name}": column for name, column in zip(names, zip(*nodes, strict=True), strict=True)
    }
    if missing:
        attrs["nodes_missing_value_tracks_true"] = tuple(random.integers(0, 2, len(nodes)).tolist())
    columns = zip(("treeids", "nodeids", "ids", "weights"), zip(*leaves, strict=True), strict=True)
    attrs |= {f"target_{name}": column for name, column in columns}
    return {**attrs, "n_targets": targets, "base_values": tuple(np.linspace(-1, 1, targets).tolist())}


def rows(count: int) -> Array:
    """Random features: on the splits, between them, infinite, and NaN (missing)."""
    random = np.random.default_rng(count)
    x = np.round(random.normal(size=(count, FEATURES)), 1).astype(np.float32)
    x[random.random(x.shape) < 0.1] = np.nan
    x[random.random(x.shape) < 0.05] = np.inf
    return x


@pytest.mark.parametrize("mode", ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT"])
@pytest.mark.parametrize("missing", [False, True])
def test_comparisons(mode: str, missing: bool) -> None:
    kernel = NodeKernel("TreeEnsembleRegressor", X, **tree_attributes(1, 13, 1, mode, missing))
    for count in (1, 7, 8, 9, 300):
        kernel.check(rows(count), rtol=1e-5, atol=1e-5)


@each_target
@pytest.mark.parametrize(("targets", "how"), [(1, "SUM"), (3, "AVERAGE"), (16, "SUM"), (21, "SUM")])
def test_several_targets(target: Target, targets: int, how: str) -> None:
    attrs = tree_attributes(2, 10, targets, missing=True)
    kernel = NodeKernel("TreeEnsembleRegressor", X, target=target, aggregate_function=how, **attrs)
    for count in (1, 17):
        kernel.check(rows(count), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_are_split_among_threads(threads: int) -> None:
    NodeKernel("TreeEnsembleRegressor", X, **tree_attributes(3, 40, 2)).check(
        rows(1500), threads=threads, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("trees", [1, 8])
def test_trees_of_a_single_leaf(trees: int) -> None:
    attrs = tree_attributes(4, 1, 1)
    kernel = NodeKernel("TreeEnsembleRegressor", X, **attrs)
    kernel.check(rows(trees))
    assert kernel(np.empty((0, FEATURES), np.float32))[0].shape == (0, 1)


UNCOVERED = {
    "greatest": {"aggregate_function": "MAX"},
    "transformed": {"post_transform": "LOGISTIC"},
    "equal": {"nodes_modes": ("BRANCH_EQ", "LEAF", "LEAF")},
    "double": {"nodes_values_as_tensor": np.zeros(3)},
}


@pytest.mark.parametrize("name", UNCOVERED)
def test_unsupported_trees_run_on_the_reference(name: str) -> None:
    attrs = {
        "nodes_treeids": (0, 0, 0), "nodes_nodeids": (0, 1, 2), "nodes_featureids": (0, 0, 0),
        "nodes_values": (0.0, 0.0, 0.0), "nodes_modes": ("BRANCH_LEQ", "LEAF", "LEAF"), "nodes_truenodeids": (1, 0, 0),
        "nodes_falsenodeids": (2, 0, 0), "target_treeids": (0, 0), "target_nodeids": (1, 2), "target_ids": (0, 0),
        "target_weights": (1.0, 2.0),
    }  # fmt: skip
    covered = NodeKernel("TreeEnsembleRegressor", X, **attrs)
    graph = single_node("TreeEnsembleRegressor", X, **attrs | UNCOVERED[name])
    assert select(Request(graph.nodes[0], graph.constants, covered.target)) is None
