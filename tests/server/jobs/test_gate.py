"""The gate is a pure function, so every case is one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lathe.server.jobs.gate import Gate, LiveMetrics, evaluate_gate

LIVE = LiveMetrics(3, {"accuracy": 0.9, "loss": 0.3})


def compared(metric: str, by: float = 0.0) -> dict[str, Any]:
    return {"not_worse_than_live": {"metric": metric, "by": by}}


@pytest.mark.parametrize(
    ("gate", "metrics", "live", "passes", "says"),
    [
        ({}, {}, None, True, ""),
        ({"min": {"accuracy": 0.9}}, {"accuracy": 0.9}, None, True, ""),
        ({"min": {"accuracy": 0.9}}, {"accuracy": 0.89}, None, False, "accuracy: expected at least 0.9, got 0.89"),
        ({"max": {"loss": 0.5}}, {"loss": 0.5}, None, True, ""),
        ({"max": {"loss": 0.5}}, {"loss": 0.51}, None, False, "loss: expected at most 0.5, got 0.51"),
        ({"min": {"f1": 0.5}}, {"accuracy": 1.0}, None, False, "f1 was not measured"),
        ({"max": {"loss": 0.5}}, {"loss": math.nan}, None, False, "loss was not measured"),
        ({"max": {"loss": 0.5}}, {"loss": "low"}, None, False, "loss was not measured"),
        ({"min": {"a": 1.0}, "max": {"b": 1.0}}, {"a": 0, "b": 2}, None, False, "got 0; b: expected at most 1, got 2"),
        (compared("accuracy"), {"accuracy": 0.9}, LIVE, True, ""),
        (
            compared("accuracy"),
            {"accuracy": 0.899},
            LIVE,
            False,
            "expected at most 0 worse than version 3 (0.9), got 0.899",
        ),
        (compared("accuracy", 0.01), {"accuracy": 0.89}, LIVE, True, ""),
        (compared("accuracy", -0.01), {"accuracy": 0.905}, LIVE, False, "at least 0.01 better than version 3 (0.9)"),
        (compared("accuracy", -0.01), {"accuracy": 0.91}, LIVE, True, ""),
        (compared("loss"), {"loss": 0.2}, LIVE, True, ""),
        (
            compared("loss", 0.01),
            {"loss": 0.32},
            LIVE,
            False,
            "loss: expected at most 0.01 worse than version 3 (0.3), got 0.32",
        ),
        (compared("accuracy"), {"accuracy": 0.1}, None, True, ""),
        (compared("accuracy"), {}, None, False, "accuracy was not measured"),
        (
            compared("accuracy"),
            {"accuracy": 1.0},
            LiveMetrics(3, {}, "it takes other inputs"),
            False,
            "takes other inputs",
        ),
        (compared("f1"), {"f1": 1.0}, LIVE, False, "f1 of version 3 could not be measured: no such metric"),
    ],
)
def test_a_decision_and_its_reason(
    gate: dict[str, Any], metrics: dict[str, Any], live: LiveMetrics | None, passes: bool, says: str
) -> None:
    decision = evaluate_gate(Gate(**gate), metrics, live)
    assert decision.passed is passes
    assert says in decision.reason
    assert bool(decision.reason) is not passes
    assert decision.to_json()["passed"] is passes


def test_the_decision_shows_every_comparison() -> None:
    shown = evaluate_gate(
        Gate(min={"accuracy": 0.5}, **compared("loss")), {"accuracy": 0.95, "loss": 0.4}, LIVE
    ).to_json()
    assert shown == {
        "passed": False,
        "checks": [
            {"passed": True, "text": "accuracy: expected at least 0.5, got 0.95"},
            {"passed": False, "text": "loss: expected at most 0 worse than version 3 (0.3), got 0.4"},
        ],
        "live": {"version": 3, "metrics": {"accuracy": 0.9, "loss": 0.3}, "fault": ""},
    }


NUMBER = st.floats(allow_nan=True, allow_infinity=True)


@given(NUMBER, NUMBER, st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["accuracy", "loss"]))
def test_a_gate_refuses_nan_and_is_monotone(new: float, old: float, by: float, name: str) -> None:
    """A result that passes still passes when it is better."""
    gate, live = Gate(**compared(name, by)), LiveMetrics(1, {name: old})
    if evaluate_gate(gate, {name: new}, live).passed:
        assert math.isfinite(new) and math.isfinite(old)
        better = new - abs(new) * 0.5 - 1 if name == "loss" else new + abs(new) * 0.5 + 1
        assert not math.isfinite(better) or evaluate_gate(gate, {name: better}, live).passed


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"min": {"accuracy": "high"}}, "min.accuracy"),
        ({"min": {"accuracy": math.inf}}, "min.accuracy"),
        ({"minimum": {}}, "minimum"),
        ({"not_worse_than_live": {"by": 0.1}}, "not_worse_than_live.metric"),
        ({"refused": "forget"}, "refused"),
    ],
)
def test_an_invalid_gate_is_refused_by_field(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Gate.model_validate(asked)
    assert [".".join(map(str, error["loc"])) for error in refused.value.errors()] == [field]
