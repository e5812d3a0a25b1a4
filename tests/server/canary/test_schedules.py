"""Rollouts in steps: their shares, their times, restarts, clock changes, and the audit log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lathe.server.api.management.canary_schemas import CanaryAsked
from lathe.server.canary.guard import Verdict
from lathe.server.canary.plan import SCHEDULED, CanaryPlan
from lathe.server.canary.steps import Step, format_time
from lathe.server.errors import BadRequest, Conflict, StorageFull
from lathe.server.repository.canary_schedules import CanarySchedules, Clocks
from lathe.server.repository.live_models import LiveModel
from lathe.server.repository.store import Outcome
from tests.server.canary.test_trials import NOBODY, ask, ask_many, ask_until_decided, trial
from tests.server.jobs.test_crash import server as process
from tests.server.repository.world import ToyModel, World, run, toy, world
from tests.server.server_thread import until

STEPS = (Step(0.01, 600.0), Step(0.1, 1800.0), Step(0.5, 3600.0))


@dataclass
class Time:
    """Both clocks of a machine, set by hand."""

    wall: float
    monotonic: float = 1_000.0

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@dataclass
class Server:
    """One server over a repository, with its own clocks."""

    world: World
    schedules: CanarySchedules

    @property
    def plan(self) -> CanaryPlan | None:
        return self.world.model("m").aliases.canary

    @property
    def step(self) -> int | None:
        return self.plan.step if self.plan else None

    async def changes(self) -> list[tuple[str, str, str]]:
        return [(r.action, r.actor, r.reason) for r in await self.world.rollout.catalog.audit("m")]


@asynccontextmanager
async def server(root: Path, time: Time) -> AsyncIterator[Server]:
    async with world(root) as w:
        clocks = Clocks(lambda: time.monotonic, lambda: time.wall)
        yield Server(w, CanarySchedules(w.rollout._models, w.rollout.trials, clocks))


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time(1_900_000_000.0)
    monkeypatch.setattr("lathe.server.repository.trials.time.time", lambda: found.wall)
    return found


async def begin(s: Server, candidate: bytes = b"", **plan: Any) -> None:
    await s.world.push(toy(1.0))
    await s.world.push(candidate or toy(1.0))
    await s.world.rollout.trials.start("m", CanaryPlan(2, **{"steps": STEPS, **plan}), NOBODY)


def test_a_rollout_goes_through_its_steps_and_then_live(tmp_path: Path, time: Time) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s)
            for step in STEPS:
                await s.schedules.look()
                assert s.plan is not None and s.plan.weight == step.weight
                seen = await ask_many(s.world, 400)
                assert abs(seen[2] - 400 * step.weight) <= 2
                assert s.schedules.left("m", s.plan) == step.seconds
                time.pass_by(step.seconds - 1)
                await s.schedules.look()
                assert s.plan.weight == step.weight
                time.pass_by(1)
            await s.schedules.look()
            assert (s.step, s.world.live()) == (2, 1)  # there is no verdict yet
            while s.plan is not None:
                await ask_many(s.world, 100)
            assert s.world.live() == 2
            changes = await s.changes()
            assert changes[2:-1] == [
                ("canary", "test", ""),
                ("step", "schedule", "step 2 of 3: 10% of the requests for 1800 s"),
                ("step", "schedule", "step 3 of 3: 50% of the requests for 3600 s"),
            ]
            assert changes[-1][:2] == ("promoted", "guard")

    run(scenario())


def test_a_passed_candidate_waits_for_the_end_of_its_last_step(tmp_path: Path, time: Time) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s, steps=(Step(0.5, 600.0),))
            while trial(s.world).verdict.value == "undecided":
                await ask_many(s.world, 100)
            assert (trial(s.world).verdict.value, s.world.live()) == ("promote", 1)
            time.pass_by(600.0)
            await s.schedules.look()
            while s.plan is not None:  # written in the background
                await ask(s.world)
            assert s.world.live() == 2

    run(scenario())


def test_a_bad_candidate_is_rolled_back_in_any_step(tmp_path: Path, time: Time) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s)
            await ask_many(s.world, 300)
            time.pass_by(600.0)
            await s.schedules.look()
            model = s.world.registry.resolve("m", "2").model
            assert isinstance(model, ToyModel)
            model.fails_every = 1
            while s.plan is not None:
                await ask_many(s.world, 10)
            assert (await s.changes())[-1][:2] == ("rolled_back", "guard")
            time.pass_by(10_000.0)
            await s.schedules.look()
            assert s.plan is None

    run(scenario())


def test_a_rejected_candidate_stays_rejected_when_its_last_step_ends(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict is final, even if it cannot be written yet, and whatever the evidence says later."""
    told: list[Verdict] = []

    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s, steps=(Step(0.5, 600.0),))
            s.world.rollout._models.decided = lambda model, plan, verdict, reason: told.append(verdict)
            model = s.world.registry.resolve("m", "2").model
            assert isinstance(model, ToyModel)
            model.fails_every = 1
            while not told:
                await ask_many(s.world, 10)
            monkeypatch.setattr(trial(s.world).guard, "verdict", lambda: (Verdict.UNDECIDED, ""))
            time.pass_by(600.0)
            await s.schedules.look()
            assert trial(s.world).verdict is Verdict.ROLL_BACK
            assert (await ask_many(s.world, 20)) == {1: 20}
            assert told == [Verdict.ROLL_BACK]

    run(scenario())


