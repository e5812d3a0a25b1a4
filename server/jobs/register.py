"""All jobs of this server: in memory for reading, in the database and the folders before anybody is told.

Every change of a job passes `Register.change`, one at a time. While the database or the folder cannot be used, the
register is down: it says why, everything that asks gets 503, and it is opened again when the cause has passed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from server.errors import NotFound, ServerError, Unavailable
from server.jobs.folders import DATABASE, JobFolders
from server.jobs.job import Job, JobState
from server.jobs.store import JobStore

log = logging.getLogger(__name__)

Change = Callable[[Job], Job]


class Register:
    """The jobs by id, oldest first."""

    def __init__(self, folders: JobFolders, store: JobStore | None = None) -> None:
        self.folders = folders
        self.down: str | None = "jobs are not being run yet"  # why nothing can be done
        self._store = store or JobStore(folders.root / DATABASE)
        self._jobs: dict[str, Job] = {}
        self._changing = asyncio.Lock()

    # life

    async def open(self, now: float) -> None:
        """Read what there is and put it right after a crash; on failure the register stays down, and says why."""
        try:
            async with self._changing:
                whole = await asyncio.to_thread(self.folders.open)
                listed = await self._store.open()
                self._jobs = await self._reconcile(listed, whole, now)
        except ServerError as error:
            self._fail(error)
        else:
            self.down = None

    async def close(self) -> None:
        """Let go of the database and the folder."""
        self.down = "the server is stopping"
        async with self._changing:
            await self._store.close()
            await asyncio.to_thread(self.folders.close)
        self._store.shut()

    async def _reconcile(self, listed: Iterable[Job], whole: Iterable[Job], now: float) -> dict[str, Job]:
        """Bring database and folders together, and what was running back into the queue."""
        rows, folders = {job.id: job for job in listed}, {job.id: job for job in whole}
        jobs = {}
        for job_id in sorted(rows | folders):
            row, folder = rows.get(job_id), folders.get(job_id)
            if (known := self._jobs.get(job_id)) is not None:  # the database was down, this process was not
                job = known if folder else None
            else:
                job = _after_crash(row, folder, now)
            if job is None:
                await self._store.remove(job_id)
                continue
            if job != row:
                await self._keep(job)
            jobs[job_id] = job
        return jobs

    def _fail(self, error: ServerError) -> None:
        if self.down != error.message:
            log.error("jobs are not available: %s", error.message)
        self.down = error.message

    # reading

    def check(self) -> None:
        """Raise Unavailable while the register is down."""
        if self.down is not None:
            raise Unavailable(f"jobs are not available: {self.down}", retry_after=5.0)

    def all(self) -> list[Job]:
        """Return every job, oldest first; raises Unavailable."""
        self.check()
        return list(self._jobs.values())

    def in_state(self, *states: JobState) -> list[Job]:
        """Return the jobs in one of these states, oldest first; none while the register is down."""
        return [job for job in self._jobs.values() if job.state in states] if self.down is None else []

    def get(self, job_id: str) -> Job:
        """Return a job; raises NotFound, Unavailable."""
        self.check()
        if (job := self._jobs.get(job_id)) is None:
            raise NotFound(f"there is no job {job_id[:40]!r}")
        return job

    def find_key(self, owns: Callable[[Job], bool], key: str) -> Job | None:
        """Return the job that an owner, who is asked which jobs those are, submitted with an idempotency key."""
        return next((job for job in self._jobs.values() if job.order.key == key and owns(job)), None)

    # changing

    async def add(self, job: Job, fill: Callable[[Path], None] | None = None) -> Job:
        """Enter a job; durable on return. Of two with the same owner and key the first one counts, and is returned."""
        async with self._changing:
            self.check()
            if (key := job.order.key) is not None and (found := self.find_key(_as_owner_of(job), key)) is not None:
                return found
            await asyncio.to_thread(self.folders.create, job, fill)
            try:
                await self._save(job)
            except ServerError:
                await asyncio.to_thread(self.folders.remove, job.id)
                raise
            self._jobs[job.id] = job
            return job

    async def change(self, job_id: str, change: Change) -> Job:
        """Apply a change and return the job as it is then; durable on return. ``change`` may raise to refuse it."""
        async with self._changing:
            before = self.get(job_id)
            after = change(before)
            if after != before:
                await self._keep(after)
                self._jobs[job_id] = after
            return after

    async def remove(self, job_id: str) -> None:
        """Remove a job that has ended, with its folder; durable on return. Raises NotFound, Conflict."""
        async with self._changing:
            self.get(job_id)
            await asyncio.to_thread(self.folders.remove, job_id)
            await self._save(job_id)
            del self._jobs[job_id]

    async def _keep(self, job: Job) -> None:
        """Write a job down: how it ended goes to its folder first, which outlives the database."""
        if job.state.is_final and self.folders.exists(job.id):
            await asyncio.to_thread(self.folders.record, job)
        await self._save(job)

    async def _save(self, job: Job | str) -> None:
        try:
            await (self._store.remove(job) if isinstance(job, str) else self._store.save(job))
        except Unavailable as error:
            self._fail(error)
            raise


def _as_owner_of(job: Job) -> Callable[[Job], bool]:
    return lambda other: other.order.account == job.order.account


def _after_crash(row: Job | None, folder: Job | None, now: float) -> Job | None:
    """Return what holds of a job that the database, its folder, or both know of; None: it was being deleted."""
    if folder is None:
        return None
    if row is None or (folder.state.is_final and not row.state.is_final):
        return folder  # the database was lost, or the crash came between the two
    if row.state is not JobState.RUNNING:
        return row
    return row.end(JobState.CANCELLED, now) if row.cancelling else row.requeue(now)
