"""Whether a candidate goes on, is promoted or is rolled back: a pure rule over what was observed.

Six questions are asked at once: does the candidate fail more often, does it answer with NaN or infinity more often,
is it more often slower than the stable version's p90, its p99 or its worst, with some slack, and do its answers
differ from the stable version's more often than is tolerated. It is rolled back as soon as one is answered with yes
at the level ``FALSE_ALARM / 6``, so an equal version is wrongly rolled back with a probability of at most
``FALSE_ALARM``; it is promoted once all are answered with no.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from server.canary.evidence import OneRate, TwoRates

FALSE_ALARM = 0.01  # probability that a version equal to the stable one is ever rolled back
MISS = 0.005  # aimed at: probability that a version worse by the harm below is promoted
HARM = 0.01  # of a hundred requests, one more that fails, is not finite, or is slow as never before
HARM_BULK = 0.05  # of twenty requests, one more beyond the p90
HARM_DIFFERING = 0.02
SLACK = {0.90: 1.25, 0.99: 1.5, 1.0: 1.25}  # slower than this quantile by this factor counts as slow
WINDOW, RENEWED = 1_000, 100  # latencies of the stable version that quantiles come from, and how often they do
LEAST = 200  # latencies needed before any is called slow
FIRST = 20  # answers of the candidate whose latency says nothing: caches and the batcher get to know it by them


class Verdict(Enum):
    """UNDECIDED until one of the others; those are final."""

    UNDECIDED = "undecided"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True)
class Observation:
    """One answered request; ``finite`` is whether all its numbers are, ``seconds`` from queue to answer."""

    failed: bool
    finite: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of one question. The evidences reach 1 when the question is answered."""

    name: str
    stable: float | None  # rate of bad events; None where only the candidate has one
    candidate: float
    requests: int
    against: float
    in_favour: float


class Guard:
    """Collects evidence; one per trial. ``weight`` is the candidate's share of the requests that are answered."""

    def __init__(self, weight: float, tolerated: float = 0.005, compares: bool = False, most: int = 50_000) -> None:
        """``tolerated``: share of compared requests that may differ; ``most``: requests of the candidate after which
        the stable version stays if nothing is decided."""
        ratio = _ratio(weight)
        self.failing = TwoRates(HARM, ratio)
        self.not_finite = TwoRates(HARM, ratio)
        self.slow = {quantile: TwoRates(HARM_BULK if quantile == 0.90 else HARM, ratio) for quantile in SLACK}
        self.differing = OneRate(tolerated, HARM_DIFFERING) if compares else None
        self.requests = 0  # of the candidate
        self._most = most
        self._latencies: deque[float] = deque(maxlen=WINDOW)
        self._since_renewed = 0
        self._limits: dict[float, float] = {}  # seconds beyond which a request is slow, once known

    def follow(self, weight: float) -> None:
        """Go on with another share of the requests. What was learnt stays: blocks that come are as large as they are
        to be now, which no answer had a say in, so each still has a mean of at most 1 (see ``evidence``)."""
        for test in (self.failing, self.not_finite, *self.slow.values()):
            test.follow(_ratio(weight))

    def stable(self, seen: Observation) -> None:
        """Take in an answer of the stable version."""
        self.failing.add_stable(seen.failed)
        self.not_finite.add_stable(not seen.finite)
        if seen.failed:
            return
        for quantile, limit in self._limits.items():
            self.slow[quantile].add_stable(seen.seconds > limit)
        self._latencies.append(seen.seconds)
        self._since_renewed += 1
        if len(self._latencies) >= LEAST and self._since_renewed >= RENEWED:
            self._renew()

    def candidate(self, seen: Observation) -> None:
        """Take in an answer of the candidate."""
        self.requests += 1
        self.failing.add_candidate(seen.failed)
        self.not_finite.add_candidate(not seen.finite)
        if not seen.failed and self.requests > FIRST:
            for quantile, limit in self._limits.items():
                self.slow[quantile].add_candidate(seen.seconds > limit)

    def compared(self, differs: bool) -> None:
        """Take in that both versions answered the same request."""
        if self.differing is not None:
            self.differing.add(differs)

    def verdict(self) -> tuple[Verdict, str]:
        """Return what is decided, and why."""
        findings = list(self.findings())
        for finding in findings:
            if finding.against >= 1:
                return Verdict.ROLL_BACK, _accusation(finding)
        if all(finding.in_favour >= 1 for finding in findings):
            return Verdict.PROMOTE, f"no worse than the stable version in {self.requests} requests"
        if self.requests >= self._most:
            return Verdict.ROLL_BACK, f"undecided after {self.requests} requests"
        return Verdict.UNDECIDED, ""

    def findings(self) -> Iterator[Finding]:
        """Return the questions with what is known."""
        named = {
            "failing": self.failing,
            "not finite": self.not_finite,
            "slow (p90)": self.slow[0.90],
            "slow (p99)": self.slow[0.99],
            "slow (worst)": self.slow[1.0],
            "differing": self.differing,
        }
        tests = {name: test for name, test in named.items() if test is not None}
        enough, acquitted = math.log(len(named) / FALSE_ALARM), math.log(1 / MISS)
        for name, test in tests.items():
            yield Finding(
                name,
                _observed(test.stable.events, test.stable.trials) if isinstance(test, TwoRates) else None,
                _observed(test.candidate.events, test.candidate.trials),
                test.candidate.trials,
                test.against / enough,
                test.in_favour / acquitted,
            )

    def _renew(self) -> None:
        """Take the quantiles from what came before the requests they will judge."""
        ordered = sorted(self._latencies)
        last = len(ordered) - 1
        self._limits = {quantile: slack * ordered[int(quantile * last)] for quantile, slack in SLACK.items()}
        self._since_renewed = 0


def _ratio(weight: float) -> int:
    """How many answers of the stable version there are for one of the candidate, about."""
    return max(1, round(min((1 - weight) / weight, 50.0))) if weight else 1


def _observed(events: int, trials: int) -> float:
    return events / trials if trials else 0.0


def _accusation(finding: Finding) -> str:
    against = "" if finding.stable is None else f", {finding.stable:.2%} of the stable version's"
    return f"{finding.name}: {finding.candidate:.2%} of {finding.requests} requests{against}"
