"""Candidates get their share of the traffic, and are promoted or rolled back automatically."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.server.access.authority import Authority
from lathe.server.canary.plan import CanaryPlan
from lathe.server.canary.traffic import MAX_SHADOWS_IN_FLIGHT, Trial
from lathe.server.errors import BadRequest, Conflict, NotFound, ServerError, StorageFull
from lathe.server.repository import trials
from lathe.server.repository.store import Origin, Outcome
from lathe.server.serving.dataplane import DataPlane
from lathe.server.types import InferRequest, InferResult
from tests.server.repository.world import ToyModel, World, run, toy, world

NOBODY = Origin("test")
ROW = np.ones((1, 4), np.float32)


@asynccontextmanager
async def with_trial(root: Path, candidate: bytes, **plan: Any) -> AsyncIterator[World]:
    """Version 1 live, version 2 on trial."""
    async with world(root) as w:
        await w.push(toy(1.0))
        await w.push(candidate)
        await w.rollout.trials.start("m", CanaryPlan(2, **plan), NOBODY)
        yield w


async def ask(w: World, key: str = "", version: str = "") -> InferResult:
    return await DataPlane(w.registry, Authority("127.0.0.1")).infer(
        InferRequest("m", {"x": ROW}, version, sticky_key=key)
    )


async def ask_many(w: World, count: int) -> Counter[int]:
    """Send requests one after the other; return how many each version answered, and under 0 how many failed."""
    seen: Counter[int] = Counter()
    for _ in range(count):
        try:
            seen[(await ask(w)).ref.version] += 1
        except ServerError:
            seen[0] += 1
    return seen


async def ask_until_decided(w: World, most: int) -> Counter[int]:
    """Send requests until the trial has ended, at most `most`; then wait until that is written."""
    seen: Counter[int] = Counter()
    while w.model("m").aliases.canary is not None and seen.total() < most:
        seen += await ask_many(w, 20)
    for _ in range(2_000):
        if w.model("m").aliases.canary is None:
            return seen
        await asyncio.sleep(0.01)
    raise AssertionError("nothing was decided")


def trial(w: World) -> Trial:
    found = w.rollout.trials.find("m")
    assert found is not None
    return found


async def last_change(w: World) -> tuple[str, str, str]:
    record = (await w.rollout.catalog.audit("m"))[-1]
    return record.action, record.actor, record.reason


def test_a_candidate_gets_its_share_of_requests_without_a_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0), weight=0.2) as w:
            seen = await ask_many(w, 400)
            assert abs(seen[2] - 80) <= 2
            assert seen[1] + seen[2] == 400
            assert {(await ask(w, version="1")).ref.version for _ in range(20)} == {1}
            assert trial(w).guard.requests == seen[2]

    run(scenario())


def test_equal_keys_get_the_same_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0), weight=0.5) as w:
            keys = [f"user {i}" for i in range(200)]
            first = [(await ask(w, key)).ref.version for key in keys]
            assert first == [(await ask(w, key)).ref.version for key in keys]
            assert 25 <= first.count(2) <= 55  # a large share begins as a fifth

    run(scenario())


def test_an_equal_version_is_promoted_and_can_be_rolled_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0), weight=0.5, shadow=0.5) as w:
            await ask_until_decided(w, 20_000)
            action, actor, reason = await last_change(w)
            assert (action, actor, w.live()) == ("promoted", "guard", 2)
            assert reason.startswith("no worse than the live version")
            await w.rollout.rollback("m", "live", None, NOBODY)
            assert w.live() == 1

    run(scenario())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("candidate", "plan", "name", "most"),
    [
        (toy(float("nan")), {"weight": 0.2}, "not finite", 20),
        (toy(1.0, fails_every=50), {"weight": 0.1}, "failing", 1_000),
        (toy(1.0, delay=0.004), {"weight": 0.2}, "slow", 1_000),
        (toy(1.0, differs_every=20), {"weight": 0.1, "shadow": 0.2}, "differing", 1_000),
    ],
)
def test_a_worse_version_is_rolled_back(
    tmp_path: Path, candidate: bytes, plan: dict[str, float], name: str, most: int
) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, candidate, **plan) as w:
            seen = await ask_until_decided(w, int(most / plan["weight"]))
            action, actor, reason = await last_change(w)
            assert (action, actor, w.live()) == ("rolled_back", "guard", 1)
            assert reason.startswith(name), reason
            assert seen[0] + seen[2] <= most
            assert seen[0] <= most / 50 + 1  # the candidate's share failed
            assert (await ask_many(w, 50))[1] == 50

    run(scenario())


def test_a_shadowed_version_answers_no_caller(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.01), weight=0.0, shadow=1.0) as w:
            seen = await ask_until_decided(w, 2_000)
            assert seen.keys() == {1}
            assert (await last_change(w))[2].startswith("differing: 100.00%")

    run(scenario())


def test_within_the_tolerance_answers_agree(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.01), weight=0.0, shadow=1.0, rtol=0.02) as w:
            await ask_until_decided(w, 20_000)
            assert (await last_change(w))[0] == "promoted"

    run(scenario())


def test_a_passed_candidate_without_promotion_waits_for_a_person(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0), weight=0.5, promote=False) as w:
            while trial(w).verdict.value == "undecided":
                await ask_many(w, 100)
            seen = await ask_many(w, 100)
            assert (trial(w).verdict.value, w.live()) == ("promote", 1)
            assert 18 <= seen[2] <= 22

    run(scenario())


def test_a_trial_ends_when_the_live_version_changes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(2.0)) as w:
            await w.push(toy(3.0))
            await w.rollout.set_alias("m", "blue", 3, NOBODY)
            assert trial(w).plan.version == 2
            with pytest.raises(Conflict, match="a canary of version 2 is running"):
                await w.rollout.delete("m", 2, NOBODY)
            await w.rollout.set_alias("m", "live", 3, NOBODY)
            assert w.rollout.trials.find("m") is None
            assert await ask_many(w, 30) == {3: 30}

    run(scenario())


def test_a_trial_can_be_cancelled_and_another_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0), weight=0.5) as w:
            first = trial(w)
            await w.rollout.trials.cancel("m", NOBODY)
            assert await ask_many(w, 20) == {1: 20}
            with pytest.raises(NotFound, match="has no canary"):
                await w.rollout.trials.cancel("m", NOBODY)
            await w.rollout.trials.start("m", CanaryPlan(2, weight=0.5), NOBODY)
            assert trial(w) is not first
            assert trial(w).guard.requests == 0

    run(scenario())


def test_an_invalid_trial_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0)) as w:
            await w.push(toy(1.0, (-1, 5)))
            plan, generation = trial(w).plan, w.model("m").aliases.generation
            for candidate, error, message in (
                (CanaryPlan(9), NotFound, "no version 9"),
                (CanaryPlan(1), Conflict, "version 1 is live"),
                (CanaryPlan(2), Conflict, "a canary of version 2 is running"),
                (CanaryPlan(2, weight=0.7), BadRequest, r"weight: expected a number from 0 to 0.5, got 0.7"),
                (CanaryPlan(2, weight=0.0), BadRequest, "one of them above 0"),
                (CanaryPlan(2, rtol=float("nan")), BadRequest, "rtol"),
            ):
                with pytest.raises(error, match=message):
                    await w.rollout.trials.start("m", candidate, NOBODY)
            await w.rollout.trials.cancel("m", NOBODY)
            with pytest.raises(Conflict, match="differ from those of version 1"):
                await w.rollout.trials.start("m", CanaryPlan(3), NOBODY)
            assert plan.generation < generation == w.model("m").aliases.generation - 1

    run(scenario())


def test_a_trial_survives_a_restart_and_is_seen_by_other_servers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0), weight=0.5) as w:
            plan = trial(w).plan
        async with world(tmp_path) as w, world(tmp_path) as other:
            assert trial(w).plan == trial(other).plan == plan
            assert (await ask_many(other, 20))[2] == 4
            await w.rollout.trials.cancel("m", NOBODY)
            await other.rollout.sync("m")
            assert other.rollout.trials.find("m") is None

    run(scenario())


def test_a_late_verdict_changes_nothing(tmp_path: Path) -> None:
    """Two servers reach a verdict; the second finds that the trial has ended, even if an equal one has begun."""

    async def scenario() -> None:
        async with with_trial(tmp_path, toy(float("nan")), weight=0.5) as w, world(tmp_path) as other:
            await ask_until_decided(w, 200)
            await w.rollout.trials.start("m", CanaryPlan(2, weight=0.5), NOBODY)
            while trial(other).verdict.value == "undecided":
                await ask_many(other, 10)
            await asyncio.sleep(0.1)
            await w.rollout.sync("m")
            assert trial(w).plan.generation == w.model("m").aliases.generation

    run(scenario())


def test_errors_of_callers_do_not_count_against_the_candidate(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0), weight=0.5) as w:
            plane = DataPlane(w.registry, Authority("127.0.0.1"))
            for _ in range(40):
                with pytest.raises(BadRequest):
                    await plane.infer(InferRequest("m", {"x": np.ones((1, 5), np.float32)}))
            assert trial(w).guard.failing.candidate.events == 0

    run(scenario())


def test_cancelled_requests_count_against_the_candidate(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0, delay=0.03), weight=0.2) as w:
            for _ in range(400):
                if w.model("m").aliases.canary is None:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ask(w), 0.01)
            assert (await last_change(w))[0] == "rolled_back"

    run(scenario())


def test_a_passed_candidate_is_still_watched(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0), weight=0.5, promote=False) as w:
            while trial(w).verdict.value == "undecided":
                await ask_many(w, 100)
            model = w.registry.resolve("m", "2").model
            assert isinstance(model, ToyModel)
            model.fails_every = 1
            await ask_until_decided(w, 2_000)
            assert (await last_change(w))[0] == "rolled_back"

    run(scenario())


def test_a_verdict_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "RETRY", 0.02)

    async def scenario() -> None:
        async with with_trial(tmp_path, toy(float("nan")), weight=0.5) as w:
            write, failures = w.store.change_trial, [StorageFull("the disk is full")] * 3

            def fail_first(*arguments: Any, **more: Any) -> Outcome:
                if failures:
                    raise failures.pop()
                return write(*arguments, **more)

            monkeypatch.setattr(w.store, "change_trial", fail_first)
            await ask_until_decided(w, 2_000)
            assert not failures
            assert (await last_change(w))[0] == "rolled_back"

    run(scenario())


def test_the_smallest_share_gets_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0), weight=1e-310) as w:
            assert await ask_many(w, 50) == {1: 50}

    run(scenario())


def test_copies_for_a_shadowed_version_do_not_delay_callers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with with_trial(tmp_path, toy(1.0, delay=0.02), weight=0.0, shadow=1.0) as w:
            await ask_many(w, 4 * MAX_SHADOWS_IN_FLIGHT)
            assert w.registry.resolve("m", "2").in_flight <= MAX_SHADOWS_IN_FLIGHT + 1

    run(scenario())
