"""Durability of jobs: the database and the folders, each without the other, at every step of every change."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lathe.core.train.run import checkpoint
from lathe.core.train.run.checkpoint import Checkpoint
from lathe.core.train.run.trials import State, TrialRecord
from lathe.server.errors import NotFound, ServerError, StorageFull, Unavailable
from lathe.server.jobs.database import MIGRATIONS, JobStore
from lathe.server.jobs.folders import DATABASE, JobFolders
from lathe.server.jobs.job import Job, JobState, from_json, to_json
from lathe.server.jobs.register import Register
from lathe.server.repository.fs import Fs
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


async def open_register(root: Path, fs: Fs | None = None, now: float = 200.0) -> Register:
    register = Register(JobFolders(root, fs))
    await register.open(now)
    return register


def states_after_start(root: Path, now: float = 200.0) -> dict[str, JobState]:
    """The jobs that a server finds when it starts now."""

    async def scenario() -> dict[str, JobState]:
        register = await open_register(root, now=now)
        assert register.down_reason is None, register.down_reason
        found = {job.id: job.state for job in register.all()}
        await register.close()
        return found

    return run(scenario())


def with_job(root: Path, job: Job = JOB) -> None:
    async def scenario() -> None:
        register = await open_register(root)
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
    assert states_after_start(tmp_path) == {ID: found}


@pytest.mark.parametrize("state", JobState)
def test_without_the_database_jobs_are_listed_from_their_folders(state: JobState, tmp_path: Path) -> None:
    with_job(tmp_path, replace(JOB, state=state))
    (tmp_path / DATABASE).unlink()
    assert states_after_start(tmp_path) == {ID: state if state.is_final else JobState.QUEUED}


def test_a_damaged_database_is_reported_and_jobs_return_once_it_is_moved(tmp_path: Path) -> None:
    with_job(tmp_path, replace(JOB, state=JobState.SUCCEEDED))
    (tmp_path / DATABASE).write_bytes(b"not a database" * 1000)

    async def scenario() -> None:
        register = await open_register(tmp_path)
        with pytest.raises(Unavailable, match="database is damaged: move it away"):
            register.all()
        (tmp_path / DATABASE).rename(tmp_path / "damaged")
        await register.open(200.0)
        assert [job.state for job in register.all()] == [JobState.SUCCEEDED]
        await register.close()

    run(scenario())


def test_a_database_of_a_newer_release_is_not_changed(tmp_path: Path) -> None:
    with_job(tmp_path)
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
    database.close()
    before = (tmp_path / DATABASE).read_bytes()

    async def scenario() -> None:
        register = await open_register(tmp_path)
        assert "a newer one wrote it" in str(register.down_reason)
        await register.close()

    run(scenario())
    assert (tmp_path / DATABASE).read_bytes() == before


def test_the_settings_of_the_database_make_it_durable(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = JobStore(tmp_path / DATABASE)
        await store.open()
        assert store._engine is not None
        with store._engine.connect() as connection:
            asked = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
        assert asked == ["delete", 2]
        await store.close()
        store.stop_thread()

    run(scenario())


def test_a_database_that_vanishes_closes_jobs_until_it_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        register = await open_register(tmp_path)
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
    assert states_after_start(tmp_path) == {ID: JobState.QUEUED}


def test_two_servers_never_run_the_same_jobs_and_the_second_takes_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = await open_register(tmp_path), await open_register(tmp_path)
        assert first.down_reason is None
        assert "another server runs the jobs" in str(second.down_reason)
        await first.close()
        await second.open(200.0)
        assert second.down_reason is None
        await second.close()

    run(scenario())


def steps(change: Any, root: Path) -> int:
    """The number of changes to the disk that a change makes."""
    disk = Disk()
    run(change(root, disk))
    return -disk.left - 1


@asynccontextmanager
async def failing(root: Path, disk: Disk) -> AsyncIterator[Register]:
    """A register whose folders are on a disk that fails."""
    register = await open_register(root)
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
    """A folder for every call at which a change may be interrupted, and one more."""
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
    """The process ends."""


@pytest.mark.parametrize("error", [Died(), OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")])
def test_an_interrupted_submission_is_complete_or_absent(error: BaseException, tmp_path: Path) -> None:
    for number, root in enumerate(attempts(tmp_path, _submit), 1):
        with suppress(Died, ServerError):
            run(_submit(root, Disk(number, error)))
        found = states_after_start(root)
        assert found in ({}, {ID: JobState.QUEUED})
        if isinstance(error, OSError):
            assert found == {}, f"refused at step {number}, and yet it is there"
        assert os.listdir(root / ".trash") == []


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StorageFull):
        run(_submit(tmp_path, Disk(2, OSError(errno.ENOSPC, "full"))))


def test_an_interrupted_end_is_complete_or_repeated(tmp_path: Path) -> None:
    running = replace(JOB, state=JobState.PUBLISHING)
    for number, root in enumerate(attempts(tmp_path, _end, lambda root: with_job(root, running)), 1):
        with suppress(Died):
            run(_end(root, Disk(number, Died())))
        assert states_after_start(root)[ID] in {JobState.PUBLISHING, JobState.SUCCEEDED}


def test_an_interrupted_deletion_is_complete_or_absent(tmp_path: Path) -> None:
    done = replace(JOB, state=JobState.FAILED)
    for number, root in enumerate(attempts(tmp_path, _delete, lambda root: with_job(root, done)), 1):
        with suppress(Died):
            run(_delete(root, Disk(number, Died())))
        assert states_after_start(root) in ({}, {ID: JobState.FAILED})
        assert os.listdir(root / ".trash") == []


def test_an_end_in_the_folder_counts_although_the_database_lacks_it(tmp_path: Path) -> None:
    with_job(tmp_path, replace(JOB, state=JobState.PUBLISHING))
    JobFolders(tmp_path).record(replace(JOB, state=JobState.SUCCEEDED))
    assert states_after_start(tmp_path) == {ID: JobState.SUCCEEDED}


def test_a_job_without_its_folder_is_removed(tmp_path: Path) -> None:
    with_job(tmp_path)
    JobFolders(tmp_path).remove(ID)
    assert states_after_start(tmp_path) == {}


def test_of_two_submissions_with_one_key_the_first_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        register = await open_register(tmp_path)
        jobs = [Job(order(f"{n:020x}", key="same")) for n in range(5)]
        added = await asyncio.gather(*(register.add(job) for job in jobs))
        assert {job.id for job in added} == {jobs[0].id}
        assert len(register.all()) == 1
        with pytest.raises(NotFound):
            register.get("0" * 20 + "x")
        await register.close()

    run(scenario())


def test_each_checkpoint_and_each_ended_trial_of_a_sweep_is_progress(tmp_path: Path) -> None:
    """The trials' own records and checkpoints; a trial that ends loses its checkpoints. Finals count like trials."""
    folders = JobFolders(tmp_path)
    moments = [folders.saved_progress("job")]

    def at(trial: int, step: int = 0, *, state: State = "running", kind: str = "trials") -> None:
        folder = tmp_path / "job" / kind / (str(trial) if kind == "trials" else f"{trial}-0")
        TrialRecord(trial, {}, state).write(folder)
        if step:
            checkpoint.save(folder, step, Checkpoint({}, {}))
        elif state != "running":
            shutil.rmtree(folder / checkpoint.FOLDER, ignore_errors=True)
        moments.append(folders.saved_progress("job"))

    at(0)
    assert moments == [0, 0]
    at(0, 4000)
    at(1, 8000)
    at(0, state="complete")
    at(1, 12_000)
    at(2, 4000)
    at(1, state="pruned")
    at(2, state="failed")
    at(3, 4)
    at(0, 4000, kind="finals")
    at(0, state="complete", kind="finals")
    assert moments[1:] == sorted(set(moments[1:]))
