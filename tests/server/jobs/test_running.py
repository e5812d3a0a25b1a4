"""Jobs from submission to their end, with real processes."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lathe.server.access.authority import Caller, Mode
from lathe.server.access.keys import Key
from lathe.server.access.scopes import Scope
from lathe.server.errors import Conflict, Internal, NotFound, StorageFull, Unprocessable
from lathe.server.jobs.job import Job, JobState, PublishRequest
from lathe.server.repository import disk_space
from lathe.server.repository.disk_space import DiskSpace
from tests.server.jobs.world import ANYBODY, FakePublisher, World, run, until, world
from tests.server.repository.test_children import children_of, environment_of

PUBLISH = PublishRequest("m", "live")


def test_a_job_runs_and_stores_its_result(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await w.reach(await w.submit(steps=4))
            assert job.state is JobState.SUCCEEDED
            assert (job.metrics["metrics"], job.metrics["steps"]) == ({"accuracy": 0.9}, 4)
            assert (w.folder(job) / "result" / "model.onnx").exists()
            assert job.attempts == 1
            assert job.started is not None and job.finished is not None
            assert 0 < job.ran <= job.finished - job.started + 0.1

    run(scenario())


def test_a_result_is_published(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await w.reach(await w.submit(publish=PUBLISH))
            assert job.state is JobState.SUCCEEDED
            assert job.result is not None
            assert (job.result.version, job.result.moved_alias) == (1, True)

    run(scenario())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("refuse", r"row 3, column 'x': expected a number, got 'a'"),
        ("crash", r"SIGSEGV \(3 times in a row"),
        ("exit", r"exit code 9; see the job's log"),
        ("no result", r"ended without a result"),
    ],
)
def test_failures_are_reported(do: str, reason: str, tmp_path: Path) -> None:
    async def scenario() -> Job:
        async with world(tmp_path) as w:
            return await w.reach(await w.submit(do=do))

    job = run(scenario())
    assert job.state is JobState.FAILED
    assert re.search(reason, job.error), job.error
    assert str(tmp_path) not in job.error


def test_a_crashed_job_continues_at_its_last_checkpoint(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await w.reach(await w.submit(steps=12, do="crash once", every=1))
            assert (job.state, job.attempts) == (JobState.SUCCEEDED, 2)

    run(scenario())


@pytest.mark.parametrize(
    ("limit", "do", "reason"),
    [
        ({"seconds_limit": 0.5}, {"seconds": 60}, "longer than its limit of seconds"),
        ({"memory": 200 << 20}, {"do": "eat memory"}, "more than 200 MiB of memory"),
    ],
)
def test_a_job_beyond_its_limits_is_ended(limit: dict, do: dict, reason: str, tmp_path: Path) -> None:
    async def scenario() -> Job:
        async with world(tmp_path) as w:
            return await w.reach(await w.submit(**limit, **do))

    job = run(scenario())
    assert job.state is JobState.FAILED
    assert reason in job.error
    assert children_of(tmp_path) == []


def test_a_job_beyond_its_share_of_the_disk_is_ended(tmp_path: Path) -> None:
    async def scenario() -> Job:
        async with world(tmp_path, max_job_files=4 << 20) as w:
            return await w.reach(await w.submit(do="fill the disk"))

    assert "more than 4 MiB of disk" in run(scenario()).error


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the number of free bytes that the server sees."""
    left = [1 << 40]
    monkeypatch.setattr(disk_space.os, "statvfs", lambda _: SimpleNamespace(f_bavail=left[0], f_frsize=1))
    return lambda size: left.__setitem__(0, size)


def test_a_job_that_writes_to_a_full_disk_ends_and_keeps_its_checkpoint(
    tmp_path: Path, free: Callable[[int], None]
) -> None:
    async def scenario() -> None:
        async with world(tmp_path, min_free_disk=1000) as w:
            job = await w.submit(steps=100, do="write large checkpoints", seconds=0.5)
            await until(lambda: (w.folder(job) / "checkpoints" / "1").exists())
            free(999)
            ended = await w.reach(job)
            assert ended.state is JobState.FAILED
            assert "a disk with 999 bytes free, expected at least 1000" in ended.error
            assert [path.name for path in (w.folder(job) / "checkpoints").iterdir()] == ["1"]
            assert children_of(tmp_path) == []

    run(scenario())


def test_a_job_that_only_computes_continues_while_the_disk_is_full(tmp_path: Path, free: Callable[[int], None]) -> None:
    async def scenario() -> None:
        async with world(tmp_path, min_free_disk=1000) as w:
            job = await w.submit(steps=20, seconds=0.05)
            await w.reach(job, JobState.RUNNING)
            free(999)
            assert (await w.reach(job)).state is JobState.SUCCEEDED

    run(scenario())


