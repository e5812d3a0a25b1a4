"""Metrics accumulated over batches, against scikit-learn on all rows at once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from sklearn import metrics as theirs

from lathe.core.train.run import metrics
from lathe.core.train.run.metrics import (
    ClassificationMetrics,
    RegressionMetrics,
    TopK,
    area_under_curve,
    metric_collector,
)


def gathered(target: Any, output: Any, classes: int | None) -> Any:
    gauge = metric_collector(classes)
    for start in range(0, len(target), 37):
        gauge.add(target[start : start + 37], output[start : start + 37])
    return gauge


def scored(classes: int, rows: int = 500, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    target = rng.integers(0, classes, rows)
    output = rng.normal(size=(rows, classes)).astype(np.float32)
    output[np.arange(rows), target] += 1.5
    return target, output


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_classes(classes: int) -> None:
    target, output = scored(classes)
    gauge = gathered(target, output, classes)
    found, predicted = gauge.values(), output.argmax(axis=1)
    probabilities = np.exp(output.astype(float)) / np.exp(output.astype(float)).sum(axis=1, keepdims=True)
    single = probabilities[:, 1] if classes == 2 else probabilities
    expected = {
        "accuracy": theirs.accuracy_score(target, predicted),
        "precision": theirs.precision_score(target, predicted, average="macro"),
        "recall": theirs.recall_score(target, predicted, average="macro"),
        "f1": theirs.f1_score(target, predicted, average="macro"),
        "log_loss": theirs.log_loss(target, probabilities),
        "auc": theirs.roc_auc_score(target, single, multi_class="ovr"),
    }
    if classes > 5:
        expected["top5"] = theirs.top_k_accuracy_score(target, output, k=5)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6), name
    np.testing.assert_array_equal(gauge.confusion, theirs.confusion_matrix(target, predicted))
    for name, score in (
        ("precision", theirs.precision_score),
        ("recall", theirs.recall_score),
        ("f1", theirs.f1_score),
    ):
        np.testing.assert_allclose(getattr(gauge.counts, name), score(target, predicted, average=None))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
def test_classes_that_do_not_occur() -> None:
    target, output = np.array([0, 0, 2, 2]), 9 * np.eye(5, dtype=np.float32)[[0, 3, 2, 2]]
    gauge = gathered(target, output, 5)
    found, predicted = gauge.values(), output.argmax(axis=1)
    assert "auc" not in found
    assert found["f1"] == pytest.approx(theirs.f1_score(target, predicted, average="macro"))
    assert found["precision"] == pytest.approx(
        theirs.precision_score(target, predicted, average="macro", zero_division=0)
    )
    assert gauge.counts.recall[1] == 0


@pytest.mark.parametrize("shape", [(300,), (300, 1), (300, 4), (300, 2, 3)])
def test_numbers(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    target = rng.normal(1e3, 2, shape).astype(np.float32)
    output = target + rng.normal(0, 1, shape).astype(np.float32)
    found = gathered(target, output, None).values()
    flat = (target.reshape(300, -1), output.reshape(300, -1))
    assert found["rmse"] == pytest.approx(np.sqrt(theirs.mean_squared_error(*flat)), rel=1e-6)
    assert found["mae"] == pytest.approx(theirs.mean_absolute_error(*flat), rel=1e-6)
    assert found["r2"] == pytest.approx(theirs.r2_score(*flat), rel=1e-6)


@pytest.mark.parametrize("output", [[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]])
def test_r2_of_targets_that_never_change(output: list[float]) -> None:
    target = np.ones(3)
    assert gathered(target, np.array(output), None).values()["r2"] == theirs.r2_score(target, output)


def test_logits_however_large() -> None:
    gauge = ClassificationMetrics(3)
    gauge.add(np.array([0, 1]), np.array([[1e4, -1e4, 0], [-1e4, 1e4, 0]], np.float32))
    assert gauge.values()["log_loss"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_area_with_many_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positive, scores = rng.random(200) < 0.3, rng.integers(0, 4, 200)
    assert area_under_curve(positive, scores) == pytest.approx(theirs.roc_auc_score(positive, scores))


def test_the_number_of_stored_scores_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_SCORES", 1000)
    gauge = gathered(*scored(3), 3)
    assert "auc" not in gauge.values() and not gauge.area._scores


def test_many_classes_have_no_confusion_matrix() -> None:
    gauge = ClassificationMetrics(metrics.MAX_CONFUSION_CLASSES + 1)
    assert (
        gauge.confusion is None
        and ClassificationMetrics(3).confusion is not None
        and RegressionMetrics().confusion is None
    )


def test_top_of_equal_scores() -> None:
    top = TopK(2)
    top.add(np.array([0, 1, 2]), np.zeros((3, 3)))
    assert top.value == pytest.approx(2 / 3)


def test_classes_of_every_pixel() -> None:
    target, output = scored(3, rows=600)
    pixels = np.moveaxis(output.reshape(50, 4, 3, 3), 3, 1)
    found, expected = gathered(target.reshape(50, 4, 3), pixels, 3), gathered(target, output, 3)
    assert found.values() == pytest.approx(expected.values())


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_are_no_logits(classes: int, dtype: Any) -> None:
    """A model that ends with a Softmax has the metrics of its probabilities, one without it those of its logits."""
    target, logits = scored(classes)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = gathered(target, probabilities.astype(dtype), classes).values()
    given = probabilities.astype(dtype).astype(float)
    single = given[:, 1] if classes == 2 else given / given.sum(axis=1, keepdims=True)
    assert found["log_loss"] == pytest.approx(
        theirs.log_loss(target, given / given.sum(axis=1, keepdims=True)), rel=1e-5
    )
    assert found["auc"] == pytest.approx(theirs.roc_auc_score(target, single, multi_class="ovr"), abs=2e-3)
    assert gathered(target, logits, classes).values()["log_loss"] == pytest.approx(
        theirs.log_loss(target, probabilities), rel=1e-5
    )


def test_one_row_that_is_no_distribution_makes_logits_of_all() -> None:
    target, output = np.array([0, 1, 1]), np.array([[0.5, 0.5], [0.0, 1.0], [-1.0, 2.0]], np.float32)
    odds = np.exp(output) / np.exp(output).sum(axis=1, keepdims=True)
    for order in ([0, 1, 2], [2, 1, 0]):
        gauge = metric_collector(2)
        for row in order:
            gauge.add(target[[row]], output[[row]])
        assert gauge.values()["log_loss"] == pytest.approx(theirs.log_loss(target, odds), rel=1e-6)


def test_a_wrong_class_with_certainty_has_a_finite_loss() -> None:
    target, output = np.array([0, 1]), np.array([[0.0, 1.0], [0.0, 1.0]], np.float32)
    assert gathered(target, output, 2).values()["log_loss"] == pytest.approx(theirs.log_loss(target, output), rel=1e-5)
