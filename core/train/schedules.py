"""Schedules: the learning rate of every step, counted from 0. Formulas are PyTorch's, where it has them."""

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
    """The rate times `factor` after every `every` steps."""

    rate: float
    every: int
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        return self.rate * self.factor ** (step // self.every)


@dataclass(frozen=True)
class Cosine:
    """From `rate` down to `least` along half a cosine of `steps` steps, and `least` from there on."""

    rate: float
    steps: int
    least: float = 0.0

    def __call__(self, step: int) -> float:
        return _between(self.rate, self.least, min(step / self.steps, 1.0))


@dataclass(frozen=True)
class WarmUp:
    """The first `steps` steps rise in a line to the rate that `then` begins with."""

    then: Schedule
    steps: int

    def __call__(self, step: int) -> float:
        if step < self.steps:
            return self.then(0) * (step + 1) / self.steps
        return self.then(step - self.steps)


@dataclass(frozen=True)
class OneCycle:
    """Up to `rate` and down again, both along a cosine (L. N. Smith, "Super-Convergence", 2018)."""

    rate: float
    steps: int
    rising: float = 0.3  # part of the steps
    start: float = 25.0  # the first rate is rate / start
    end: float = 1e4  # the last one rate / start / end

    def __call__(self, step: int) -> float:
        top, last = self.rising * self.steps - 1, self.steps - 1
        first = self.rate / self.start
        if step <= top:
            return _between(first, self.rate, step / top) if top else self.rate
        return _between(self.rate, first / self.end, min((step - top) / (last - top), 1.0))


def _between(start: float, end: float, part: float) -> float:
    """From start to end along half a cosine."""
    return end + (start - end) / 2 * (1 + cos(pi * part))
