"""The steps of a roll-out: how large a candidate's share is, and for how long."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.errors import BadRequest

MOST_WEIGHT = 0.5  # beyond it the stable version is not seen often enough to compare with
CAUTIOUS, OPENING = 0.2, 1_000  # a larger share begins as this one, until the candidate has answered so many requests
MOST_STEPS = 20
MOST_REQUESTS = 1_000_000
LONGEST = 30 * 86_400.0  # seconds


@dataclass(frozen=True, slots=True)
class Step:
    """A share of the requests, and after how many seconds, and of the candidate's requests in all, the next step
    begins. The candidate may go live once the seconds of the last one are over."""

    weight: float
    seconds: float
    requests: int = 0

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Step:
        """Read it; raises TypeError where it is no such object."""
        return cls(entry["weight"], entry["seconds"], entry.get("requests", 0))

    def describe(self) -> str:
        """Return it for people."""
        until = [f"for {self.seconds:g} s"] if self.seconds else []
        until += [f"until the candidate has answered {self.requests}"] if self.requests else []
        return " ".join([f"{percent(self.weight)} of the requests", *until])


def opened(weight: float) -> tuple[Step, ...]:
    """Return the steps of a share that nobody asked steps for; none: it stays as it is.

    Where the candidate answers half of the requests, each of its answers stands against only one of the stable
    version, and what is seldom takes too long to be told from chance. So a large share begins as a smaller one.
    """
    return (Step(CAUTIOUS, 0.0, OPENING), Step(weight, 0.0)) if weight > CAUTIOUS else ()


def check_steps(steps: tuple[Step, ...], shadow: float) -> None:
    """Raise BadRequest on steps that are too many, out of range or smaller than the one before."""
    if len(steps) > MOST_STEPS:
        raise BadRequest(f"steps: expected at most {MOST_STEPS}, got {len(steps)}")
    for index, step in enumerate(steps):
        check_number(f"steps[{index}].weight", step.weight, 0.0, MOST_WEIGHT)
        check_number(f"steps[{index}].seconds", step.seconds, 0.0, LONGEST)
        check_number(f"steps[{index}].requests", step.requests, 0, MOST_REQUESTS)
        if index and step.weight < steps[index - 1].weight:  # who met the candidate stays with it
            before = steps[index - 1].weight
            raise BadRequest(
                f"steps[{index}].weight: expected at least {before:g}, the step before's, got {step.weight:g}"
            )
        if not step.weight and not shadow:
            raise BadRequest(f"steps[{index}].weight: expected a number above 0 without shadow, got 0")


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Raise BadRequest on a number out of range."""
    if not (low <= value <= high and math.isfinite(value)):
        raise BadRequest(f"{name}: expected a number from {low:g} to {high:g}, got {value!r}")


def moment(name: str, text: str) -> float:
    """Return a time (RFC 3339) in seconds since 1970; raises BadRequest."""
    try:
        found = datetime.datetime.fromisoformat(text)
    except (TypeError, ValueError):
        found = None
    if found is None or found.tzinfo is None:
        raise BadRequest(f"{name}: expected a time with its zone such as 2026-01-31T02:00:00Z, got {text!r}")
    return found.timestamp()


def written(seconds: float) -> str:
    """Return seconds since 1970 as RFC 3339 in UTC."""
    at = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def percent(share: float) -> str:
    """Return a share for people."""
    return f"{share * 100:.3g}%"


def remaining(since: float, seconds: float, now: float) -> float:
    """Return how much is left of ``seconds`` that began at ``since``, by a clock that may have been set meanwhile:
    never more than all of it, never less than nothing."""
    return min(max(since + seconds - now, 0.0), seconds)
