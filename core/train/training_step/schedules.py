"""Learning-rate schedules: functions from the number of an update, counted from 0, to its rate.

Formulas are those of PyTorch's schedulers where PyTorch has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi
from typing import TypeAlias

Schedule: TypeAlias = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    rate: float

    def __call__(self, step: int) -> float:
        return self.rate


@dataclass(frozen=True)
class Steps:
    """Step decay: the rate is multiplied by `factor` after every `every` updates."""

    rate: float
    every: int
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        return self.rate * self.factor ** (step // self.every)


@dataclass(frozen=True)
class Cosine:
    """Cosine annealing from `rate` down to `least` within `steps` updates, then constant at `least`."""

    rate: float
    steps: int
    least: float = 0.0

    def __call__(self, step: int) -> float:
        return _cosine(self.rate, self.least, min(step / self.steps, 1.0))


@dataclass(frozen=True)
class WarmUp:
    """Linear warm-up over `steps` updates to the first rate of `then`, which follows."""

    then: Schedule
    steps: int

    def __call__(self, step: int) -> float:
        if step < self.steps:
            return self.then(0) * (step + 1) / self.steps
        return self.then(step - self.steps)


@dataclass(frozen=True)
class OneCycle:
    """The one-cycle policy over `steps` updates: up to `rate` and down again, each along half a cosine.

    L. N. Smith, "Super-Convergence", 2018. After `steps` updates the rate stays the last one.
    """

    rate: float
    steps: int
    rising: float = 0.3  # fraction of the updates
    start: float = 25.0  # the first rate is rate / start
    end: float = 1e4  # the last rate is rate / start / end

    def __call__(self, step: int) -> float:
        top, last = self.rising * self.steps - 1, self.steps - 1
        first = self.rate / self.start
        if step <= top:
            return _cosine(first, self.rate, step / top) if top else self.rate
        return _cosine(self.rate, first / self.end, min((step - top) / (last - top), 1.0))


def _cosine(start: float, end: float, part: float) -> float:
    """Cosine interpolation: `start` for part 0, `end` for part 1."""
    return end + (start - end) / 2 * (1 + cos(pi * part))
