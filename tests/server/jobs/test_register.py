"""What survives: the database, the folders, and either without the other, at every step of every change."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.errors import NotFound, ServerError, StorageFull, Unavailable
from server.jobs.folders import DATABASE, JobFolders
from server.jobs.job import Job, JobState, from_json, to_json
from server.jobs.register import Register
from server.jobs.store import MIGRATIONS, JobStore
from server.repository.fs import Fs
from tests.server.jobs.world import order, run

ID = "0123456789abcdef0123"
JOB = Job(order(ID), queued=100.0)


class Disk(Fs):
    """A disk that fails, or a process that dies, at the n-th call that changes it."""

    def __init__(self, at: int = -1, error: BaseException | None = None) -> None:
        self.left, self.error = at, error or KeyboardInterrupt()

    def __getattribute__(self, name: str) -> Any:
        if name in {"create", "replace", "write", "sync", "rename", "mkdir", "unlink", "rmdir", "sync_dir"}:
            self.left -= 1
            if self.left == 0:
                raise self.error
        return object.__getattribute__(self, name)


async def opened(root: Path, fs: Fs | None = None, now: float = 200.0) -> Register:
    register = Register(JobFolders(root, fs))
    await register.open(now)
    return register


def states(root: Path, now: float = 200.0) -> dict[str, JobState]:
    """What a server that starts now finds."""

    async def scenario() -> dict[str, JobState]:
        register = await opened(root, now=now)
        assert register.down is None, register.down
        found = {job.id: job.state for job in register.all()}
        await register.close()
        return found

    return run(scenario())


def with_job(root: Path, job: Job = JOB) -> None:
    async def scenario() -> None:
        register = await opened(root)
        await register.add(replace(job, state=JobState.QUEUED))
        await register.change(job.id, lambda _: job)
        await register.close()

    run(scenario())


def test_a_job_reads_as_it_was_written() -> None:
    job = Job(order(key="k", recipe={"a": [1, {"b": None}]}), JobState.FAILED, error="why", metrics={"f1": 0.5})
    assert from_json(to_json(job)) == job
    for damaged in (b"", b"{}", to_json(job).replace(b'"failed"', b'"odd"')):
        with pytest.raises(ValueError):
            from_json(damaged)


@pytest.mark.parametrize(
    ("before", "found"),
    [
        (JOB, JobState.QUEUED),
        (replace(JOB, state=JobState.RUNNING), JobState.QUEUED),
        (replace(JOB, state=JobState.RUNNING, cancelling=True), JobState.CANCELLED),
        (replace(JOB, state=JobState.PUBLISHING), JobState.PUBLISHING),
        (replace(JOB, state=JobState.SUCCEEDED), JobState.SUCCEEDED),
    ],
)
def test_a_restart_finds_every_job_and_what_to_do_with_it(before: Job, found: JobState, tmp_path: Path) -> None:
    with_job(tmp_path, before)
    assert states(tmp_path) == {ID: found}


@pytest.mark.parametrize("state", JobState)
def test_without_the_database_jobs_are_listed_from_their_folders(state: JobState, tmp_path: Path) -> None:
    with_job(tmp_path, replace(JOB, state=state))
    (tmp_path / DATABASE).unlink()
    assert states(tmp_path) == {ID: state if state.is_final else JobState.QUEUED}


def test_a_damaged_database_is_told_of_and_jobs_come_back_once_it_is_moved_away(tmp_path: Path) -> None:
    with_job(tmp_path, replace(JOB, state=JobState.SUCCEEDED))
    (tmp_path / DATABASE).write_bytes(b"not a database" * 1000)

    async def scenario() -> None:
        register = await opened(tmp_path)
        with pytest.raises(Unavailable, match="database is damaged: move it away"):
            register.all()
        (tmp_path / DATABASE).rename(tmp_path / "damaged")
        await register.open(200.0)
        assert [job.state for job in register.all()] == [JobState.SUCCEEDED]
        await register.close()

    run(scenario())


def test_a_database_of_a_newer_lathe_is_left_alone(tmp_path: Path) -> None:
    with_job(tmp_path)
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
    database.close()
    before = (tmp_path / DATABASE).read_bytes()

    async def scenario() -> None:
        register = await opened(tmp_path)
        assert "a newer one wrote it" in str(register.down)
        await register.close()

    run(scenario())
    assert (tmp_path / DATABASE).read_bytes() == before


def test_the_database_is_durable_by_its_settings(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = JobStore(tmp_path / DATABASE)
        await store.open()
        assert store._engine is not None
        with store._engine.connect() as connection:
            asked = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
        assert asked == ["delete", 2]
        await store.close()
        store.shut()

    run(scenario())


def test_a_database_that_vanishes_under_a_server_closes_jobs_until_it_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        register = await opened(tmp_path)
        await register.add(JOB)
        await register.change(ID, lambda job: job.start(150.0))
        (tmp_path / DATABASE).unlink()
        with pytest.raises(Unavailable):
            await register.add(Job(order("f" * 20)))
        with pytest.raises(Unavailable, match="jobs are not available"):
            register.all()
        await register.open(200.0)
        assert {job.id: job.state for job in register.all()} == {ID: JobState.RUNNING}  # its process has not stopped
        await register.close()

    run(scenario())
    assert states(tmp_path) == {ID: JobState.QUEUED}


def test_two_servers_do_not_run_the_same_jobs_and_the_second_takes_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = await opened(tmp_path), await opened(tmp_path)
        assert first.down is None
        assert "another server runs the jobs" in str(second.down)
        await first.close()
        await second.open(200.0)
        assert second.down is None
        await second.close()

    run(scenario())


def steps(change: Any, root: Path) -> int:
    """How many calls a change makes."""
    disk = Disk()
    run(change(root, disk))
    return -disk.left - 1


@asynccontextmanager
async def failing(root: Path, disk: Disk) -> AsyncIterator[Register]:
    """A register whose folders lie on a disk that fails."""
    register = await opened(root)
    register.folders._fs = disk
    try:
        yield register
    finally:
        await register.close()


async def _submit(root: Path, disk: Disk) -> None:
    async with failing(root, disk) as register:
        await register.add(JOB)


async def _end(root: Path, disk: Disk) -> None:
    async with failing(root, disk) as register:
        await register.change(ID, lambda job: job.end(JobState.SUCCEEDED, 300.0))


async def _delete(root: Path, disk: Disk) -> None:
    async with failing(root, disk) as register:
        await register.remove(ID)


def attempts(tmp_path: Path, change: Any, before: Any = None) -> list[Path]:
    """A folder for every call at which a change may break off, and one more."""
    sample = tmp_path / "sample"
    sample.mkdir()
    if before:
        before(sample)
    count = steps(change, sample)
    assert count > 3
    roots = [tmp_path / str(number) for number in range(1, count + 1)]
    for root in roots:
        root.mkdir()
        if before:
            before(root)
    return roots


class Died(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("error", [Died(), OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")])
def test_a_submission_that_breaks_off_is_whole_or_absent(error: BaseException, tmp_path: Path) -> None:
    for number, root in enumerate(attempts(tmp_path, _submit), 1):
        with suppress(Died, ServerError):
            run(_submit(root, Disk(number, error)))
        found = states(root)
        assert found in ({}, {ID: JobState.QUEUED})
        if isinstance(error, OSError):
            assert found == {}, f"refused at step {number}, and yet it is there"
        assert os.listdir(root / ".trash") == []


def test_a_full_disk_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(StorageFull):
        run(_submit(tmp_path, Disk(2, OSError(errno.ENOSPC, "full"))))


def test_an_end_that_breaks_off_is_an_end_or_to_be_done_again(tmp_path: Path) -> None:
    running = replace(JOB, state=JobState.PUBLISHING)
    for number, root in enumerate(attempts(tmp_path, _end, lambda root: with_job(root, running)), 1):
        with suppress(Died):
            run(_end(root, Disk(number, Died())))
        assert states(root)[ID] in {JobState.PUBLISHING, JobState.SUCCEEDED}


def test_a_deletion_that_breaks_off_is_done_or_not(tmp_path: Path) -> None:
    done = replace(JOB, state=JobState.FAILED)
    for number, root in enumerate(attempts(tmp_path, _delete, lambda root: with_job(root, done)), 1):
        with suppress(Died):
            run(_delete(root, Disk(number, Died())))
        assert states(root) in ({}, {ID: JobState.FAILED})
        assert os.listdir(root / ".trash") == []


def test_an_end_in_the_folder_counts_though_the_database_does_not_know_of_it(tmp_path: Path) -> None:
    with_job(tmp_path, replace(JOB, state=JobState.PUBLISHING))
    JobFolders(tmp_path).record(replace(JOB, state=JobState.SUCCEEDED))
    assert states(tmp_path) == {ID: JobState.SUCCEEDED}


def test_a_folder_that_is_gone_takes_its_job_along(tmp_path: Path) -> None:
    with_job(tmp_path)
    JobFolders(tmp_path).remove(ID)
    assert states(tmp_path) == {}


def test_of_two_submissions_with_one_key_the_first_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        register = await opened(tmp_path)
        jobs = [Job(order(f"{n:020x}", key="same")) for n in range(5)]
        added = await asyncio.gather(*(register.add(job) for job in jobs))
        assert {job.id for job in added} == {jobs[0].id}
        assert len(register.all()) == 1
        with pytest.raises(NotFound):
            register.get("0" * 20 + "x")
        await register.close()

    run(scenario())
