"""The quality gate: decides by metrics whether a result may move an alias. Pure functions.

A metric that is missing or not a finite number fails its condition.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Metrics: TypeAlias = Mapping[str, Any]

_LOWER_IS_BETTER = frozenset({"loss", "log_loss", "perplexity", "rmse", "mse", "mae"})


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class NotWorse(_Table):
    """A condition of a gate: `metric` is at most `by` worse than that of the version that the job's alias names now.

    Both are measured on the same held-out rows. Lower is better for loss, log_loss, perplexity, rmse, mse and mae,
    higher for other metrics. `by` is an absolute difference, in the unit of the metric. If `by` is negative, the result
    must be better by at least -`by`. If the alias names no version, the metric must only be a finite number.
    """

    metric: str = Field(min_length=1, max_length=64, description="Name of the metric, such as accuracy.")
    by: float = Field(
        default=0.0,
        description="Largest difference by which the metric may be worse, in its own unit: 0.01 is one percentage "
        "point of accuracy. A negative value is the least gain that is required.",
    )


class Gate(_Table):
    """The conditions under which a result may move the alias. Without conditions every result passes."""

    min: dict[str, float] = Field(default={}, description="Lower bounds of metrics: {accuracy = 0.98}.")
    max: dict[str, float] = Field(default={}, description="Upper bounds of metrics: {log_loss = 0.5}.")
    not_worse_than_live: NotWorse | None = Field(
        default=None, description="Comparison with the version that the alias names; passes if there is none."
    )
    refused: Literal["keep", "discard"] = Field(
        default="keep",
        description="What happens to a refused result: keep it as a version without an alias, or discard it.",
    )


@dataclass(frozen=True, slots=True)
class LiveMetrics:
    """The version that an alias names, and its metrics on the rows that the new result was evaluated on."""

    version: int
    metrics: Metrics
    fault: str = ""  # why it could not be evaluated


@dataclass(frozen=True, slots=True)
class ConditionResult:
    """The outcome of one condition."""

    passed: bool
    text: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the alias may move, condition by condition."""

    checks: tuple[ConditionResult, ...] = ()
    live: LiveMetrics | None = None  # the version that the result was compared with

    @property
    def passed(self) -> bool:
        """Whether every condition holds."""
        return all(check.passed for check in self.checks)

    @property
    def reason(self) -> str:
        """The failed conditions in one line; empty if all passed."""
        return "; ".join(check.text for check in self.checks if not check.passed)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document for version metadata and the jobs API."""
        document: dict[str, Any] = {"passed": self.passed, "checks": [asdict(check) for check in self.checks]}
        if self.live is not None:
            document["live"] = {**asdict(self.live), "metrics": dict(self.live.metrics)}
        return document


def check_metrics(gate: Gate, of_result: Collection[str], of_version: Collection[str]) -> None:
    """Raises ValueError if the gate names a metric that will not be measured.

    `of_result` are the metrics of the result, `of_version` those of the version that the alias names.
    """
    named = [(f"min.{name}", name, of_result) for name in gate.min]
    named += [(f"max.{name}", name, of_result) for name in gate.max]
    if gate.not_worse_than_live is not None:
        named.append(("not_worse_than_live.metric", gate.not_worse_than_live.metric, of_version))
    for field, name, measured in named:
        if name not in measured:
            known = ", ".join(measured) or "none"
            raise ValueError(f"{field}: expected a metric that the job measures on these data ({known}), got {name!r}")


def evaluate_gate(gate: Gate, metrics: Metrics, live: LiveMetrics | None) -> Decision:
    """Return the decision of a gate about a result with these metrics.

    `live` has the metrics of the version that the alias names now; None if it names no version yet. It counts only for
    a gate with `not_worse_than_live`.
    """
    checks = [_at_least(name, metrics, least) for name, least in gate.min.items()]
    checks += [_at_most(name, metrics, most) for name, most in gate.max.items()]
    if gate.not_worse_than_live is None:
        return Decision(tuple(checks))
    return Decision((*checks, _not_worse(gate.not_worse_than_live, metrics, live)), live)


def _at_least(name: str, metrics: Metrics, least: float) -> ConditionResult:
    value = _finite_metric(name, metrics)
    if value is None:
        return _missing_metric(name)
    return ConditionResult(value >= least, f"{name}: expected at least {least:.6g}, got {value:.6g}")


def _at_most(name: str, metrics: Metrics, most: float) -> ConditionResult:
    value = _finite_metric(name, metrics)
    if value is None:
        return _missing_metric(name)
    return ConditionResult(value <= most, f"{name}: expected at most {most:.6g}, got {value:.6g}")


def _not_worse(condition: NotWorse, metrics: Metrics, live: LiveMetrics | None) -> ConditionResult:
    name, value = condition.metric, _finite_metric(condition.metric, metrics)
    if value is None:
        return _missing_metric(name)
    if live is None:
        return ConditionResult(True, f"{name} is {value:.6g}, and there is no version to compare with")
    before = _finite_metric(name, live.metrics)
    if before is None:
        return ConditionResult(
            False, f"{name} of version {live.version} could not be measured: {live.fault or 'no such metric'}"
        )
    loss = value - before if name in _LOWER_IS_BETTER else before - value
    requirement = f"at most {condition.by:.6g} worse" if condition.by >= 0 else f"at least {-condition.by:.6g} better"
    text = f"{name}: expected {requirement} than version {live.version} ({before:.6g}), got {value:.6g}"
    return ConditionResult(loss <= condition.by + _ROUNDING, text)


_ROUNDING = 1e-12  # allowance for the rounding error of subtracting metrics


def _finite_metric(name: str, metrics: Metrics) -> float | None:
    value = metrics.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        return None
    return float(value)


def _missing_metric(name: str) -> ConditionResult:
    return ConditionResult(False, f"{name} was not measured")
