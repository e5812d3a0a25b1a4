"""Decides by the observed answers whether a candidate continues, is promoted or is rolled back.

Six tests run at once. Does the candidate fail more often? Does it answer with NaN or infinity more often? Is it slower
than the stable version's p90, p99 or maximum, times a slack, more often (three tests)? Do its answers differ from the
stable version's more often than tolerated? The last test runs only if answers are compared. Texts of language models
are not compared; instead: is it unsure of its texts more often, by their mean log-probability? The candidate is rolled
back when one test says yes at the level `FALSE_ALARM / 6`, so that the probability of such a rollback of an equal
version is at most `FALSE_ALARM` (Bonferroni). It is promoted when all tests say no, and rolled back if one is still
undecided after `most` requests of the candidate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from lathe.server.canary.evidence import OneRateTest, TwoRateTest

FALSE_ALARM = 0.01  # probability that a version equal to the stable one is ever rolled back
_TESTS = 6  # among which `FALSE_ALARM` is divided, `differing` or `unsure` included
MISS = 0.005  # target for the probability that a version worse by the harm below is promoted
_THRESHOLD_AGAINST, _THRESHOLD_IN_FAVOUR = math.log(_TESTS / FALSE_ALARM), math.log(1 / MISS)
HARM_TAIL = 0.01  # difference of rates: failing, not finite, or slower than the p99 or the maximum
HARM_BULK = 0.05  # difference of rates: slower than the p90, or less sure of a text than the p10
HARM_DIFFERING = 0.02  # difference between the rate of differing answers and the tolerated rate
MAX_REQUESTS = 50_000  # requests of the candidate after which an undecided trial is rolled back
SLACK = {0.90: 1.25, 0.99: 1.5, 1.0: 1.25}  # quantile -> factor: an answer above their product is slow
UNSURE_QUANTILE, UNSURE_SLACK = 0.10, 0.1  # a text whose mean log-probability is below the quantile - slack is unsure
WINDOW, UPDATE_EVERY = (
    1_000,
    100,
)  # the quantiles are of the last 1000 latencies of the stable version, computed again every 100
MIN_LATENCIES = 200  # latencies of the stable version needed before any answer counts as slow
WARM_UP_REQUESTS = (
    20  # first answers of the candidate, whose latency is ignored: they warm up caches and the batcher's cost model
)


class Verdict(Enum):
    """The decision about a candidate; UNDECIDED until then."""

    UNDECIDED = "undecided"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True)
class Observation:
    """One answered request. `finite`: its outputs have no NaN and infinity; `seconds`: from the queue to the answer.

    For a text, `seconds` is the mean time of a token after the first, None for less than two tokens, and
    `log_probability` the mean of its tokens, None without tokens.
    """

    failed: bool
    finite: bool
    seconds: float | None
    log_probability: float | None = None


@dataclass(frozen=True, slots=True)
class TestState:
    """The state of one test: rates of bad events, and the evidence `against` and `in_favour` of the candidate.

    Both are relative to their thresholds: at 1 the test decides.
    """

    name: str
    stable: float | None  # rate of bad events; None where only the candidate has one
    candidate: float
    requests: int
    against: float
    in_favour: float


class Guard:
    """The tests of one trial. `weight` is the candidate's share of the answered requests."""

    def __init__(
        self,
        weight: float,
        tolerated: float = 0.005,
        compares: bool = False,
        most: int = MAX_REQUESTS,
        texts: bool = False,
    ) -> None:
        """`tolerated`: share of compared requests that may differ. `compares`: whether requests are compared.

        `most`: requests of the candidate after which an undecided trial is rolled back. `texts`: the answers are texts
        of a language model, which are not compared.
        """
        assert not (compares and texts)
        ratio = _ratio(weight)
        self.failing = TwoRateTest(HARM_TAIL, ratio)
        self.not_finite = TwoRateTest(HARM_TAIL, ratio)
        self.slow = {quantile: TwoRateTest(HARM_BULK if quantile == 0.90 else HARM_TAIL, ratio) for quantile in SLACK}
        self.differing = OneRateTest(tolerated, HARM_DIFFERING) if compares else None
        self.unsure = TwoRateTest(HARM_BULK, ratio) if texts else None
        self.requests = 0  # of the candidate
        self._most = most
        self._latencies: deque[float] = deque(maxlen=WINDOW)
        self._log_probabilities: deque[float] = deque(maxlen=WINDOW)
        self._least_sure: float | None = None  # a text with a lower mean log-probability is unsure; None at first
        self._since_update = 0
        self._limits: dict[float, float] = {}  # quantile -> seconds above which an answer is slow; empty at first

    def follow(self, weight: float) -> None:
        """Continue with another share of the requests, and keep the evidence.

        The size of the next blocks does not depend on any answer, so each e-variable still has a mean of at most 1
        (see `evidence`).
        """
        for _, test in self._tests():
            if isinstance(test, TwoRateTest):
                test.follow(_ratio(weight))

    def stable(self, seen: Observation) -> None:
        """Add an answer of the stable version."""
        self.failing.add_stable(seen.failed)
        self.not_finite.add_stable(not seen.finite)
        if seen.failed:
            return
        if seen.seconds is not None:
            for quantile, limit in self._limits.items():
                self.slow[quantile].add_stable(seen.seconds > limit)
            self._latencies.append(seen.seconds)
        if self.unsure is not None and seen.log_probability is not None:
            if self._least_sure is not None:
                self.unsure.add_stable(seen.log_probability < self._least_sure)
            self._log_probabilities.append(seen.log_probability)
        self._since_update += 1
        if len(self._latencies) >= MIN_LATENCIES and self._since_update >= UPDATE_EVERY:
            self._update_limits()

    def candidate(self, seen: Observation) -> None:
        """Add an answer of the candidate."""
        self.requests += 1
        self.failing.add_candidate(seen.failed)
        self.not_finite.add_candidate(not seen.finite)
        if seen.failed:
            return
        if seen.seconds is not None and self.requests > WARM_UP_REQUESTS:
            for quantile, limit in self._limits.items():
                self.slow[quantile].add_candidate(seen.seconds > limit)
        if self.unsure is not None and seen.log_probability is not None and self._least_sure is not None:
            self.unsure.add_candidate(seen.log_probability < self._least_sure)

    def compared(self, differs: bool) -> None:
        """Add the comparison of both versions' answers to one request; without `compares` it is ignored."""
        if self.differing is not None:
            self.differing.add(differs)

    def verdict(self) -> tuple[Verdict, str]:
        """Return the verdict and its reason as text, empty if it is UNDECIDED."""
        tests = list(self._tests())
        for name, test in tests:
            if test.against >= _THRESHOLD_AGAINST:
                return Verdict.ROLL_BACK, _rollback_reason(_state(name, test))
        if all(test.in_favour >= _THRESHOLD_IN_FAVOUR for _, test in tests):
            return Verdict.PROMOTE, self._reason_to_promote()
        if self.requests >= self._most:
            return Verdict.ROLL_BACK, f"undecided after {self.requests} requests"
        return Verdict.UNDECIDED, ""

    def findings(self) -> Iterator[TestState]:
        """Yield the state of each of the six tests; of five if answers are neither compared nor texts."""
        for name, test in self._tests():
            yield _state(name, test)

    def needed(self) -> dict[str, int]:
        """Return for each test the further outcomes until it is in favour of the candidate, if none of them is bad."""
        return {
            name: max(math.ceil((_THRESHOLD_IN_FAVOUR - test.in_favour) / test.gain), 0) for name, test in self._tests()
        }

    def _tests(self) -> Iterator[tuple[str, TwoRateTest | OneRateTest]]:
        """Yield the tests with their names; `differing` only if answers are compared, `unsure` only for texts."""
        yield "failing", self.failing
        yield "not finite", self.not_finite
        yield "slow (p90)", self.slow[0.90]
        yield "slow (p99)", self.slow[0.99]
        yield "slow (worst)", self.slow[1.0]
        if self.differing is not None:
            yield "differing", self.differing
        if self.unsure is not None:
            yield "unsure (p10)", self.unsure

    def _reason_to_promote(self) -> str:
        compared = "; its answers were not compared" if self.differing is None and self.unsure is None else ""
        return f"no worse than the live version in {self.requests} requests{compared}"

    def _update_limits(self) -> None:
        """Set the latencies above which answers count as slow: quantiles of the stable version's, times a slack.

        Set the mean log-probability below which texts count as unsure as well. Only earlier requests are used, so that
        a limit does not depend on the answers that it judges.
        """
        ordered = sorted(self._latencies)
        last = len(ordered) - 1
        self._limits = {quantile: slack * ordered[int(quantile * last)] for quantile, slack in SLACK.items()}
        if len(self._log_probabilities) >= MIN_LATENCIES:
            sure = sorted(self._log_probabilities)
            self._least_sure = sure[int(UNSURE_QUANTILE * (len(sure) - 1))] - UNSURE_SLACK
        self._since_update = 0


def _state(name: str, test: TwoRateTest | OneRateTest) -> TestState:
    return TestState(
        name,
        _observed_rate(test.stable.events, test.stable.trials) if isinstance(test, TwoRateTest) else None,
        _observed_rate(test.candidate.events, test.candidate.trials),
        test.candidate.trials,
        test.against / _THRESHOLD_AGAINST,
        test.in_favour / _THRESHOLD_IN_FAVOUR,
    )


def _ratio(weight: float) -> int:
    """Return the answers of the stable version per answer of the candidate: an integer from 1 to 50; 1 for weight 0."""
    return max(1, round(min((1 - weight) / weight, 50.0))) if weight else 1


def _observed_rate(events: int, trials: int) -> float:
    return events / trials if trials else 0.0


def _rollback_reason(finding: TestState) -> str:
    counted = "comparisons" if finding.stable is None else "requests"
    against = "" if finding.stable is None else f", {finding.stable:.2%} of the live version's"
    return f"{finding.name}: {finding.candidate:.2%} of {finding.requests} {counted}{against}"
