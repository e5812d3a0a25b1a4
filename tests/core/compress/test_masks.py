"""Masks of pruned weights, against definitions that count."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import lathe
from lathe.core.compress.masks import Pattern, masks_of, parse_pattern
from lathe.core.compress.weight_pruning import WeightPruning, prune_weights
from lathe.core.errors import UnsupportedError
from tests.core.compress.test_static import RESIDUAL, ort_run, run
from tests.random_numbers import RNG

F = np.float32


def test_single_weights_go_by_their_score() -> None:
    scores = RNG.permutation(60).reshape(1, 12, 5)
    mask = masks_of({"w": scores}, 0.9, Pattern())["w"]
    assert np.array_equal(mask, scores >= 54)


@pytest.mark.parametrize("is_global", [False, True])
def test_a_global_threshold_compares_all_layers(is_global: bool) -> None:
    scores = {"small": np.arange(40.0).reshape(1, 8, 5), "large": np.arange(40.0, 80).reshape(1, 8, 5)}
    masks = masks_of(scores, 0.5, Pattern(), is_global)
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    assert counts == ({"small": 0, "large": 40} if is_global else {"small": 20, "large": 20})


@pytest.mark.parametrize(("n", "m", "depth"), [(2, 4, 16), (1, 4, 10), (4, 8, 24), (3, 5, 7)])
def test_n_of_m_consecutive_inputs_stay(n: int, m: int, depth: int) -> None:
    scores = RNG.random((2, depth, 6))
    mask = masks_of({"w": scores}, 0.0, parse_pattern(f"{n}:{m}"))["w"]
    for start in range(0, depth, m):
        part, kept = scores[:, start : start + m], mask[:, start : start + m]
        assert (kept.sum(axis=1) == min(n, part.shape[1])).all()
        dropped = np.where(kept, -1, part).max(axis=1)
        assert (np.where(kept, part, np.inf).min(axis=1) >= dropped).all()


@pytest.mark.parametrize("pattern", ["4x1", "1x4", "4x4", "3x2"])
def test_blocks_go_as_a_whole(pattern: str) -> None:
    rows, columns = map(int, pattern.split("x"))
    scores = RNG.random((1, 24, 16))
    mask = masks_of({"w": scores}, 0.75, parse_pattern(pattern))["w"][0]
    blocks = mask.reshape(24 // rows, rows, 16 // columns, columns)
    assert (blocks.all(axis=(1, 3)) | ~blocks.any(axis=(1, 3))).all()
    sums = scores.reshape(24 // rows, rows, 16 // columns, columns).sum(axis=(1, 3))
    kept = blocks.all(axis=(1, 3))
    assert kept.sum() == kept.size - round(0.75 * kept.size)
    assert sums[kept].min() >= sums[~kept].max()


@pytest.mark.parametrize("text", ["", "4", "4:2", "2:2", "0x4", "a:b", "2:4:8", "1.5x2"])
def test_other_patterns_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="pattern: expected"):
        parse_pattern(text)


@pytest.mark.parametrize("pattern", ["element", "2:4", "2x1"])
def test_onnx_runtime_runs_a_pruned_model_alike(pattern: str) -> None:
    """Weights that stay are unchanged; the zeros are where the reports count them."""
    rows = RNG.standard_normal((6, 3, 8, 8)).astype(F)
    small, report = prune_weights(lathe.load(RESIDUAL), WeightPruning(0.5, pattern))
    data = lathe.export(small)
    onnx.checker.check_model(onnx.load_model_from_string(data), full_check=True)
    assert np.abs(run(data, {"x": rows}) - ort_run(data, {"x": rows})).max() < 1e-4
    stored = [small.constants[node.inputs[1]] for node in small.nodes if node.op in ("Conv", "MatMul", "Gemm")]
    assert [(entry.weights, entry.zeros) for entry in report] == [(w.size, int((w == 0).sum())) for w in stored]
    assert all(0.3 <= entry.zeros / entry.weights <= 0.6 for entry in report)


def test_wrong_choices_are_refused() -> None:
    graph = lathe.load(RESIDUAL)
    for sparsity in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(UnsupportedError, match="sparsity: expected more than 0, below 1"):
            WeightPruning(sparsity)
    with pytest.raises(UnsupportedError, match="skip: expected names of nodes, got none"):
        prune_weights(graph, WeightPruning(skip=frozenset({"none"})))
    with pytest.raises(UnsupportedError, match="constant weights of 9999 or more, got none"):
        prune_weights(graph, WeightPruning(least_elements=9999))
