"""What was asked of a canary: part of a model's durable state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from server.errors import BadRequest

MOST_WEIGHT = 0.5  # beyond it the stable version is not seen often enough to compare with


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """One candidate version and what it takes part in.

    ``weight`` is its share of the requests that name no version, ``shadow`` the share of the stable version's requests
    that it answers as well, unseen, to be compared: two numbers agree within ``atol + rtol * abs(stable)``, and a
    request differs when any of its numbers does. Of the compared requests ``tolerated`` may differ. With
    ``promote`` false a candidate that passes stays a candidate until somebody decides. ``generation`` is that of the
    change that began it.
    """

    version: int
    weight: float = 0.1
    shadow: float = 0.0
    rtol: float = 1e-3
    atol: float = 1e-5
    tolerated: float = 0.005
    promote: bool = True
    generation: int = 0

    def checked(self) -> CanaryPlan:
        """Return the plan; raises BadRequest on numbers out of range."""
        _check("weight", self.weight, 0.0, MOST_WEIGHT)
        _check("shadow", self.shadow, 0.0, 1.0)
        _check("rtol", self.rtol, 0.0, math.inf)
        _check("atol", self.atol, 0.0, math.inf)
        _check("tolerated", self.tolerated, 1e-4, 0.5)
        if self.weight == self.shadow == 0.0:
            raise BadRequest("weight and shadow: expected one of them above 0, got 0 for both")
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the plan as an object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CanaryPlan:
        """Read it; raises BadRequest, TypeError. Fields of a later release are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in document.items() if name in known}).checked()


def _check(name: str, value: float, low: float, high: float) -> None:
    if not (low <= value <= high and math.isfinite(value)):
        raise BadRequest(f"{name}: expected a number from {low:g} to {high:g}, got {value!r}")
