"""The gradient of every operator against central differences; and every operator has said how it is differentiated."""

from __future__ import annotations

import pytest

from core.ops import registry
from tests.core.autodiff.cases import CASES, Case
from tests.core.autodiff.harness import assert_gradients

NAMES = [name for name in registry.names() if type(registry.get(name)).__module__.startswith("core.ops.")]
SMOOTH = {"slopes", "gradient", "definition"}
# Control flow needs bodies: see test_control.py.
ELSEWHERE = {"If", "Loop", "Scan"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_agrees_with_central_differences(case: Case) -> None:
    graph, feeds = case.graph()
    assert_gradients(graph, feeds)


def test_every_operator_says_how_it_is_differentiated() -> None:
    assert [name for name in NAMES if not registry.get(name).differentiation] == []


def test_every_differentiable_operator_is_tried() -> None:
    smooth = {name for name in NAMES if registry.get(name).differentiation in SMOOTH}
    assert smooth - {case.op for case in CASES} == ELSEWHERE


def test_what_is_not_differentiated_has_a_reason() -> None:
    for name in NAMES:
        op = registry.get(name)
        if op.differentiation == "zero":
            assert op.zero_gradient, name
        if op.differentiation == "none":
            assert op.no_gradient or op.domain == registry.ML, name
