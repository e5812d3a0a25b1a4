"""The gradient of every operator against central differences; every operator declares its differentiation."""

from __future__ import annotations

import pytest

from lathe.core.ops.opdef import registry
from tests.core.autodiff.cases import CASES, Case
from tests.core.autodiff.harness import assert_gradients

NAMES = [name for name in registry.names() if type(registry.get(name)).__module__.startswith("lathe.core.ops.")]
SMOOTH = {"slopes", "gradient", "definition"}
# Control flow needs bodies: see test_control.py. Straight-through estimators are no derivatives of their steps, and
# masks have no gradient: see test_training_operators.py.
ELSEWHERE = {"If", "Loop", "Scan", "FakeQuantize", "CodedWeight", "MaskedWeight"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_gradients_agree_with_central_differences(case: Case) -> None:
    graph, feeds = case.graph()
    assert_gradients(graph, feeds)


def test_every_operator_declares_its_differentiation() -> None:
    assert [name for name in NAMES if not registry.get(name).differentiation] == []


def test_every_differentiable_operator_has_a_case() -> None:
    smooth = {name for name in NAMES if registry.get(name).differentiation in SMOOTH}
    assert smooth - {case.op for case in CASES} == ELSEWHERE


def test_operators_without_gradient_give_a_reason() -> None:
    for name in NAMES:
        op = registry.get(name)
        if op.differentiation == "zero":
            assert op.zero_gradient, name
        if op.differentiation == "none":
            assert op.no_gradient or op.domain == registry.ML, name
