"""Support vector machines of scikit-learn: labels are decided by votes, with probabilities as without."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from sklearn import svm

from tests.exporters.agreement import agrees
from tests.exporters.test_sklearn import converted
from tests.random_numbers import RNG

NAMES = np.array(["one", "two", "three", "four", "five", "six"])


def noisy(classes: int, names: bool = False) -> tuple[Any, Any]:
    """Points whose classes overlap so much that votes and probabilities often disagree."""
    x = RNG.standard_normal((150, 4)).astype(np.float32)
    bands = (np.abs(x[:, 0] * 2) + x[:, 1]).clip(0, 5.9) * classes / 6
    y = np.where(RNG.random(150) < 0.7, bands.astype(int), RNG.integers(0, classes, 150))
    return x, NAMES[y] if names else y


def fitted(model: Any, x: Any, y: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # `probability` is deprecated, but existing models have it
        return model.fit(x, y)


def decided(model: Any, rows: Any) -> Any:
    """The rows that no pair of classes leaves undecided: near 0, rounding decides who gets the vote."""
    ovr, model.decision_function_shape = model.decision_function_shape, "ovo"
    decisions = model.decision_function(rows)
    model.decision_function_shape = ovr
    return rows[np.abs(decisions.reshape(len(rows), -1)).min(axis=1) > 1e-3]


@pytest.mark.sample(5)
@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("kernel", ["rbf", "linear", "poly", "sigmoid"])
@pytest.mark.parametrize("classes", [2, 3, 6])
@pytest.mark.parametrize("probability", [False, True])
def test_classifiers(probability: bool, classes: int, kernel: str, names: bool) -> None:
    x, y = noisy(classes, names)
    model = fitted(svm.SVC(kernel=kernel, probability=probability, random_state=0), x, y)
    rows = decided(model, RNG.standard_normal((333, 4)).astype(np.float32))
    data = converted(model, x[:1], options={id(model): {"zipmap": False}})
    label = model.predict(rows)
    if probability:
        scores = model.predict_proba(rows).astype(np.float32)
        assert classes == 2 or (model.classes_[scores.argmax(axis=1)] != label).any(), "votes go with probabilities"
    else:
        scores = ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"X": rows})[1]
    # LIBSVM stops its iteration at an error of 0.005: with other rounding it may stop an iteration earlier or later.
    agrees(data, {"X": rows}, [label.astype(object) if names else label, scores], 1e-2 if probability else 1e-4)


@pytest.mark.parametrize("kernel", ["rbf", "linear", "poly", "sigmoid"])
@pytest.mark.parametrize("kind", [svm.SVR, svm.OneClassSVM])
def test_regressors(kind: Any, kernel: str) -> None:
    x, y = noisy(6)
    x += 2  # around 0 the decisions of some kernels are hardly more than rounding
    model = kind(kernel=kernel).fit(x, y)
    rows = RNG.standard_normal((77, 4)).astype(np.float32) + 2
    data = converted(model, x[:1])
    theirs = ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"X": rows})
    agrees(data, {"X": rows}, theirs, 1e-3)
