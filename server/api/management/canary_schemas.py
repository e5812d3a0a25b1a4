"""Request and response schemas of canaries."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from pydantic import AwareDatetime, Field, field_validator, model_validator

from lathe.server.api.management.schemas import RequestBody, ResponseBody, Version
from lathe.server.canary.plan import CanaryPlan
from lathe.server.canary.steps import MAX_REQUESTS, MAX_SECONDS, MAX_STEPS, MAX_WEIGHT, Step, format_time

if TYPE_CHECKING:
    from lathe.server.canary.guard import TestState
    from lathe.server.canary.traffic import Trial

COMPARISON = ("rtol", "atol", "tolerated")  # settings of the comparisons that `shadow` makes
_SHARE = {"ge": 0.0, "allow_inf_nan": False}


class StepAsked(RequestBody):
    """One step of a schedule."""

    weight: Annotated[float, Field(le=MAX_WEIGHT, **_SHARE)] = Field(
        description="Share of the requests that name no version; at least that of the step before."
    )
    seconds: float = Field(
        ge=0,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        description="Duration of the step in seconds. When no seconds of this or a later step are left, the candidate "
        "goes live, once it has passed.",
    )
    requests: int = Field(
        default=0,
        ge=0,
        le=MAX_REQUESTS,
        description="The step also lasts until the candidate has answered this many requests in total. That does not "
        "delay its promotion.",
    )


class CanaryAsked(RequestBody):
    """The version to try, and the conditions of the canary."""

    version: Version
    weight: Annotated[float, Field(le=MAX_WEIGHT, **_SHARE)] = Field(
        default=0.1, description="Share of the requests that name no version."
    )
    shadow: Annotated[float, Field(le=1.0, **_SHARE)] = Field(
        default=0.0,
        description="Share of the live version's requests that the candidate also answers. Without it, answers are not "
        "compared.",
    )
    rtol: Annotated[float, Field(**_SHARE)] = Field(
        default=1e-3, description="Relative tolerance of a comparison; only with `shadow`."
    )
    atol: Annotated[float, Field(**_SHARE)] = Field(
        default=1e-5, description="Absolute tolerance of a comparison; only with `shadow`."
    )
    tolerated: float = Field(
        default=0.005, ge=1e-4, le=0.5, description="Share of compared requests that may differ; only with `shadow`."
    )
    promote: bool = Field(default=True, strict=True, description="Go live automatically once it has passed.")
    steps: list[StepAsked] = Field(
        default=[], max_length=MAX_STEPS, description="A schedule of growing shares, instead of `weight`."
    )
    start_at: AwareDatetime | None = Field(default=None, description="Start of the canary; without it, at once.")

    @field_validator("start_at")
    @classmethod
    def _within_utc(cls, at: datetime | None) -> datetime | None:
        try:
            return at and at.astimezone(UTC)
        except OverflowError:
            raise ValueError(f"expected a time from year 1 to 9999 in UTC, got {at}") from None

    @model_validator(mode="after")
    def _one_of_weight_and_steps(self) -> CanaryAsked:
        if self.steps and "weight" in self.model_fields_set:
            raise ValueError("weight: expected none together with steps, which have their own")
        return self

    @model_validator(mode="after")
    def _shadow_for_comparisons(self) -> CanaryAsked:
        """Refuse settings of comparisons if nothing is compared; their defaults may be sent."""
        fields = type(self).model_fields
        unused = [name for name in COMPARISON if getattr(self, name) != fields[name].default]
        if unused and not self.shadow:
            raise ValueError(f"{unused[0]}: expected shadow above 0 with it, otherwise answers are not compared")
        return self

    @property
    def plan(self) -> CanaryPlan:
        """The requested plan."""
        given = self.model_dump(exclude={"steps", "start_at"})
        steps = tuple(Step(step.weight, step.seconds, step.requests) for step in self.steps)
        return CanaryPlan(
            **given, steps=steps, start_at=format_time(self.start_at.timestamp()) if self.start_at else ""
        )


class StepState(ResponseBody):
    """One step of a schedule."""

    weight: float
    seconds: float
    requests: int


class Evidence(ResponseBody):
    """One criterion by which the candidate is compared with the live version."""

    question: str
    stable: float | None = Field(description="Rate of the live version; null if only the candidate can have one.")
    candidate: float = Field(description="Rate of the candidate.")
    requests: int = Field(description="Requests of the candidate that were counted.")
    against: float = Field(description="Evidence that the candidate is worse; at 1 it is rolled back.")
    in_favour: float = Field(description="Evidence that it is not worse; at 1 for all criteria it is promoted.")
    needed: int | None = Field(
        default=None, description="How many more requests bring `in_favour` to 1, if none of them is bad."
    )

    @classmethod
    def of(cls, finding: TestState, needed: int) -> Evidence:
        return cls(
            question=finding.name,
            stable=finding.stable,
            candidate=finding.candidate,
            requests=finding.requests,
            against=round(finding.against, 4),
            in_favour=round(finding.in_favour, 4),
            needed=needed,
        )


class CanaryState(ResponseBody):
    """A running canary as seen by this server: each server collects its own evidence."""

    version: int
    live: int | None = Field(
        description="The version that it is compared with; null while one of both is not in memory."
    )
    weight: float
    shadow: float
    rtol: float
    atol: float
    tolerated: float
    promote: bool
    generation: int = Field(description="The number of the change that started it.")
    steps: list[StepState] = Field(description="The schedule; empty: a constant share.")
    step: int = Field(description="The current step, counted from 0; -1 before the start.")
    start_at: str
    since: str = Field(description="When the current step began.")
    remaining: float | None = Field(description="Seconds until the current step ends, or the first begins.")
    requests: int = Field(description="Requests the candidate has answered in this server.")
    verdict: str = Field(description="undecided, promote or roll_back.")
    reason: str
    evidence: list[Evidence]

    @classmethod
    def of(cls, plan: CanaryPlan, trial: Trial | None, remaining: float | None) -> CanaryState:
        needed = trial.guard.needed() if trial else {}
        return cls(
            **plan.to_json(),
            remaining=remaining,
            live=trial.stable.ref.version if trial else None,
            requests=trial.guard.requests if trial else 0,
            verdict=trial.verdict.value if trial else "undecided",
            reason=trial.reason if trial else "",
            evidence=[Evidence.of(finding, needed[finding.name]) for finding in trial.guard.findings()]
            if trial
            else [],
        )
