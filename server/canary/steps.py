"""The steps of a progressive rollout: the candidate's share of requests, and for how long."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lathe.server.errors import BadRequest

MAX_WEIGHT = 0.5  # above this the stable version answers too few requests to compare with
FIRST_WEIGHT, FIRST_REQUESTS = (
    0.2,
    1_000,
)  # a larger share starts at 0.2, until the candidate has answered 1000 requests
MAX_STEPS = 20
MAX_REQUESTS = 1_000_000
MAX_SECONDS = 30 * 86_400.0  # seconds


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the rollout: the candidate's share of the requests (`weight`), and the conditions that end the step.

    The next step begins when `seconds` are over and the candidate has answered `requests` requests since the trial
    began in this server; with `weight` 0 its answers to shadow requests count. The candidate may go live when no
    `seconds` of this or a later step are left, whatever `requests` says.
    """

    weight: float
    seconds: float
    requests: int = 0

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Step:
        """Parse a step; raises KeyError, or TypeError for another type of document."""
        return cls(entry["weight"], entry["seconds"], entry.get("requests", 0))

    def describe(self) -> str:
        """Return the step as a phrase for messages."""
        until = [f"for {self.seconds:g} s"] if self.seconds else []
        until += [f"until the candidate has answered {self.requests}"] if self.requests else []
        return " ".join([f"{percent(self.weight)} of the requests", *until])


def default_steps(weight: float) -> tuple[Step, ...]:
    """Return the default steps for a share; none if it is at most `FIRST_WEIGHT`.

    If the candidate answers half of the requests, each of its answers is compared with only one of the stable version,
    and rare events take too long to be distinguished from chance. So a large share starts as a smaller one.
    """
    return (Step(FIRST_WEIGHT, 0.0, FIRST_REQUESTS), Step(weight, 0.0)) if weight > FIRST_WEIGHT else ()


def check_steps(steps: tuple[Step, ...], shadow: float) -> None:
    """Raises BadRequest for too many steps, values out of range, or a weight below that of the step before.

    Also for a weight of 0 if `shadow` is 0, since the candidate would then answer nothing.
    """
    if len(steps) > MAX_STEPS:
        raise BadRequest(f"steps: expected at most {MAX_STEPS}, got {len(steps)}")
    for index, step in enumerate(steps):
        check_number(f"steps[{index}].weight", step.weight, 0.0, MAX_WEIGHT)
        check_number(f"steps[{index}].seconds", step.seconds, 0.0, MAX_SECONDS)
        check_number(f"steps[{index}].requests", step.requests, 0, MAX_REQUESTS)
        if index and step.weight < steps[index - 1].weight:  # callers that got the candidate keep it
            before = steps[index - 1].weight
            raise BadRequest(
                f"steps[{index}].weight: expected at least {before:g}, the step before's, got {step.weight:g}"
            )
        if not step.weight and not shadow:
            raise BadRequest(f"steps[{index}].weight: expected a number above 0 without shadow, got 0")


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Raises BadRequest for a number that is out of range or not finite."""
    if not (low <= value <= high and math.isfinite(value)):
        raise BadRequest(f"{name}: expected a number from {low:g} to {high:g}, got {value!r}")


def parse_time(name: str, text: str) -> float:
    """Return a time (RFC 3339) in seconds since 1970; raises BadRequest."""
    try:
        found = datetime.datetime.fromisoformat(text)
    except (TypeError, ValueError):
        found = None
    if found is None or found.tzinfo is None:
        raise BadRequest(f"{name}: expected a time with its zone such as 2026-01-31T02:00:00Z, got {text!r}")
    return found.timestamp()


def format_time(seconds: float) -> str:
    """Return seconds since 1970 as RFC 3339 in UTC."""
    at = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def percent(share: float) -> str:
    """Return a share as a percentage for messages."""
    return f"{share * 100:.3g}%"


def seconds_left(since: float, seconds: float, now: float) -> float:
    """Return how much is left at `now` of a duration of `seconds` that began at `since`.

    It is between 0 and `seconds` even if the clock was set since.
    """
    return min(max(since + seconds - now, 0.0), seconds)
