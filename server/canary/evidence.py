"""Sequential evidence about rates of bad events, looked at after every request without losing its error level.

Against a candidate stands an e-process: a product of e-variables, each with mean at most 1 if the candidate is no
worse. By Ville's inequality such a product ever exceeds ``1/level`` with a probability of at most ``level``, however
often it is looked at. For two rates the e-variable is that of Turner, Ly and Gruenwald ("Generic E-variables for exact
sequential k-sample tests that allow for optional stopping", 2024): blocks of one outcome of the candidate and ``ratio``
of the stable version, rates estimated from the blocks before.

For a candidate stands Wald's sequential probability ratio of "as good as the stable version" to "worse by ``harm``".
Its rate is an estimate, so its level is measured (tests/server/canary), not proven.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

PENDING = 1_000  # outcomes of one side that wait for the other; older ones say nothing about now
_PRIOR_EVENTS, _PRIOR_TRIALS = 0.05, 10.0  # a rate is taken to be small until it shows otherwise


@dataclass(slots=True)
class Rate:
    """How often something happened."""

    events: int = 0
    trials: int = 0

    def add(self, happened: bool) -> None:
        """Count one trial."""
        self.events += happened
        self.trials += 1

    @property
    def estimate(self) -> float:
        """The rate expected of the next trial, strictly between 0 and 1."""
        return (self.events + _PRIOR_EVENTS) / (self.trials + _PRIOR_TRIALS)


@dataclass(slots=True)
class TwoRates:
    """Is the candidate's rate of bad events above the stable version's?

    ``against`` and ``in_favour`` are natural logarithms of the two kinds of evidence. ``harm`` is the difference of
    rates that matters; ``ratio`` is how many outcomes of the stable version stand against one of the candidate.
    """

    harm: float
    ratio: int = 1
    stable: Rate = field(default_factory=Rate)
    candidate: Rate = field(default_factory=Rate)
    against: float = 0.0
    in_favour: float = 0.0
    _waiting_stable: deque[bool] = field(default_factory=lambda: deque(maxlen=PENDING))
    _waiting_candidate: deque[bool] = field(default_factory=lambda: deque(maxlen=PENDING))

    def follow(self, ratio: int) -> None:
        """Form the blocks that come with so many outcomes of the stable version. Those that wait are dropped: there are
        too many of one side now, and who is compared should have run at the same time."""
        if ratio != self.ratio:
            self.ratio = ratio
            self._waiting_stable.clear()
            self._waiting_candidate.clear()

    def add_stable(self, bad: bool) -> None:
        """Take in one outcome of the stable version."""
        self._waiting_stable.append(bad)
        self._close_block()

    def add_candidate(self, bad: bool) -> None:
        """Take in one outcome of the candidate."""
        self._waiting_candidate.append(bad)
        self._close_block()

    def _close_block(self) -> None:
        if not self._waiting_candidate or len(self._waiting_stable) < self.ratio:
            return
        bad = self._waiting_candidate.popleft()
        bad_stable = sum(self._waiting_stable.popleft() for _ in range(self.ratio))
        self._weigh(bad, bad_stable)
        self.candidate.add(bad)
        self.stable.events += bad_stable
        self.stable.trials += self.ratio

    def _weigh(self, bad: bool, bad_stable: int) -> None:
        stable = self.stable.estimate
        worse = min(stable + self.harm, 1.0 - 1e-6)
        candidate = max(self.candidate.estimate, worse)
        pooled = (candidate + self.ratio * stable) / (1 + self.ratio)
        self.against += (
            _log_likelihood(bad, 1, candidate)
            + _log_likelihood(bad_stable, self.ratio, stable)
            - _log_likelihood(bad + bad_stable, 1 + self.ratio, pooled)
        )
        self.in_favour += _log_likelihood(bad, 1, stable) - _log_likelihood(bad, 1, worse)


@dataclass(slots=True)
class OneRate:
    """Is a rate above what is tolerated? The fields are those of :class:`TwoRates`."""

    tolerated: float
    harm: float
    candidate: Rate = field(default_factory=Rate)
    against: float = 0.0
    in_favour: float = 0.0

    def add(self, bad: bool) -> None:
        """Take in one outcome."""
        worse = self.tolerated + self.harm
        tolerated = _log_likelihood(bad, 1, self.tolerated)
        self.against += _log_likelihood(bad, 1, max(self.candidate.estimate, worse)) - tolerated
        self.in_favour += tolerated - _log_likelihood(bad, 1, worse)
        self.candidate.add(bad)


def _log_likelihood(events: int, trials: int, rate: float) -> float:
    return events * math.log(rate) + (trials - events) * math.log1p(-rate)