def test_a_rollout_that_cannot_proceed_does_not_delay_others(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            for name in ("a", "m"):
                await s.world.push(toy(1.0), name)
                await s.world.push(toy(1.0), name)
                await s.world.rollout.trials.start(name, CanaryPlan(2, steps=STEPS), NOBODY)
            advance = s.world.rollout.trials.advance

            async def failing(model: LiveModel, *more: Any) -> Outcome:
                if model.name == "a":
                    raise RuntimeError("unforeseen")
                return await advance(model, *more)

            monkeypatch.setattr(s.world.rollout.trials, "advance", failing)
            await s.schedules.look()
            time.pass_by(600.0)
            await s.schedules.look()
            assert s.step == 1

    run(scenario())
    assert "a rollout could not be advanced" in caplog.text


def test_evidence_and_sticky_keys_persist_from_step_to_step(tmp_path: Path, time: Time) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s, steps=(Step(0.2, 60.0), Step(0.5, 60.0)))
            keys = [f"user {number}" for number in range(200)]
            before = {key for key in keys if (await ask(s.world, key)).ref.version == 2}
            first, requests = trial(s.world), trial(s.world).guard.requests
            time.pass_by(60.0)
            await s.schedules.look()
            assert trial(s.world) is first and first.guard.requests == requests > 0
            after = {key for key in keys if (await ask(s.world, key)).ref.version == 2}
            assert before < after
            assert first.guard.failing.ratio == 1

    run(scenario())


def test_a_restart_continues_the_current_step(tmp_path: Path, time: Time) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s)
            time.pass_by(600.0)
            await s.schedules.look()
            time.pass_by(500.0)
        time.monotonic = 5.0  # another boot
        time.wall += 100.0
        async with server(tmp_path, time) as s:
            assert s.plan is not None and (s.step, s.schedules.left("m", s.plan)) == (1, 1200.0)
            time.pass_by(1199.0)
            await s.schedules.look()
            assert s.step == 1
            time.pass_by(1.0)
            await s.schedules.look()
            assert s.step == 2

    run(scenario())


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_setting_the_clock_of_a_running_server_changes_nothing(tmp_path: Path, time: Time, jump: float) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s)
            await s.schedules.look()
            time.wall += jump
            time.pass_by(599.0)
            await s.schedules.look()
            assert s.step == 0
            time.pass_by(1.0)
            await s.schedules.look()
            assert s.plan is not None and (s.step, s.schedules.left("m", s.plan)) == (1, 1800.0)

    run(scenario())


@pytest.mark.parametrize(("jump", "step", "left"), [(-1e6, 0, 600.0), (1e6, 1, 1800.0)])
def test_a_clock_set_while_no_server_runs_costs_at_most_one_step(
    tmp_path: Path, time: Time, jump: float, step: int, left: float
) -> None:
    """Set back, the step starts again; set forward, it is over, and the next one takes its whole time."""

    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s)
        time.wall += jump
        async with server(tmp_path, time) as s:
            for _ in range(3):
                await s.schedules.look()
            assert s.plan is not None and (s.step, s.schedules.left("m", s.plan)) == (step, left)

    run(scenario())


