"""What the trials' API takes and gives."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from pydantic import AwareDatetime, Field, field_validator, model_validator

from server.api.schemas import Answer, Asked, Version
from server.canary.plan import CanaryPlan
from server.canary.schedule import LONGEST, MOST_REQUESTS, MOST_STEPS, MOST_WEIGHT, Step, written

if TYPE_CHECKING:
    from server.canary.guard import Finding
    from server.canary.traffic import Trial

_SHARE = {"ge": 0.0, "allow_inf_nan": False}


class StepAsked(Asked):
    """One step of a schedule."""

    weight: Annotated[float, Field(le=MOST_WEIGHT, **_SHARE)] = Field(
        description="Share of the requests that name no version; at least the step before's."
    )
    seconds: float = Field(
        ge=0,
        le=LONGEST,
        allow_inf_nan=False,
        description="After so long the next step begins; after the last one the "
        "candidate goes live, once it has passed.",
    )
    requests: int = Field(
        default=0, ge=0, le=MOST_REQUESTS, description="But not before the candidate has answered so many in all."
    )


class CanaryAsked(Asked):
    """Which version to try, and on what."""

    version: Version
    weight: Annotated[float, Field(le=MOST_WEIGHT, **_SHARE)] = Field(
        default=0.1, description="Share of the requests that name no version."
    )
    shadow: Annotated[float, Field(le=1.0, **_SHARE)] = Field(
        default=0.0, description="Share of the live version's requests that the candidate answers too, to be compared."
    )
    rtol: Annotated[float, Field(**_SHARE)] = Field(default=1e-3, description="Relative tolerance of a comparison.")
    atol: Annotated[float, Field(**_SHARE)] = Field(default=1e-5, description="Absolute tolerance of a comparison.")
    tolerated: float = Field(default=0.005, ge=1e-4, le=0.5, description="Share of compared requests that may differ.")
    promote: bool = Field(default=True, strict=True, description="Go live by itself once it has passed.")
    steps: list[StepAsked] = Field(
        default=[], max_length=MOST_STEPS, description="Shares that grow with time, in place of `weight`."
    )
    start_at: AwareDatetime | None = Field(default=None, description="When it begins; at once without it.")

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
            raise ValueError("weight: expected none beside steps, which have their own")
        return self

    @property
    def plan(self) -> CanaryPlan:
        """What is asked for."""
        given = self.model_dump(exclude={"steps", "start_at"})
        steps = tuple(Step(step.weight, step.seconds, step.requests) for step in self.steps)
        return CanaryPlan(**given, steps=steps, start_at=written(self.start_at.timestamp()) if self.start_at else "")


class StepState(Answer):
    """One step of a schedule."""

    weight: float
    seconds: float
    requests: int


class Evidence(Answer):
    """One question the guard asks of the candidate."""

    question: str
    stable: float | None = Field(description="How often it is so with the live version; null where only one can.")
    candidate: float = Field(description="How often it is so with the candidate.")
    requests: int = Field(description="Requests of the candidate that counted.")
    against: float = Field(description="Evidence that it is worse; at 1 it is rolled back.")
    in_favour: float = Field(description="Evidence that it is not; at 1 for all questions it is promoted.")

    @classmethod
    def of(cls, finding: Finding) -> Evidence:
        return cls(
            question=finding.name,
            stable=finding.stable,
            candidate=finding.candidate,
            requests=finding.requests,
            against=round(finding.against, 4),
            in_favour=round(finding.in_favour, 4),
        )


class CanaryState(Answer):
    """A trial under way, as this server sees it: each server collects its own evidence."""

    version: int
    live: int | None = Field(description="The version it is compared with; null while one of them is not in memory.")
    weight: float
    shadow: float
    rtol: float
    atol: float
    tolerated: float
    promote: bool
    generation: int = Field(description="The change that began it.")
    steps: list[StepState] = Field(description="Its schedule; none: the share stays as it is.")
    step: int = Field(description="The present one, counted from 0; -1 before it starts.")
    start_at: str
    since: str = Field(description="When the present step began.")
    remaining: float | None = Field(description="Seconds until the present step ends, or the first begins.")
    requests: int = Field(description="Requests the candidate has answered in this server.")
    verdict: str = Field(description="undecided, promote or roll_back.")
    reason: str
    evidence: list[Evidence]

    @classmethod
    def of(cls, plan: CanaryPlan, trial: Trial | None, remaining: float | None) -> CanaryState:
        return cls(
            **plan.to_json(),
            remaining=remaining,
            live=trial.stable.ref.version if trial else None,
            requests=trial.guard.requests if trial else 0,
            verdict=trial.verdict.value if trial else "undecided",
            reason=trial.reason if trial else "",
            evidence=[Evidence.of(finding) for finding in trial.guard.findings()] if trial else [],
        )
