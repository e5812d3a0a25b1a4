"""The order of jobs: priorities, fair shares, aging, preemption. All functions are pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe.server.jobs.dispatcher import recipe_device
from lathe.server.jobs.job import Job, JobState, PublishRequest
from lathe.server.jobs.outcome import MAX_CRASHES, AttemptFiles, after_attempt
from lathe.server.jobs.retention import expired_jobs
from lathe.server.jobs.runner import Ending, EndKind
from lathe.server.jobs.scheduler import HALF_LIFE, ActiveJob, Policy, RecentUsage, WaitingJob, plan_jobs
from tests.server.jobs.world import order

POLICY = Policy(slots=1, seconds_per_level=100.0, min_run_seconds=5.0)


def waiting(name: str, owner: str = "ann", priority: int = 0, since: float = 0.0) -> WaitingJob:
    return WaitingJob(name, owner, priority, since, since)


def active(name: str, owner: str = "ann", level: int = 0, started: float = 0.0, leaving: bool = False) -> ActiveJob:
    return ActiveJob(name, owner, level, started, leaving)


def first(*jobs: WaitingJob, now: float = 10.0, used: dict[str, float] | None = None) -> str:
    (chosen,) = plan_jobs(now, jobs, [], used or {}, POLICY).start
    return chosen


def test_jobs_run_in_order_of_submission() -> None:
    assert first(waiting("b", since=2), waiting("a", since=1)) == "a"


def test_priority_goes_first_and_waiting_raises_it() -> None:
    assert first(waiting("low"), waiting("high", priority=1, since=9)) == "high"
    assert first(waiting("low"), waiting("high", priority=1, since=199), now=200.0) == "low"


def test_the_owner_with_less_use_goes_first() -> None:
    assert first(waiting("a", "ann"), waiting("b", "bob", since=5), used={"ann": 60.0}) == "b"


def test_free_slots_are_divided_between_owners() -> None:
    jobs = [waiting(f"a{n}", since=n) for n in range(5)] + [waiting(f"b{n}", "bob", since=9 + n) for n in range(5)]
    assert plan_jobs(20.0, jobs, [], {}, Policy(slots=4)).start == ("a0", "b0", "a1", "b1")
    assert plan_jobs(20.0, jobs, [active("x", "ann")], {}, Policy(slots=2)).start == ("b0",)


@pytest.mark.parametrize(
    ("runs", "stops"),
    [
        (active("r", level=0), ("r",)),
        (active("r", level=1), ()),  # of the same priority
        (active("r", level=0, started=8.0), ()),  # has just begun
        (active("r", level=0, leaving=True), ()),  # the slot is about to be free
    ],
)
def test_a_job_is_preempted_for_a_higher_priority(runs: ActiveJob, stops: tuple[str, ...]) -> None:
    assert plan_jobs(10.0, [waiting("w", priority=1, since=9.0)], [runs], {}, POLICY).stop == stops


def on(device: str, job: WaitingJob) -> WaitingJob:
    return replace(job, device=device)


def test_a_gpu_runs_one_job_at_a_time_and_other_jobs_run_elsewhere() -> None:
    policy = Policy(slots=4)
    jobs = [on("cuda:0", waiting(name, since=at)) for at, name in enumerate("abc")]
    others = [on("cuda:1", waiting("d", since=9)), waiting("e", since=10)]
    assert plan_jobs(20.0, [*jobs, *others], [], {}, policy).start == ("a", "d", "e")
    busy = [replace(active("x"), device="cuda:0")]
    assert plan_jobs(20.0, [*jobs, *others], busy, {}, policy).start == ("d", "e")
    assert plan_jobs(20.0, jobs, [], {}, replace(policy, device_slots=2)).start == ("a", "b")


def test_a_job_for_a_gpu_preempts_only_a_job_on_that_gpu() -> None:
    policy = Policy(slots=4)
    runs = [replace(active("gpu"), device="cuda:0"), active("cpu")]
    high = on("cuda:0", waiting("high", priority=1))
    assert plan_jobs(20.0, [high], runs, {}, policy).stop == ("gpu",)
    leaves = [replace(runs[0], leaving=True), runs[1]]
    assert plan_jobs(20.0, [high], leaves, {}, policy).stop == ()
    assert plan_jobs(20.0, [on("cuda:0", waiting("equal"))], runs, {}, policy).stop == ()


@pytest.mark.parametrize(
    ("recipe", "device"),
    [({}, ""), ({"device": "cpu"}, ""), ({"device": "cuda"}, "cuda:0"), ({"recipe": {"device": "cuda:1"}}, "cuda:1")],
)
def test_recipes_and_sweeps_name_devices(recipe: dict[str, object], device: str) -> None:
    assert recipe_device(recipe) == device


def test_a_job_is_not_preempted_for_long_waiting() -> None:
    assert plan_jobs(1e6, [waiting("w")], [active("r", started=1e5)], {}, POLICY).stop == ()


def test_the_lowest_priority_is_preempted_and_among_equals_the_newest() -> None:
    running = [active("old"), active("young", started=3.0), active("high", level=4)]
    policy = Policy(slots=3)
    assert plan_jobs(20.0, [waiting("w", priority=2)], running, {}, policy).stop == ("young",)
    assert plan_jobs(20.0, [waiting(f"w{n}", priority=5) for n in range(9)], running, {}, policy).stop == (
        "young",
        "old",
        "high",
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[WaitingJob], list[ActiveJob], Policy]:
    owners, times = st.sampled_from("abc"), st.floats(0, 1000)
    policy = Policy(
        draw(st.integers(1, 4)), seconds_per_level=draw(st.sampled_from([10.0, 100.0])), min_run_seconds=5.0
    )
    queued = [
        WaitingJob(f"w{n}", draw(owners), draw(st.integers(-3, 3)), draw(times), draw(times))
        for n in range(draw(st.integers(0, 8)))
    ]
    running = [
        ActiveJob(f"r{n}", draw(owners), draw(st.integers(-3, 9)), draw(times), draw(st.booleans()))
        for n in range(draw(st.integers(0, policy.slots)))
    ]
    return queued, running, policy


@given(situations())
def test_slots_are_filled_once_and_jobs_are_preempted_only_for_others(
    situation: tuple[list[WaitingJob], list[ActiveJob], Policy],
) -> None:
    queued, running, policy = situation
    decided = plan_jobs(1000.0, queued, running, {}, policy)
    assert len(decided.start) == min(len(queued), policy.slots - len(running))
    assert len(set(decided.start)) == len(decided.start)
    levels = {job.id: job.level for job in running}
    left = sorted((job.priority for job in queued if job.id not in decided.start), reverse=True)
    assert len(decided.stop) <= len(left)
    for stopped, priority in zip(decided.stop, left, strict=False):
        assert levels[stopped] < priority
    assert not set(decided.stop) & {job.id for job in running if job.leaving}


def test_ten_jobs_at_once_end_in_fair_order_and_none_starves() -> None:
    """Ann submits ten, Bob and Eve one each a little later; each job takes ten seconds."""
    queue = [waiting(f"a{n}", since=float(n) / 100) for n in range(10)]
    queue += [waiting("b", "bob", since=1.0), waiting("e", "eve", since=2.0)]
    shares, ended, now = RecentUsage(), [], 3.0
    while queue:
        used = {owner: shares.used(owner, now) for owner in ("ann", "bob", "eve")}
        (chosen,) = plan_jobs(now, queue, [], used, POLICY).start
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
        (chosen,) = plan_jobs(now, [low, waiting(f"h{number}", "eve", 3, now - 1)], [], {"ann": 1e3}, POLICY).start
        if chosen == "low":
            break
    assert chosen == "low"
    assert now < 5 * POLICY.seconds_per_level


def test_past_use_decays_exponentially() -> None:
    shares = RecentUsage()
    shares.charge("ann", 100.0, 0.0)
    assert shares.used("ann", HALF_LIFE) == pytest.approx(50.0)
    shares.charge("ann", 10.0, HALF_LIFE)
    assert shares.used("ann", HALF_LIFE) == pytest.approx(60.0)
    assert shares.used("bob", 5.0) == 0.0


# the consequences of how an attempt ended

RUNNING = Job(order(), JobState.RUNNING, started=100.0, attempts=1)
RESULT = AttemptFiles(result=True, metrics={"metrics": {}})


@pytest.mark.parametrize(
    ("ending", "found", "state"),
    [
        (Ending(EndKind.DONE), RESULT, JobState.SUCCEEDED),
        (Ending(EndKind.DONE), AttemptFiles(), JobState.QUEUED),  # without a result: a crash
        (Ending(EndKind.STOPPED), AttemptFiles(), JobState.QUEUED),
        (Ending(EndKind.REFUSED, "row 3"), AttemptFiles(), JobState.FAILED),
        (Ending(EndKind.CRASHED, "SIGSEGV"), AttemptFiles(), JobState.QUEUED),
    ],
)
def test_the_next_state_after_an_ending(ending: Ending, found: AttemptFiles, state: JobState) -> None:
    assert after_attempt(RUNNING, ending, found, 200.0).state is state


@pytest.mark.parametrize("end", EndKind)
def test_a_job_being_cancelled_is_cancelled_however_it_ends(end: EndKind) -> None:
    ended = after_attempt(Job(order(), JobState.RUNNING, cancelling=True), Ending(end, seconds=2.0), RESULT, 200.0)
    assert (ended.state, ended.cancelling, ended.finished, ended.ran) == (JobState.CANCELLED, False, 200.0, 2.0)


def test_a_result_to_publish_is_published() -> None:
    job = Job(order(publish=PublishRequest("m")), JobState.RUNNING)
    assert after_attempt(job, Ending(EndKind.DONE), RESULT, 200.0).state is JobState.PUBLISHING


def test_crashes_without_progress_end_a_job_and_progress_resets_their_count() -> None:
    job = RUNNING
    for _ in range(MAX_CRASHES - 1):
        job = after_attempt(job, Ending(EndKind.CRASHED, "SIGKILL"), AttemptFiles(checkpoint=5), 200.0).start(201.0)
    job = after_attempt(job, Ending(EndKind.CRASHED, "SIGKILL"), AttemptFiles(checkpoint=9), 200.0)
    assert (job.state, job.crashes) == (JobState.QUEUED, 1)
    for _ in range(MAX_CRASHES - 1):
        job = after_attempt(job.start(201.0), Ending(EndKind.CRASHED, "SIGKILL"), AttemptFiles(checkpoint=9), 200.0)
    assert (job.state, job.error) == (
        JobState.FAILED,
        "SIGKILL (3 times in a row, without progress in between)",
    )


def test_the_jobs_that_ended_last_are_retained() -> None:
    states = [JobState.SUCCEEDED, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED, JobState.RUNNING]
    jobs = [Job(order(f"{n:020x}"), state, finished=10.0 - n) for n, state in enumerate(states)]
    assert [job.id[-1] for job in expired_jobs(jobs, 1)] == ["3", "2"]
    assert expired_jobs(jobs, 3) == []
    assert Counter(job.state.is_final for job in expired_jobs(jobs, 0)) == {True: 3}


def test_jobs_delayed_by_their_device_do_not_count_against_their_owner() -> None:
    held_up = [replace(waiting(f"g{n}", since=n), device="cuda:0") for n in range(300)]
    jobs = [*held_up, waiting("a", since=400), waiting("b", "bob", since=500), waiting("c", "bob", since=600)]
    there = [replace(active("x", "eve"), device="cuda:0")]
    assert plan_jobs(1000.0, jobs, there, {}, Policy(slots=2, seconds_per_level=1e9)).start == ("a",)
