"""All jobs of this server: in memory for reading; a change is in the database and folders before it is visible.

`Register.change` makes all changes of jobs, one at a time. While the database or the folder cannot be used, the
register is down: `down_reason` says why, changes and `all`, `get` and `check` raise Unavailable (503), and the
dispatcher tries to open the register again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from lathe.server.errors import NotFound, ServerError, Unavailable
from lathe.server.jobs.database import JobStore
from lathe.server.jobs.folders import DATABASE, JobFolders
from lathe.server.jobs.job import Job, JobState

log = logging.getLogger(__name__)

Change = Callable[[Job], Job]


class Register:
    """All jobs of this server by id, oldest first, with their database and their folders."""

    def __init__(self, folders: JobFolders, store: JobStore | None = None) -> None:
        self.folders = folders
        self.down_reason: str | None = "jobs are not being run yet"  # the reason while the register is down
        self._store = store or JobStore(folders.root / DATABASE)
        self._jobs: dict[str, Job] = {}
        self._change_lock = asyncio.Lock()

    # open and close

    async def open(self, now: float) -> None:
        """Read all jobs and recover from a crash; on failure the register stays down, with a `down_reason`."""
        try:
            async with self._change_lock:
                in_folders = await asyncio.to_thread(self.folders.open)
                in_database = await self._store.open()
                self._jobs = await self._reconcile(in_database, in_folders, now)
        except ServerError as error:
            self._fail(error)
        else:
            self.down_reason = None

    async def close(self) -> None:
        """Close the database, and release the folder."""
        self.down_reason = "the server is stopping"
        async with self._change_lock:
            await self._store.close()
            await asyncio.to_thread(self.folders.close)
        self._store.stop_thread()

    async def _reconcile(self, in_database: Iterable[Job], in_folders: Iterable[Job], now: float) -> dict[str, Job]:
        """Return the jobs by id, merged from database and folders and stored; jobs that were running are queued again.

        A job whose cancellation was requested is cancelled instead, and jobs without a folder are removed. When the
        register is reopened, jobs in memory replace those of the database.
        """
        rows, folders = {job.id: job for job in in_database}, {job.id: job for job in in_folders}
        jobs = {}
        for job_id in sorted(rows | folders):
            row, folder = rows.get(job_id), folders.get(job_id)
            if (in_memory := self._jobs.get(job_id)) is not None:  # reopened: memory is newer than the database
                job = in_memory if folder else None
            else:
                job = _after_crash(row, folder, now)
            if job is None:
                await self._store.remove(job_id)
                continue
            if job != row:
                await self._store_job(job)
            jobs[job_id] = job
        return jobs

    def _fail(self, error: ServerError) -> None:
        if self.down_reason != error.message:
            log.error("jobs are not available: %s", error.message)
        self.down_reason = error.message

    # reading

    def check(self) -> None:
        """Raises Unavailable while the register is down."""
        if self.down_reason is not None:
            raise Unavailable(f"jobs are not available: {self.down_reason}", retry_after=5.0)

    def all(self) -> list[Job]:
        """Return every job, oldest first; raises Unavailable."""
        self.check()
        return list(self._jobs.values())

    def in_state(self, *states: JobState) -> list[Job]:
        """Return the jobs in one of these states, oldest first; none while the register is down."""
        return [job for job in self._jobs.values() if job.state in states] if self.down_reason is None else []

    def get(self, job_id: str) -> Job:
        """Return a job; raises NotFound, Unavailable."""
        self.check()
        if (job := self._jobs.get(job_id)) is None:
            raise NotFound(f"there is no job {job_id[:40]!r}")
        return job

    def find_key(self, owns: Callable[[Job], bool], key: str) -> Job | None:
        """Return the job with this idempotency key for which `owns` is true; None if there is none."""
        return next((job for job in self._jobs.values() if job.order.key == key and owns(job)), None)

    # changes

    async def add(
        self, job: Job, fill: Callable[[Path], None] | None = None, admit: Callable[[], None] = lambda: None
    ) -> Job:
        """Add a job, durable on return, and return it; if a job of the same owner has the same key, return that job.

        `admit` raises to refuse the job, and sees all jobs that were added before. `fill` adds files to the job's new
        folder. Raises Unavailable, StorageFull, and the ServerErrors of `fill` and `admit`.
        """
        async with self._change_lock:
            self.check()
            if (key := job.order.key) is not None and (found := self.find_key(_has_owner_of(job), key)) is not None:
                return found
            admit()
            await asyncio.to_thread(self.folders.create, job, fill)
            try:
                await self._save(job)
            except ServerError:
                await asyncio.to_thread(self.folders.remove, job.id)
                raise
            self._jobs[job.id] = job
            return job

    async def change(self, job_id: str, change: Change) -> Job:
        """Replace a job by `change(job)`, durable on return, and return it; raises NotFound, Unavailable, StorageFull.

        `change` may raise to refuse: the job is unchanged then, and the error passes.
        """
        async with self._change_lock:
            before = self.get(job_id)
            after = change(before)
            if after != before:
                await self._store_job(after)
                self._jobs[job_id] = after
            return after

    async def remove(self, job_id: str) -> None:
        """Remove a job and its folder, durable on return; raises NotFound, Unavailable, StorageFull.

        The caller checks that the job has ended.
        """
        async with self._change_lock:
            self.get(job_id)
            await asyncio.to_thread(self.folders.remove, job_id)
            await self._save(job_id)
            del self._jobs[job_id]

    async def _store_job(self, job: Job) -> None:
        """Store a job. A final state goes to its folder first, because the folder outlives the database."""
        if job.state.is_final and self.folders.exists(job.id):
            await asyncio.to_thread(self.folders.record, job)
        await self._save(job)

    async def _save(self, job: Job | str) -> None:
        try:
            await (self._store.remove(job) if isinstance(job, str) else self._store.save(job))
        except Unavailable as error:
            self._fail(error)
            raise


def _has_owner_of(job: Job) -> Callable[[Job], bool]:
    return lambda other: other.order.account == job.order.account


def _after_crash(row: Job | None, folder: Job | None, now: float) -> Job | None:
    """Return the state of a job after a restart, from its database row and its folder; None: it was deleted."""
    if folder is None:
        return None
    if row is None or (folder.state.is_final and not row.state.is_final):
        return folder  # the database was lost, or a crash came between writing the folder and the row
    if row.state is not JobState.RUNNING:
        return row
    return row.end(JobState.CANCELLED, now) if row.cancelling else row.requeue(now)