def test_a_rollout_does_not_start_before_its_time(tmp_path: Path, time: Time) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s, start_at=format_time(time.wall + 3600.0), shadow=1.0)
            await s.schedules.look()
            assert s.plan is not None and (s.step, s.schedules.left("m", s.plan)) == (SCHEDULED, 3600.0)
            assert await ask_many(s.world, 100) == {1: 100}
            assert s.world.rollout.trials.find("m") is None
            with pytest.raises(Conflict, match="a canary of version 2 is running"):
                await s.world.rollout.trials.start("m", CanaryPlan(2), NOBODY)
            time.pass_by(3600.0)
            await s.schedules.look()
            assert s.step == 0 and trial(s.world).plan.weight == 0.01
            assert (await s.changes())[-1] == ("step", "schedule", "step 1 of 3: 1% of the requests for 600 s")

    run(scenario())


def test_a_step_without_traffic_gets_its_requests_from_shadows(tmp_path: Path, time: Time) -> None:
    """The candidate passes after some 600 comparisons, and the step still counts further ones."""

    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s, steps=(Step(0.0, 0.0, 900), Step(0.2, 600.0)), shadow=1.0)
            await ask_many(s.world, 920)
            await s.schedules.look()
            assert trial(s.world).verdict is Verdict.PROMOTE
            assert (s.step, s.world.live()) == (1, 1)

    run(scenario())


def test_a_passed_candidate_is_still_compared(tmp_path: Path, time: Time) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s, steps=(Step(0.5, 600.0),), shadow=1.0)
            while trial(s.world).verdict is Verdict.UNDECIDED:
                await ask_many(s.world, 100)
            model = s.world.registry.resolve("m", "2").model
            assert isinstance(model, ToyModel)
            model.differs_every = 1
            await ask_until_decided(s.world, 2_000)
            action, _, reason = (await s.changes())[-1]
            assert (action, reason.partition(":")[0]) == ("rolled_back", "differing")

    run(scenario())


@pytest.mark.parametrize("restarted", [False, True])
def test_only_seconds_delay_the_promotion(tmp_path: Path, time: Time, restarted: bool) -> None:
    """A later step that only counts requests does not, whether or not the server was restarted before."""

    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s, steps=(Step(0.2, 60.0), Step(0.5, 0.0, 100_000), Step(0.5, 0.0)))
            time.pass_by(60.0)
            await s.schedules.look()
            assert (s.step, s.world.live()) == (1, 1)
            if not restarted:
                await ask_until_decided(s.world, 10_000)
                assert s.world.live() == 2
                return
        async with server(tmp_path, time) as s:
            await ask_until_decided(s.world, 10_000)
            assert s.world.live() == 2

    run(scenario())


def test_a_large_share_begins_as_a_smaller_one(tmp_path: Path, time: Time) -> None:
    """The smaller steps need only requests, not time; a candidate that passes earlier goes live earlier."""

    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s, steps=(), weight=0.5, promote=False)
            assert s.plan is not None and s.plan.steps == (Step(0.2, 0.0, 1_000), Step(0.5, 0.0))
            while trial(s.world).guard.requests < 1_000:
                await s.schedules.look()
                assert s.plan.weight == 0.2
                await ask(s.world)
            await s.schedules.look()
            assert s.plan.weight == 0.5
            assert (await ask_many(s.world, 100))[2] == pytest.approx(50, abs=2)
            assert (await s.changes())[-1] == ("step", "schedule", "step 2 of 2: 50% of the requests")

    run(scenario())


@pytest.mark.slow
def test_a_trial_without_steps_is_one_step(tmp_path: Path, time: Time) -> None:
    """The step is over when the candidate has passed."""

    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s, steps=(), weight=0.5, start_at=format_time(time.wall + 10.0))
            time.pass_by(10.0)
            await s.schedules.look()
            await s.schedules.look()
            while s.plan is not None:
                await ask_many(s.world, 100)
            assert s.world.live() == 2

    run(scenario())


def test_two_servers_make_each_step_only_once(tmp_path: Path, time: Time) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s)
            async with server(tmp_path, time) as other:
                for one in (s, other):
                    await one.schedules.look()
                time.pass_by(600.0)
                await s.schedules.look()
                await other.schedules.look()  # it has not seen the other server's change yet
                await other.world.rollout.sync("m")
                assert s.plan == other.plan and s.step == 1
                assert trial(other.world).plan.weight == 0.1
                assert [action for action, *_ in await s.changes()].count("step") == 1

    run(scenario())


