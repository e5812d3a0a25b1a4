"""Sequential tests of rates of bad events, which may be evaluated after every request at the same error level.

The evidence against a candidate is an e-process: a product of e-variables, each with mean at most 1 if the candidate is
no worse. By Ville's inequality the probability that such a product ever exceeds `1/level` is at most `level`, however
often it is evaluated. For two rates the e-variable is that of Turner, Ly and Gruenwald ("Generic E-variables for exact
sequential k-sample tests that allow for optional stopping", 2024), over blocks of one outcome of the candidate and
`ratio` outcomes of the stable version, with rates estimated from the earlier blocks.

The evidence for a candidate is Wald's sequential probability ratio of "as good as the stable version" to "worse by
`harm`". The stable version's rate in it is an estimate, so its level is measured (tests/server/canary), not proven.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

MAX_WAITING = 1_000  # most outcomes of one side that wait for the other side; older ones are outdated
_PRIOR_EVENTS, _PRIOR_TRIALS = 0.05, 10.0  # prior of `Rate.estimate`: a rate of 0.5%, with the weight of 10 trials


@dataclass(slots=True)
class Rate:
    """The number of outcomes (`trials`), and of the bad ones among them (`events`)."""

    events: int = 0
    trials: int = 0

    def add(self, happened: bool) -> None:
        """Count one outcome; `happened`: whether it is bad."""
        self.events += happened
        self.trials += 1

    @property
    def estimate(self) -> float:
        """The estimated rate of bad outcomes, (events + 0.05) / (trials + 10): strictly between 0 and 1."""
        return (self.events + _PRIOR_EVENTS) / (self.trials + _PRIOR_TRIALS)


@dataclass(slots=True)
class TwoRateTest:
    """Tests whether the candidate's rate of bad events is above the stable version's.

    `against` and `in_favour` are the natural logarithms of the two kinds of evidence. `harm` is the smallest relevant
    difference of the rates; `ratio` is the number of the stable version's outcomes per block.
    """

    harm: float
    ratio: int = 1
    stable: Rate = field(default_factory=Rate)
    candidate: Rate = field(default_factory=Rate)
    against: float = 0.0
    in_favour: float = 0.0
    _waiting_stable: deque[bool] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    _waiting_candidate: deque[bool] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))

    def follow(self, ratio: int) -> None:
        """Form the next blocks with `ratio` outcomes of the stable version per outcome of the candidate.

        If the ratio changes, outcomes that wait for a block are dropped: one version has too many of them now, and the
        outcomes of a block should be of the same time.
        """
        if ratio != self.ratio:
            self.ratio = ratio
            self._waiting_stable.clear()
            self._waiting_candidate.clear()

    @property
    def gain(self) -> float:
        """How much `in_favour` grows with one more good outcome of the candidate, by the present estimates."""
        return _log_ratio_of_good(self.stable.estimate, self._worse)

    def add_stable(self, bad: bool) -> None:
        """Add one outcome of the stable version."""
        self._waiting_stable.append(bad)
        self._form_block()

    def add_candidate(self, bad: bool) -> None:
        """Add one outcome of the candidate."""
        self._waiting_candidate.append(bad)
        self._form_block()

    def _form_block(self) -> None:
        if not self._waiting_candidate or len(self._waiting_stable) < self.ratio:
            return
        bad = self._waiting_candidate.popleft()
        bad_stable = sum(self._waiting_stable.popleft() for _ in range(self.ratio))
        self._add_block(bad, bad_stable)
        self.candidate.add(bad)
        self.stable.events += bad_stable
        self.stable.trials += self.ratio

    def _add_block(self, bad: bool, bad_stable: int) -> None:
        stable, worse = self.stable.estimate, self._worse
        candidate = max(self.candidate.estimate, worse)
        pooled = (candidate + self.ratio * stable) / (1 + self.ratio)
        self.against += (
            _log_likelihood(bad, 1, candidate)
            + _log_likelihood(bad_stable, self.ratio, stable)
            - _log_likelihood(bad + bad_stable, 1 + self.ratio, pooled)
        )
        self.in_favour += _log_likelihood(bad, 1, stable) - _log_likelihood(bad, 1, worse)

    @property
    def _worse(self) -> float:
        """The rate of a candidate that is worse by `harm`."""
        return min(self.stable.estimate + self.harm, 1.0 - 1e-6)


@dataclass(slots=True)
class OneRateTest:
    """Tests whether the candidate's rate of bad events is above `tolerated`. Other fields are as in `TwoRateTest`."""

    tolerated: float
    harm: float
    candidate: Rate = field(default_factory=Rate)
    against: float = 0.0
    in_favour: float = 0.0

    @property
    def gain(self) -> float:
        """How much `in_favour` grows with one more good outcome."""
        return _log_ratio_of_good(self.tolerated, self.tolerated + self.harm)

    def add(self, bad: bool) -> None:
        """Add one outcome."""
        worse = self.tolerated + self.harm
        tolerated = _log_likelihood(bad, 1, self.tolerated)
        self.against += _log_likelihood(bad, 1, max(self.candidate.estimate, worse)) - tolerated
        self.in_favour += tolerated - _log_likelihood(bad, 1, worse)
        self.candidate.add(bad)


def _log_likelihood(events: int, trials: int, rate: float) -> float:
    if not events:  # most outcomes are good, and this runs for each request
        return trials * math.log1p(-rate)
    return events * math.log(rate) + (trials - events) * math.log1p(-rate)


def _log_ratio_of_good(rate: float, worse: float) -> float:
    """Return log((1 - rate) / (1 - worse)): the log-likelihood ratio of a good outcome at two rates of bad outcomes."""
    return _log_likelihood(0, 1, rate) - _log_likelihood(0, 1, worse)
