"""Whether a result is good enough to take an alias: a pure function of metrics.

A metric that was not measured, or is no number, fails what is asked of it: a gate that cannot be judged stays shut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Metrics: TypeAlias = Mapping[str, Any]

_LOWER_IS_BETTER = frozenset({"loss", "log_loss", "rmse", "mse", "mae"})


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class NotWorse(_Table):
    """A comparison with the version that the alias names now, on the same held-out rows."""

    metric: str = Field(min_length=1, max_length=64, description="Such as accuracy.")
    by: float = Field(default=0.0, description="How much worse is tolerated; below 0: how much better it must be.")


class Gate(_Table):
    """What a result must be, to take the alias. Without conditions everything passes."""

    min: dict[str, float] = Field(default={}, description="The least a metric may be: {accuracy = 0.98}.")
    max: dict[str, float] = Field(default={}, description="The most a metric may be: {loss = 0.5}.")
    not_worse_than_live: NotWorse | None = Field(
        default=None, description="Compared with what the alias names; passed where it names nothing yet."
    )
    refused: Literal["keep", "discard"] = Field(
        default="keep", description="Whether a refused result becomes a version without an alias, or none."
    )


@dataclass(frozen=True, slots=True)
class Live:
    """The version that an alias names, and what it is worth on the rows that the new one was judged by."""

    version: int
    metrics: Metrics
    fault: str = ""  # why it could not be judged


@dataclass(frozen=True, slots=True)
class Check:
    """One condition, and what came of it."""

    passed: bool
    text: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the alias may move, condition by condition."""

    checks: tuple[Check, ...] = ()
    live: Live | None = None  # what was compared with

    @property
    def passed(self) -> bool:
        """Whether every condition holds."""
        return all(check.passed for check in self.checks)

    @property
    def reason(self) -> str:
        """Why it was refused, in one line; empty when it passed."""
        return "; ".join(check.text for check in self.checks if not check.passed)

    def to_json(self) -> dict[str, Any]:
        """Return the document that versions and jobs show."""
        document: dict[str, Any] = {"passed": self.passed, "checks": [asdict(check) for check in self.checks]}
        if self.live is not None:
            document["live"] = {**asdict(self.live), "metrics": dict(self.live.metrics)}
        return document


def decide(gate: Gate, metrics: Metrics, live: Live | None) -> Decision:
    """Hold a result's metrics against a gate; ``live`` is None where the alias names nothing yet."""
    checks = [_at_least(name, metrics, least) for name, least in gate.min.items()]
    checks += [_at_most(name, metrics, most) for name, most in gate.max.items()]
    if gate.not_worse_than_live is None:
        return Decision(tuple(checks))
    return Decision((*checks, _not_worse(gate.not_worse_than_live, metrics, live)), live)


def _at_least(name: str, metrics: Metrics, least: float) -> Check:
    value = _measured(name, metrics)
    if value is None:
        return _unmeasured(name)
    return Check(value >= least, f"{name} is {value:.6g}, at least {least:.6g} was asked for")


def _at_most(name: str, metrics: Metrics, most: float) -> Check:
    value = _measured(name, metrics)
    if value is None:
        return _unmeasured(name)
    return Check(value <= most, f"{name} is {value:.6g}, at most {most:.6g} was asked for")


def _not_worse(asked: NotWorse, metrics: Metrics, live: Live | None) -> Check:
    name, value = asked.metric, _measured(asked.metric, metrics)
    if value is None:
        return _unmeasured(name)
    if live is None:
        return Check(True, f"{name} is {value:.6g}, and there is no version to compare with")
    before = _measured(name, live.metrics)
    if before is None:
        return Check(False, f"{name} of version {live.version} could not be measured: {live.fault or 'no such metric'}")
    loss = value - before if name in _LOWER_IS_BETTER else before - value
    wanted = f"at most {asked.by:.6g} worse" if asked.by >= 0 else f"at least {-asked.by:.6g} better"
    text = f"{name} is {value:.6g}, {before:.6g} of version {live.version}: {wanted} was asked for"
    return Check(loss <= asked.by + _ROUNDING, text)


_ROUNDING = 1e-12  # what subtracting metrics may err by


def _measured(name: str, metrics: Metrics) -> float | None:
    value = metrics.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        return None
    return float(value)


def _unmeasured(name: str) -> Check:
    return Check(False, f"{name} was not measured")
