"""What was asked of a canary: part of a model's durable state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from server.canary.schedule import MOST_WEIGHT, Step, check_number, check_steps, moment, opened
from server.errors import BadRequest

SCHEDULED = -1  # the step of a trial whose time to start has not come


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """One candidate version and what it takes part in.

    ``weight`` is its share of the requests that name no version, ``shadow`` the share of the stable version's requests
    that it answers as well, unseen, to be compared: two numbers agree within ``atol + rtol * abs(stable)``, and a
    request differs when any of its numbers does. Of the compared requests ``tolerated`` may differ. With
    ``promote`` false a candidate that passes stays a candidate until somebody decides. ``generation`` is that of the
    change that began it.

    With ``steps`` the share grows with time, and ``weight`` is that of the present ``step``, which began at ``since``.
    Nothing happens before ``start_at``. Times are RFC 3339.
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
        """Whether its time has come."""
        return self.step != SCHEDULED

    @property
    def holds(self) -> bool:
        """Whether the candidate may not go live yet, however good it is: steps that take their time are to come."""
        return any(step.seconds for step in self.steps[max(self.step, 0) :])

    def checked(self) -> CanaryPlan:
        """Return the plan; raises BadRequest on numbers out of range."""
        check_number("weight", self.weight, 0.0, MOST_WEIGHT)
        check_number("shadow", self.shadow, 0.0, 1.0)
        check_number("rtol", self.rtol, 0.0, math.inf)
        check_number("atol", self.atol, 0.0, math.inf)
        check_number("tolerated", self.tolerated, 1e-4, 0.5)
        check_steps(self.steps, self.shadow)
        for name, time in (("start_at", self.start_at), ("since", self.since)):
            if time:
                moment(name, time)
        if not (SCHEDULED <= self.step < max(1, len(self.steps))):
            raise BadRequest(f"step: expected one of {len(self.steps)}, got {self.step}")
        if not self.steps and self.weight == self.shadow == 0.0:
            raise BadRequest("weight and shadow: expected one of them above 0, got 0 for both")
        return self

    def asked(self) -> CanaryPlan:
        """Return the plan as it begins; where nobody asked for steps, with those it has for its own sake."""
        plan = self.checked()
        if not plan.steps:
            later = (Step(plan.weight, 0.0),) if plan.start_at else ()
            plan = replace(plan, steps=opened(plan.weight) or later)
        return plan.at(SCHEDULED if plan.start_at else 0) if plan.steps else plan

    def at(self, step: int, since: str = "") -> CanaryPlan:
        """Return the plan in one of its steps."""
        return replace(self, step=step, since=since, weight=0.0 if step == SCHEDULED else self.steps[step].weight)

    def is_trial(self, other: CanaryPlan | None) -> bool:
        """Whether both are of the same trial, in whatever step."""
        return other is not None and self.generation == other.generation

    def to_json(self) -> dict[str, Any]:
        """Return the plan as an object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CanaryPlan:
        """Read it; raises BadRequest, TypeError. Fields of a later release are left out."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in document.items() if name in known}
        try:
            steps = tuple(Step.from_json(entry) for entry in given.pop("steps", ()))
        except KeyError as error:
            raise BadRequest(f"steps: expected weight and seconds, got no {error}") from error
        return cls(**given, steps=steps).checked()