@pytest.mark.slow
def test_no_job_begins_while_the_disk_is_full(tmp_path: Path, free: Callable[[int], None]) -> None:
    async def scenario() -> None:
        async with world(tmp_path, min_free_disk=1000) as w:
            first, second = [await w.submit(steps=20, seconds=0.05) for _ in range(2)]
            await w.reach(first, JobState.RUNNING)
            free(999)
            with pytest.raises(StorageFull, match="999 bytes are free"):
                await w.submit()
            await w.reach(first)
            await asyncio.sleep(1)
            assert w.job(second).state is JobState.QUEUED
            free(1000)
            assert (await w.reach(second)).state is JobState.SUCCEEDED

    run(scenario())


def test_jobs_can_be_cancelled_in_every_state(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            running, waiting = [await w.submit(steps=1000, seconds=0.02) for _ in range(2)]
            await w.reach(running, JobState.RUNNING)
            service = w.jobs.service
            assert (await service.cancel(ANYBODY, waiting.id)).state is JobState.CANCELLED
            told = await service.cancel(ANYBODY, running.id)
            assert (told.state, told.cancelling) == (JobState.RUNNING, True)
            ended = await w.reach(running)
            assert (ended.state, ended.cancelling) == (JobState.CANCELLED, False)
            # a second cancel is harmless
            assert (await service.cancel(ANYBODY, running.id)).state is JobState.CANCELLED
            done = await w.reach(await w.submit())
            with pytest.raises(Conflict, match="succeeded"):
                await service.cancel(ANYBODY, done.id)
        assert children_of(tmp_path) == []

    run(scenario())


def test_a_process_that_does_not_stop_is_killed_with_its_children(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, drain_timeout=0.3) as w:
            deaf = await w.submit(steps=10_000, seconds=0.01, do="ignore SIGTERM")
            await until(lambda: (w.folder(deaf) / "events.jsonl").exists())
            await w.jobs.service.cancel(ANYBODY, deaf.id)
            assert (await w.reach(deaf)).state is JobState.CANCELLED
            parent = await w.submit(steps=10_000, seconds=0.01, do="start a child")
            await until(lambda: len(children_of(tmp_path)) == 2)
            await w.jobs.service.cancel(ANYBODY, parent.id)
            await w.reach(parent)
            assert children_of(tmp_path) == []

    run(scenario())


def test_a_process_has_idle_priority_and_no_secrets_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATHE_SECRET", "hidden")
    monkeypatch.setattr("tests.server.jobs.world.replace", lambda allowance, **_: allowance)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await w.submit(steps=10_000, seconds=0.01)
            await until(lambda: [os.sched_getscheduler(pid) for pid in children_of(tmp_path)] == [os.SCHED_IDLE])
            (pid,) = children_of(tmp_path)
            assert b"hidden" not in environment_of(pid)
            await w.jobs.service.cancel(ANYBODY, job.id)

    run(scenario())


@pytest.mark.slow
def test_a_job_of_higher_priority_preempts_one_that_continues_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, least_run=0.1) as w:
            low = await w.submit(steps=60, seconds=0.02)
            events_of_low = w.folder(low) / "events.jsonl"
            await until(lambda: events_of_low.exists() and '"kind": "step"' in events_of_low.read_text())
            high = await w.submit(priority=5)
            ended = await w.reach(high)
            assert w.job(low).state in {JobState.QUEUED, JobState.RUNNING}
            low = await w.reach(low)
            assert low.attempts == 2
            assert ended.finished is not None and low.finished is not None
            assert ended.finished < low.finished
            events = events_of_low.read_text()
            assert '"resumed"' in events and '"resumed", "step": 0' not in events

    run(scenario())


