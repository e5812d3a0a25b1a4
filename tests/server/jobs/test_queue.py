"""The order of jobs: priorities, fair shares, aging, making room. All of it pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.jobs.dispatch import device_of
from server.jobs.endings import CRASHES, Found, after
from server.jobs.job import Job, JobState, Publish
from server.jobs.queue import HALF_LIFE, Active, Policy, Shares, Waiting, plan
from server.jobs.retention import surplus
from server.jobs.runner import End, Ending
from tests.server.jobs.world import order

POLICY = Policy(slots=1, aging=100.0, least_run=5.0)


def waiting(name: str, owner: str = "ann", priority: int = 0, since: float = 0.0) -> Waiting:
    return Waiting(name, owner, priority, since, since)


def active(name: str, owner: str = "ann", level: int = 0, started: float = 0.0, leaving: bool = False) -> Active:
    return Active(name, owner, level, started, leaving)


def first(*jobs: Waiting, now: float = 10.0, used: dict[str, float] | None = None) -> str:
    (chosen,) = plan(now, jobs, [], used or {}, POLICY).start
    return chosen


def test_who_came_first_runs_first() -> None:
    assert first(waiting("b", since=2), waiting("a", since=1)) == "a"


def test_priority_goes_before_time_and_waiting_long_makes_up_for_it() -> None:
    assert first(waiting("low"), waiting("high", priority=1, since=9)) == "high"
    assert first(waiting("low"), waiting("high", priority=1, since=199), now=200.0) == "low"


def test_who_has_used_less_goes_first() -> None:
    assert first(waiting("a", "ann"), waiting("b", "bob", since=5), used={"ann": 60.0}) == "b"


def test_free_slots_are_dealt_out_between_owners() -> None:
    jobs = [waiting(f"a{n}", since=n) for n in range(5)] + [waiting(f"b{n}", "bob", since=9 + n) for n in range(5)]
    assert plan(20.0, jobs, [], {}, Policy(slots=4)).start == ("a0", "b0", "a1", "b1")
    assert plan(20.0, jobs, [active("x", "ann")], {}, Policy(slots=2)).start == ("b0",)


@pytest.mark.parametrize(
    ("runs", "stops"),
    [
        (active("r", level=0), ("r",)),
        (active("r", level=1), ()),  # as high
        (active("r", level=0, started=8.0), ()),  # has hardly begun
        (active("r", level=0, leaving=True), ()),  # the slot is about to be free
    ],
)
def test_a_job_makes_room_for_a_higher_priority(runs: Active, stops: tuple[str, ...]) -> None:
    assert plan(10.0, [waiting("w", priority=1, since=9.0)], [runs], {}, POLICY).stop == stops


def on(device: str, job: Waiting) -> Waiting:
    return replace(job, device=device)


def test_a_gpu_takes_one_job_at_a_time_and_those_behind_it_go_elsewhere() -> None:
    policy = Policy(slots=4)
    jobs = [on("cuda:0", waiting(name, since=at)) for at, name in enumerate("abc")]
    others = [on("cuda:1", waiting("d", since=9)), waiting("e", since=10)]
    assert plan(20.0, [*jobs, *others], [], {}, policy).start == ("a", "d", "e")
    busy = [replace(active("x"), device="cuda:0")]
    assert plan(20.0, [*jobs, *others], busy, {}, policy).start == ("d", "e")
    assert plan(20.0, jobs, [], {}, replace(policy, device_slots=2)).start == ("a", "b")


def test_a_job_on_a_gpu_makes_room_there_for_a_higher_priority_and_no_other_does() -> None:
    policy = Policy(slots=4)
    runs = [replace(active("gpu"), device="cuda:0"), active("cpu")]
    high = on("cuda:0", waiting("high", priority=1))
    assert plan(20.0, [high], runs, {}, policy).stop == ("gpu",)
    leaves = [replace(runs[0], leaving=True), runs[1]]
    assert plan(20.0, [high], leaves, {}, policy).stop == ()
    assert plan(20.0, [on("cuda:0", waiting("equal"))], runs, {}, policy).stop == ()


@pytest.mark.parametrize(
    ("recipe", "device"),
    [({}, ""), ({"device": "cpu"}, ""), ({"device": "cuda"}, "cuda:0"), ({"recipe": {"device": "cuda:1"}}, "cuda:1")],
)
def test_recipes_and_sweeps_name_devices(recipe: dict[str, object], device: str) -> None:
    assert device_of(recipe) == device


def test_waiting_alone_interrupts_nobody() -> None:
    assert plan(1e6, [waiting("w")], [active("r", started=1e5)], {}, POLICY).stop == ()


def test_the_lowest_makes_room_and_of_equals_the_one_that_has_run_least() -> None:
    running = [active("old"), active("young", started=3.0), active("high", level=4)]
    policy = Policy(slots=3)
    assert plan(20.0, [waiting("w", priority=2)], running, {}, policy).stop == ("young",)
    assert plan(20.0, [waiting(f"w{n}", priority=5) for n in range(9)], running, {}, policy).stop == (
        "young",
        "old",
        "high",
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Waiting], list[Active], Policy]:
    owners, times = st.sampled_from("abc"), st.floats(0, 1000)
    policy = Policy(draw(st.integers(1, 4)), aging=draw(st.sampled_from([10.0, 100.0])), least_run=5.0)
    queued = [
        Waiting(f"w{n}", draw(owners), draw(st.integers(-3, 3)), draw(times), draw(times))
        for n in range(draw(st.integers(0, 8)))
    ]
    running = [
        Active(f"r{n}", draw(owners), draw(st.integers(-3, 9)), draw(times), draw(st.booleans()))
        for n in range(draw(st.integers(0, policy.slots)))
    ]
    return queued, running, policy


@given(situations())
def test_no_slot_is_left_empty_or_given_twice_and_room_is_made_only_for_somebody(
    situation: tuple[list[Waiting], list[Active], Policy],
) -> None:
    queued, running, policy = situation
    decided = plan(1000.0, queued, running, {}, policy)
    assert len(decided.start) == min(len(queued), policy.slots - len(running))
    assert len(set(decided.start)) == len(decided.start)
    levels = {job.id: job.level for job in running}
    left = sorted((job.priority for job in queued if job.id not in decided.start), reverse=True)
    assert len(decided.stop) <= len(left)
    for stopped, priority in zip(decided.stop, left, strict=False):
        assert levels[stopped] < priority
    assert not set(decided.stop) & {job.id for job in running if job.leaving}


def test_ten_jobs_at_once_end_in_fair_order_and_nobody_starves() -> None:
    """Ann submits ten, Bob and Eve one each a little later; each job takes ten seconds."""
    queue = [waiting(f"a{n}", since=float(n) / 100) for n in range(10)]
    queue += [waiting("b", "bob", since=1.0), waiting("e", "eve", since=2.0)]
    shares, ended, now = Shares(), [], 3.0
    while queue:
        used = {owner: shares.used(owner, now) for owner in ("ann", "bob", "eve")}
        (chosen,) = plan(now, queue, [], used, POLICY).start
        job = next(job for job in queue if job.id == chosen)
        queue.remove(job)
        now += 10.0
        shares.charge(job.owner, 10.0, now)
        ended.append(chosen)
    assert ended[:3] == ["a0", "b", "e"]
    assert ended[3:] == [f"a{n}" for n in range(1, 10)]


def test_a_stream_of_high_priorities_does_not_starve_a_low_one() -> None:
    low, now = waiting("low", since=0.0), 0.0
    for number in range(100):
        now += 30.0
        (chosen,) = plan(now, [low, waiting(f"h{number}", "eve", 3, now - 1)], [], {"ann": 1e3}, POLICY).start
        if chosen == "low":
            break
    assert chosen == "low"
    assert now < 5 * POLICY.aging


def test_use_is_forgotten_by_halves() -> None:
    shares = Shares()
    shares.charge("ann", 100.0, 0.0)
    assert shares.used("ann", HALF_LIFE) == pytest.approx(50.0)
    shares.charge("ann", 10.0, HALF_LIFE)
    assert shares.used("ann", HALF_LIFE) == pytest.approx(60.0)
    assert shares.used("bob", 5.0) == 0.0


# what follows from how an attempt ended

RUNNING = Job(order(), JobState.RUNNING, started=100.0, attempts=1)
RESULT = Found(result=True, metrics={"metrics": {}})


@pytest.mark.parametrize(
    ("ending", "found", "state"),
    [
        (Ending(End.DONE), RESULT, JobState.SUCCEEDED),
        (Ending(End.DONE), Found(), JobState.QUEUED),  # without a result: a crash
        (Ending(End.STOPPED), Found(), JobState.QUEUED),
        (Ending(End.REFUSED, "row 3"), Found(), JobState.FAILED),
        (Ending(End.CRASHED, "SIGSEGV"), Found(), JobState.QUEUED),
    ],
)
def test_what_follows_from_an_ending(ending: Ending, found: Found, state: JobState) -> None:
    assert after(RUNNING, ending, found, 200.0).state is state


@pytest.mark.parametrize("end", End)
def test_a_job_that_is_being_cancelled_is_cancelled_however_it_ends(end: End) -> None:
    ended = after(Job(order(), JobState.RUNNING, cancelling=True), Ending(end, seconds=2.0), RESULT, 200.0)
    assert (ended.state, ended.cancelling, ended.finished, ended.ran) == (JobState.CANCELLED, False, 200.0, 2.0)


def test_a_result_to_publish_is_published() -> None:
    job = Job(order(publish=Publish("m")), JobState.RUNNING)
    assert after(job, Ending(End.DONE), RESULT, 200.0).state is JobState.PUBLISHING


def test_crashes_without_progress_end_a_job_and_progress_forgives_them() -> None:
    job = RUNNING
    for _ in range(CRASHES - 1):
        job = after(job, Ending(End.CRASHED, "SIGKILL"), Found(checkpoint=5), 200.0).start(201.0)
    job = after(job, Ending(End.CRASHED, "SIGKILL"), Found(checkpoint=9), 200.0)
    assert (job.state, job.crashes) == (JobState.QUEUED, 1)
    for _ in range(CRASHES - 1):
        job = after(job.start(201.0), Ending(End.CRASHED, "SIGKILL"), Found(checkpoint=9), 200.0)
    assert (job.state, job.error) == (
        JobState.FAILED,
        "SIGKILL (3 times in a row, without a checkpoint in between)",
    )


def test_what_is_kept_is_what_ended_last() -> None:
    states = [JobState.SUCCEEDED, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED, JobState.RUNNING]
    jobs = [Job(order(f"{n:020x}"), state, finished=10.0 - n) for n, state in enumerate(states)]
    assert [job.id[-1] for job in surplus(jobs, 1)] == ["3", "2"]
    assert surplus(jobs, 3) == []
    assert Counter(job.state.is_final for job in surplus(jobs, 0)) == {True: 3}


def test_jobs_that_their_device_holds_up_do_not_count_against_their_owner() -> None:
    held_up = [replace(waiting(f"g{n}", since=n), device="cuda:0") for n in range(300)]
    jobs = [*held_up, waiting("a", since=400), waiting("b", "bob", since=500), waiting("c", "bob", since=600)]
    there = [replace(active("x", "eve"), device="cuda:0")]
    assert plan(1000.0, jobs, there, {}, Policy(slots=2, aging=1e9)).start == ("a",)
