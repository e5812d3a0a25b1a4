"""The plan of a canary, as part of a model's durable state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lathe.server.canary.steps import MAX_WEIGHT, Step, check_number, check_steps, default_steps, parse_time
from lathe.server.errors import BadRequest

SCHEDULED = -1  # `CanaryPlan.step` before `start_at`


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """One candidate version and its share of the traffic.

    `weight` is the candidate's share of the requests without a version. `shadow` is the share of the stable version's
    requests that the candidate answers in addition, only for comparison: two numbers agree within
    `atol + rtol * abs(stable)`, and a request differs if any of its numbers does. `tolerated` is the share of compared
    requests that may differ. Without `promote` a candidate that passes stays a candidate until a call promotes or
    cancels it. `generation` is that of the aliases' change that began the trial.

    With `steps` the share grows with time: `weight` is that of the present `step`, which began at `since`. The
    candidate gets no requests before `start_at`. Times are RFC 3339.
    """

    version: int
    weight: float = 0.1
    shadow: float = 0.0
    rtol: float = 1e-3
    atol: float = 1e-5
    tolerated: float = 0.005
    promote: bool = True
    generation: int = 0
    steps: tuple[Step, ...] = ()
    start_at: str = ""
    step: int = 0
    since: str = ""

    @property
    def begun(self) -> bool:
        """Whether the trial has begun its first step; False while it waits for `start_at`."""
        return self.step != SCHEDULED

    @property
    def holds(self) -> bool:
        """Whether the present or a later step has a duration, before whose end the candidate cannot go live."""
        return any(step.seconds for step in self.steps[max(self.step, 0) :])

    def validate(self) -> CanaryPlan:
        """Return the plan itself; raises BadRequest for values out of range."""
        check_number("weight", self.weight, 0.0, MAX_WEIGHT)
        check_number("shadow", self.shadow, 0.0, 1.0)
        check_number("rtol", self.rtol, 0.0, math.inf)
        check_number("atol", self.atol, 0.0, math.inf)
        check_number("tolerated", self.tolerated, 1e-4, 0.5)
        check_steps(self.steps, self.shadow)
        for name, time in (("start_at", self.start_at), ("since", self.since)):
            if time:
                parse_time(name, time)
        if not (SCHEDULED <= self.step < max(1, len(self.steps))):
            raise BadRequest(f"step: expected one of {len(self.steps)}, got {self.step}")
        if not self.steps and self.weight == self.shadow == 0.0:
            raise BadRequest("weight and shadow: expected one of them above 0, got 0 for both")
        return self

    def asked(self) -> CanaryPlan:
        """Return the validated plan at its start: in the first step or, with `start_at`, not begun; raises BadRequest.

        Without steps it gets the default steps of its weight; if there are none, one step with `start_at`, otherwise
        no steps.
        """
        plan = self.validate()
        if not plan.steps:
            delayed_start = (Step(plan.weight, 0.0),) if plan.start_at else ()
            plan = replace(plan, steps=default_steps(plan.weight) or delayed_start)
        return plan.at(SCHEDULED if plan.start_at else 0) if plan.steps else plan

    def at(self, step: int, since: str = "") -> CanaryPlan:
        """Return the plan in the step with this index, begun at `since`, with the step's weight.

        `SCHEDULED` stands for the time before the first step, with weight 0.
        """
        return replace(self, step=step, since=since, weight=0.0 if step == SCHEDULED else self.steps[step].weight)

    def is_same_trial(self, other: CanaryPlan | None) -> bool:
        """Whether both plans belong to the same trial, in any step."""
        return other is not None and self.generation == other.generation

    def to_json(self) -> dict[str, Any]:
        """Return the plan as an object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CanaryPlan:
        """Parse a plan; raises BadRequest, TypeError. Unknown fields, of later releases, are ignored."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in document.items() if name in known}
        try:
            steps = tuple(Step.from_json(entry) for entry in given.pop("steps", ()))
        except KeyError as error:
            raise BadRequest(f"steps: expected weight and seconds, got no {error}") from error
        return cls(**given, steps=steps).validate()