def test_a_step_that_cannot_be_written_is_retried(tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s)
            await s.schedules.look()
            write = s.world.store.change_trial

            def full(*_: Any, **__: Any) -> Outcome:
                raise StorageFull("the disk is full")

            monkeypatch.setattr(s.world.store, "change_trial", full)
            time.pass_by(600.0)
            await s.schedules.look()
            assert s.step == 0
            monkeypatch.setattr(s.world.store, "change_trial", write)
            await s.schedules.look()
            assert s.step == 0  # not again at once
            time.pass_by(5.0)
            await s.schedules.look()
            assert s.step == 1

    run(scenario())


def test_no_step_begins_without_both_versions(tmp_path: Path, time: Time) -> None:
    async def scenario() -> None:
        async with server(tmp_path, time) as s:
            await begin(s)
            await s.schedules.look()
            await s.world.rollout.unload("m")
            time.pass_by(600.0)
            await s.schedules.look()
            assert s.step == 0
            await s.world.rollout.load("m", {})
            await s.schedules.look()
            assert s.step == 1

    run(scenario())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"steps": (Step(0.6, 1.0),)}, r"steps\[0\].weight: expected a number from 0 to 0.5, got 0.6"),
        ({"steps": (Step(0.1, -1.0),)}, r"steps\[0\].seconds"),
        ({"steps": (Step(0.1, float("nan")),)}, r"steps\[0\].seconds"),
        ({"steps": (Step(0.2, 1.0), Step(0.1, 1.0))}, r"steps\[1\].weight: expected at least 0.2"),
        ({"steps": (Step(0.0, 1.0), Step(0.1, 1.0))}, r"steps\[0\].weight: .* without shadow"),
        ({"steps": (Step(0.1, 1.0),) * 21}, "steps: expected at most 20, got 21"),
        ({"start_at": "tomorrow"}, "start_at: expected a time with its zone .* got 'tomorrow'"),
        ({"start_at": "2026-01-31T02:00:00"}, "start_at: expected a time with its zone"),
    ],
)
def test_an_invalid_schedule_is_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        CanaryPlan(2, **plan).asked()


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_start_time_is_within_the_years_of_utc(time: str) -> None:
    with pytest.raises(ValidationError, match="start_at") as refused:
        CanaryAsked.model_validate({"version": 2, "start_at": time})
    assert "expected a time from year 1 to 9999 in UTC" in str(refused.value)


def test_a_plan_reads_as_it_was_written() -> None:
    plan = CanaryPlan(2, steps=STEPS, start_at="2026-01-31T02:00:00Z").asked()
    assert CanaryPlan.from_json(plan.to_json()) == plan
    with pytest.raises(BadRequest, match="steps: expected weight and seconds, got no 'seconds'"):
        CanaryPlan.from_json({"version": 2, "steps": [{"weight": 0.1}]})


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1])
def test_a_server_killed_between_steps_continues_after_the_restart(tmp_path: Path, step: int) -> None:
    """With the machine's own clocks, and a process that cannot write anything at its end."""
    steps = [{"weight": weight, "seconds": seconds} for weight, seconds in ((0.1, 1.5), (0.2, 1.5), (0.4, 3600.0))]
    with process(tmp_path / "repo") as first:
        first.client.upload("m", toy(1.0))
        first.client.upload("m", toy(1.0))
        first.client.start_canary("m", 2, steps=steps)
        until(lambda: first.client.canary("m").step == step)
        before = first.client.canary("m")
        first.kill()
    with process(tmp_path / "repo") as second:
        until(lambda: second.client.model("m").ready)
        after = second.client.canary("m")
        assert after.step >= step and (after.step > step or after.since == before.since)
        assert after.remaining is not None and after.remaining <= steps[after.step]["seconds"]
        until(lambda: second.client.canary("m").step == 2)
        assert second.client.canary("m").weight == 0.4
        told = [(entry.action, entry.actor) for entry in second.client.audit("m")]
        assert told[2:] == [("canary", "127.0.0.1"), ("step", "schedule"), ("step", "schedule")]
        assert second.client.model("m").answering["live"] == 1
