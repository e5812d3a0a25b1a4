"""The decision rule, simulated: equal versions pass, and worse ones are rolled back within a thousand requests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from lathe.server.canary.evidence import OneRateTest, TwoRateTest
from lathe.server.canary.guard import FALSE_ALARM, WARM_UP_REQUESTS, Guard, Observation, Verdict
from lathe.server.canary.plan import CanaryPlan

Draw = Callable[[random.Random], Observation]
SOUND = Observation(failed=False, finite=True, seconds=0.0)


def lognormal(rng: random.Random) -> Observation:
    return Observation(False, True, rng.lognormvariate(math.log(0.01), 0.5))  # `replace` takes six times as long


def writing(rng: random.Random) -> Observation:
    """A text, of a version that is more or less sure of what it writes."""
    return replace(lognormal(rng), log_probability=-rng.lognormvariate(math.log(0.8), 0.5))


def writing_unsurely(rng: random.Random) -> Observation:
    seen = writing(rng)
    assert seen.log_probability is not None
    return replace(seen, log_probability=seen.log_probability - 1)


def writing_single_tokens(rng: random.Random) -> Observation:
    return replace(writing(rng), seconds=None)


def failing_now_and_then(rng: random.Random) -> Observation:
    seconds = lognormal(rng).seconds
    return Observation(rng.random() < 0.01, True, seconds)


def failing_in_two_percent(rng: random.Random) -> Observation:
    return replace(lognormal(rng), failed=rng.random() < 0.02)


def twice_as_slow(rng: random.Random) -> Observation:
    return slowed(lognormal(rng))


def slowed(seen: Observation) -> Observation:
    assert seen.seconds is not None
    return replace(seen, seconds=2 * seen.seconds)


def mostly_quick(rng: random.Random) -> Observation:
    return Observation(False, True, rng.uniform(0.009, 0.011) if rng.random() < 0.985 else rng.uniform(0.02, 0.022))


def with_a_tail_twice_as_long(rng: random.Random) -> Observation:
    seen = mostly_quick(rng)
    return slowed(seen) if seen.seconds is not None and seen.seconds > 0.015 else seen


def answering_nan(rng: random.Random) -> Observation:
    return replace(lognormal(rng), finite=False)


@dataclass
class Run:
    verdict: Verdict
    reason: str
    requests: int


@dataclass(frozen=True)
class Ramp:
    """Growing shares: each for this number of the candidate's requests, and the last one from then on."""

    weights: tuple[float, ...]
    requests: int

    def at(self, number: int) -> float:
        return self.weights[min(number // self.requests, len(self.weights) - 1)]


def ramp_of(weight: float) -> Ramp:
    """The steps of a trial for which only the share was given."""
    steps = CanaryPlan(2, weight=weight).asked().steps
    return Ramp(tuple(step.weight for step in steps) or (weight,), steps[0].requests if steps else 1)


def simulate(
    seed: int,
    stable: Draw,
    candidate: Draw,
    share: float | Ramp,
    differing: float | None = None,
    most: int = 50_000,
    texts: bool = False,
) -> Run:
    """Simulate requests until there is a verdict."""
    rng = random.Random(seed)
    ramp = share if isinstance(share, Ramp) else Ramp((share,), 1)
    guard = Guard(weight := ramp.at(0), compares=differing is not None, most=most, texts=texts)
    while True:
        if ramp.at(guard.requests) != weight:
            guard.follow(weight := ramp.at(guard.requests))
        if rng.random() >= weight:
            guard.stable(stable(rng))
            continue
        guard.candidate(candidate(rng))
        if differing is not None:
            guard.compared(rng.random() < differing)
        verdict, reason = guard.verdict()
        if verdict is not Verdict.UNDECIDED:
            return Run(verdict, reason, guard.requests)


def wrongly_rolled_back(seeds: range, stable: Draw, share: float | Ramp) -> int:
    seen = [simulate(seed, stable, stable, share, differing=0.0) for seed in seeds]
    return sum(run.verdict is not Verdict.PROMOTE for run in seen)


@pytest.mark.sample(3)
@pytest.mark.parametrize("stable", [lognormal, failing_now_and_then, mostly_quick])
def test_an_equal_version_is_promoted(stable: Draw) -> None:
    assert wrongly_rolled_back(range(20), stable, 0.2) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stable", "share"),
    [
        (lognormal, 0.1),
        (failing_now_and_then, 0.3),
        (mostly_quick, 0.5),
        (failing_now_and_then, ramp_of(0.5)),
        (mostly_quick, ramp_of(0.5)),
        (failing_now_and_then, Ramp((0.01, 0.1, 0.5), 200)),
    ],
)
def test_an_equal_version_is_rolled_back_in_at_most_one_run_of_a_hundred(stable: Draw, share: float | Ramp) -> None:
    """A thousand runs; 300 suffice if none of them is rolled back.

    If two percent were rolled back, there would be none among 300 in one of 400 samples, and at most ten among a
    thousand in one of 100.
    """
    if wrong := wrongly_rolled_back(range(300), stable, share):
        wrong += wrongly_rolled_back(range(300, 1_000), stable, share)
    assert wrong <= 1_000 * FALSE_ALARM


def test_a_version_that_becomes_worse_in_a_later_step_is_rolled_back() -> None:
    ramp = Ramp((0.01, 0.2, 0.3), 100)
    runs = [simulate(seed, lognormal, failing_in_two_percent, ramp) for seed in range(25)]
    assert {run.verdict for run in runs} == {Verdict.ROLL_BACK}
    assert max(run.requests for run in runs) <= 1_000


@pytest.mark.sample(4)
@pytest.mark.parametrize("weight", [0.05, 0.2, 0.3, 0.5])
@pytest.mark.parametrize(
    ("stable", "candidate", "name"),
    [
        (lognormal, failing_in_two_percent, "failing"),
        (lognormal, answering_nan, "not finite"),
        (lognormal, twice_as_slow, "slow"),
        (mostly_quick, with_a_tail_twice_as_long, "slow"),
    ],
)
def test_a_worse_version_is_rolled_back_within_a_thousand_requests(
    stable: Draw, candidate: Draw, name: str, weight: float
) -> None:
    runs = [simulate(seed, stable, candidate, ramp_of(weight)) for seed in range(25)]
    assert {run.verdict for run in runs} == {Verdict.ROLL_BACK}
    assert all(run.reason.startswith(name) for run in runs)
    assert max(run.requests for run in runs) <= 1_000


def test_a_version_with_other_answers_is_rolled_back_within_1000_requests() -> None:
    runs = [simulate(seed, lognormal, lognormal, 0.2, differing=0.05) for seed in range(25)]
    assert {run.verdict for run in runs} == {Verdict.ROLL_BACK}
    assert all(run.reason.startswith("differing") and run.requests <= 1_000 for run in runs)


def test_a_version_that_is_less_sure_of_its_texts_is_rolled_back_within_1000_requests() -> None:
    runs = [simulate(seed, writing, writing_unsurely, 0.2, texts=True) for seed in range(25)]
    assert {run.verdict for run in runs} == {Verdict.ROLL_BACK}
    assert all(run.reason.startswith("unsure") and run.requests <= 1_000 for run in runs)


@pytest.mark.parametrize("seed", range(5))
def test_a_version_that_writes_equal_texts_is_promoted(seed: int) -> None:
    run = simulate(seed, writing, writing, 0.3, texts=True)
    assert (run.verdict, run.reason) == (Verdict.PROMOTE, f"no worse than the live version in {run.requests} requests")


def test_texts_of_one_token_have_no_latency() -> None:
    run = simulate(1, writing_single_tokens, writing_single_tokens, 0.5, most=500, texts=True)
    assert run.reason == "undecided after 500 requests"  # nothing says that the candidate is quick enough


def test_a_candidate_needs_as_many_good_answers_as_the_tests_say() -> None:
    guard = Guard(0.5, compares=True)
    for _ in range(300):
        guard.stable(SOUND)
    for _ in range(WARM_UP_REQUESTS):
        guard.candidate(SOUND)
        guard.stable(SOUND)
    needed = max(count for name, count in guard.needed().items() if name != "differing")
    for _ in range(guard.needed()["differing"]):
        guard.compared(False)
    answers = 0
    while guard.verdict()[0] is Verdict.UNDECIDED:
        guard.candidate(SOUND)
        guard.stable(SOUND)
        answers += 1
    assert answers == pytest.approx(needed, abs=5)  # the estimated rate of the live version falls meanwhile
    assert set(guard.needed().values()) == {0}


def test_an_undecided_trial_ends_with_the_stable_version() -> None:
    def somewhat_worse(rng: random.Random) -> Observation:
        return replace(lognormal(rng), failed=rng.random() < 0.005)

    run = simulate(1, lognormal, somewhat_worse, 0.5, most=300)
    assert (run.verdict, run.requests) == (Verdict.ROLL_BACK, 300)
    assert run.reason == "undecided after 300 requests"


def test_the_evidence_against_equal_rates_is_an_e_value() -> None:
    """Its mean is at most 1 for every common rate; exact over all outcomes of three blocks."""
    for rate in (0.01, 0.3, 0.9):
        for ratio in (1, 3):
            assert _mean_evidence(TwoRateTest(0.1, ratio), rate, blocks=3) <= 1 + 1e-9


@pytest.mark.parametrize("ratios", [(3, 1, 2), (1, 4, 1), (1, 2, 3)])
def test_the_evidence_stays_an_e_value_when_the_shares_change(ratios: tuple[int, ...]) -> None:
    """A block may have any size that does not depend on the outcomes in it."""
    for rate in (0.01, 0.3, 0.9):
        assert _mean_evidence(TwoRateTest(0.1, ratios[0]), rate, blocks=3, ratios=ratios) <= 1 + 1e-9


def test_outcomes_of_another_step_are_not_compared() -> None:
    """At 1% outcomes of the stable version pile up; at 50% they would be old when they are compared."""
    guard = Guard(0.01)
    for _ in range(2_000):
        guard.stable(replace(SOUND, failed=True))
    guard.follow(0.5)
    guard.candidate(SOUND)
    assert guard.failing.stable.trials == 0
    guard.stable(SOUND)
    assert (guard.failing.stable.trials, guard.failing.stable.events, guard.failing.candidate.trials) == (1, 0, 1)


def _mean_evidence(test: TwoRateTest, rate: float, blocks: int, ratios: tuple[int, ...] = ()) -> float:
    if blocks == 0:
        return math.exp(test.against)
    if ratios:
        test.follow(ratios[len(ratios) - blocks])
    total = 0.0
    for outcome in range(2 ** (test.ratio + 1)):
        bits = [bool(outcome >> i & 1) for i in range(test.ratio + 1)]
        branch = TwoRateTest(test.harm, test.ratio, replace(test.stable), replace(test.candidate), test.against)
        for bad in bits[1:]:
            branch.add_stable(bad)
        branch.add_candidate(bits[0])
        chance = math.prod(rate if bad else 1 - rate for bad in bits)
        total += chance * _mean_evidence(branch, rate, blocks - 1, ratios)
    return total


def test_a_tolerated_rate_is_no_evidence() -> None:
    rng = random.Random(0)
    test = OneRateTest(tolerated=0.05, harm=0.05)
    highest = 0.0
    for _ in range(5_000):
        test.add(rng.random() < 0.05)
        highest = max(highest, test.against)
    assert highest < math.log(500)
    assert test.in_favour > math.log(200)


def test_the_first_answers_of_a_candidate_are_no_evidence_of_latency() -> None:
    """The batcher does not know their cost yet, and the weights are not in the CPU's caches."""
    guard = Guard(0.1)
    for _ in range(1_000):
        guard.stable(SOUND)
    slow = replace(SOUND, seconds=1.0)
    for _ in range(WARM_UP_REQUESTS):
        guard.candidate(slow)
    assert guard.verdict()[0] is Verdict.UNDECIDED
    assert all(finding.against <= 0 for finding in guard.findings())
    for _ in range(100):
        guard.candidate(slow)
    assert guard.verdict()[0] is Verdict.ROLL_BACK