@pytest.mark.slow
def test_ten_jobs_at_once_end_in_fair_order(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        async with world(tmp_path) as w:
            jobs = [await w.submit(owner("ann"), steps=2, seconds=1.0)]  # until all other jobs have arrived
            jobs += [await w.submit(owner("ann"), steps=2, seconds=0.05) for _ in range(7)]
            jobs += [await w.submit(owner("bob"), steps=2, seconds=0.05) for _ in range(2)]
            ended = [await w.reach(job) for job in jobs]
            assert {job.state for job in ended} == {JobState.SUCCEEDED}
            return [job.order.owner for job in sorted(ended, key=lambda job: job.finished or 0)]

    order = run(scenario())
    assert order[:2] == ["ann", "bob"]
    assert order.index("bob", 2) <= 4, order
    assert children_of(tmp_path) == []


def test_a_stopped_server_checkpoints_its_jobs_and_a_restart_continues_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await w.submit(steps=50, seconds=0.02, every=1000)
            await until(lambda: '"step"' in _events(w, job))
        assert children_of(tmp_path) == []
        async with world(tmp_path) as w:
            assert w.job(job).state in {JobState.QUEUED, JobState.RUNNING}
            ended = await w.reach(job)
            assert (ended.state, ended.attempts) == (JobState.SUCCEEDED, 2)
            assert _events(w, job).count('"kind": "step"') == 50  # no step ran twice

    run(scenario())


def test_no_job_begins_once_the_server_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher looks at the disk, on another thread, before it starts a job; the stop comes meanwhile."""
    is_looking, is_stopping, looks = threading.Event(), threading.Event(), DiskSpace.look

    def slow_look(space: DiskSpace) -> None:
        if has_job:
            is_looking.set()
            is_stopping.wait(10)
        looks(space)

    has_job: list[bool] = []
    monkeypatch.setattr(DiskSpace, "look", slow_look)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await w.submit(steps=1000, seconds=0.02)
            has_job.append(True)
            await until(is_looking.is_set)
            asyncio.get_running_loop().call_later(0.1, is_stopping.set)
        assert children_of(tmp_path) == []  # the world also checks that no dataset is held
        async with world(tmp_path) as w:
            assert w.job(job).attempts == 0

    run(scenario())


def test_a_temporary_failure_of_publishing_is_retried(tmp_path: Path) -> None:
    async def scenario() -> None:
        publisher = FakePublisher(errors=[StorageFull("full"), Internal("odd")])
        publisher.gate.set()
        async with world(tmp_path, publisher) as w:
            assert (await w.reach(await w.submit(publish=PUBLISH))).state is JobState.SUCCEEDED
            publisher.errors = [StorageFull("full")] * 1000
            full = await w.reach(await w.submit(publish=PUBLISH), JobState.PUBLISHING)
            assert (await w.reach(await w.submit())).state is JobState.SUCCEEDED  # other jobs do not wait for it
            assert (await w.jobs.service.cancel(ANYBODY, full.id)).cancelling
            assert (await w.reach(full)).state is JobState.CANCELLED
            publisher.errors = [Unprocessable("signature differs")]
            assert (await w.reach(await w.submit(publish=PUBLISH))).error == "publishing: signature differs"
            publisher.errors = [ZeroDivisionError()]
            assert "server's log" in (await w.reach(await w.submit(publish=PUBLISH))).error

    run(scenario())


def test_publishing_interrupted_by_a_stop_finishes_after_the_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        slow = FakePublisher()
        async with world(tmp_path, slow, drain_timeout=0.2) as w:
            job = await w.reach(await w.submit(publish=PUBLISH), JobState.PUBLISHING)
        async with world(tmp_path) as w:
            ended = await w.reach(job)
            assert (ended.state, ended.attempts) == (JobState.SUCCEEDED, 1)
            assert w.publisher.calls == 1

    run(scenario())


def test_a_fine_tuning_job_has_the_files_of_its_parent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await w.reach(await w.submit(kind="finetune", parent="m"))
            assert (w.folder(job) / "parent" / "model.onnx").read_text() == "parent"
            assert job.order.model is not None and job.order.model.version == 3

    run(scenario())


def test_the_log_of_a_job_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.server.jobs.runner._LOG_BYTES", 5000)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await w.reach(await w.submit(steps=60, seconds=0.01, do="talk"))
            assert 0 < (w.folder(job) / "log.txt").stat().st_size < 20_000

    run(scenario())


def test_deleting_a_job_deletes_its_files(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await w.submit(steps=1000, seconds=0.02)
            with pytest.raises(Conflict, match="cancel it first"):
                await w.jobs.service.delete(ANYBODY, job.id)
            await w.jobs.service.cancel(ANYBODY, job.id)
            await w.reach(job)
            await w.jobs.service.delete(ANYBODY, job.id)
            assert not w.folder(job).exists()
            with pytest.raises(NotFound):
                w.job(job)
        async with world(tmp_path) as w:
            assert w.jobs.register.all() == []

    run(scenario())


def owner(name: str) -> Caller:
    """A caller with a key."""
    return Caller(Key(name.encode().hex(), name, "", frozenset({Scope.TRAIN})), Mode.KEYED)


def _events(w: World, job: Job) -> str:
    file = w.folder(job) / "events.jsonl"
    return file.read_text() if file.exists() else ""
