"""Starts and stops the processes of jobs by the queue's plan, records how they end, and publishes results.

Each active job has one task. A job's state is durable before its process starts, and before its end becomes visible. So
after a crash the register knows how to continue: run the job from its last checkpoint, or publish its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.core.runtime.device.devices import HOST, canonical
from lathe.server.errors import NotFound, ServerError
from lathe.server.jobs.folders import LOG, PARENT, RESULT, JobFolders
from lathe.server.jobs.interfaces import Datasets, Publisher
from lathe.server.jobs.job import Job, JobState
from lathe.server.jobs.kinds import Kinds
from lathe.server.jobs.outcome import AttemptFiles, after_attempt
from lathe.server.jobs.register import Change, Register
from lathe.server.jobs.result_metrics import metrics_for_record
from lathe.server.jobs.runner import Attempt, Ending, EndKind, ResourceBounds
from lathe.server.jobs.scheduler import ActiveJob, Policy, RecentUsage, WaitingJob, plan_jobs
from lathe.server.repository.disk_space import DiskSpace
from lathe.server.repository.manifest import MODEL_FILE

log = logging.getLogger(__name__)

_TICK = 0.5  # longest time between two turns of the queue, in seconds
_RETRY_AFTER = 5.0  # seconds before a job is tried again after a storage error
_RETRY_PAUSES = (1.0, 5.0, 20.0)  # seconds between retries of a publication after a 5xx error; then always the last
_PUBLISH_TIMEOUT = 3600.0  # seconds after which a publication is not retried


@dataclass(frozen=True, slots=True)
class JobResources:
    """The resources of this server that jobs may use."""

    policy: Policy
    threads: int  # per job
    disk: int  # bytes of files per job
    grace: float  # seconds between SIGTERM and SIGKILL
    idle: bool = True  # jobs run at idle CPU priority

    def bounds(self, job: Job) -> ResourceBounds:
        """Return the bounds of a job's next attempt; its seconds are those that earlier attempts left."""
        limits = job.order.limits
        return ResourceBounds(max(0.0, limits.seconds - job.ran), limits.memory, self.disk, self.grace, self.idle)


@dataclass(slots=True)
class _ActiveJob:
    """A job that runs or publishes; `run` is set while it has a process. A job that publishes occupies no slot."""

    id: str
    owner: str
    level: int
    since: float  # seconds since 1970
    publishing: bool
    device: str  # the GPU that it trains on; "" for the CPU
    leaving: bool = False
    run: Attempt | None = None
    task: asyncio.Task[None] | None = None

    def vacate(self) -> None:
        """Set `leaving`, and stop the process if there is one; `Dispatcher` checks `leaving` when it starts one."""
        self.leaving = True
        if self.run is not None:
            self.run.stop()


class Dispatcher:
    """Runs the register's jobs until it is stopped."""

    def __init__(
        self,
        register: Register,
        kinds: Kinds,
        datasets: Datasets,
        publisher: Publisher,
        allowance: JobResources,
        space: DiskSpace,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._register = register
        self._kinds = kinds
        self._datasets = datasets
        self._publisher = publisher
        self._allowance = allowance
        self._space = space  # free space of the disk that jobs write to
        self._draining = draining  # whether the server is about to stop
        self._usage = RecentUsage()
        self._active_jobs: dict[str, _ActiveJob] = {}
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()

    # start and stop

    async def run(self) -> None:
        """Start and stop jobs after each `wake` and at least every 0.5 s; reopens the register if it is down.

        Ends after `stop` is called, or when the server is about to stop; then it requests all jobs to stop.
        """
        while not self._is_ending():
            self._wake.clear()
            if self._register.down_reason is not None:
                await self._register.open(time.time())
            await asyncio.to_thread(self._space.look)
            if self._is_ending():  # `stop` waits only for the jobs that were active when it was called
                break
            self._start_and_stop(time.time())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _TICK)
        self._vacate_all()

    def _is_ending(self) -> bool:
        return self._stopping.is_set() or self._draining()

    async def stop(self, patience: float) -> None:
        """End `run`; jobs write a checkpoint and return to the queue, and the rest is killed after `patience`.

        `patience`: seconds for stopping, and again for the tasks to end after the kill.
        """
        self._stopping.set()
        self.wake()
        self._vacate_all()
        tasks = {place.task for place in self._active_jobs.values() if place.task}
        if tasks:
            _, tasks = await asyncio.wait(tasks, timeout=patience)
        for place in self._active_jobs.values():
            if place.run is not None:
                place.run.kill()
            elif place.task is not None:
                place.task.cancel()  # a publication continues after the restart
        if tasks:
            await asyncio.wait(tasks, timeout=patience)

    def wake(self) -> None:
        """Let `run` plan the queue now, because a job has changed."""
        self._wake.set()

    def stop_process(self, job_id: str) -> None:
        """Stop a job's process, if it has one; the caller has stored the job's new state."""
        if (place := self._active_jobs.get(job_id)) is not None:
            place.vacate()

    def _vacate_all(self) -> None:
        for place in self._active_jobs.values():
            place.vacate()

    def running_seconds(self, job_id: str) -> float:
        """Return for how long a job's process has been running; 0 without a process."""
        place = self._active_jobs.get(job_id)
        return time.monotonic() - place.run.started if place is not None and place.run is not None else 0.0

    # the queue

    def _start_and_stop(self, now: float) -> None:
        """Start and stop jobs by the plan, and resume interrupted publications. A full disk starts no job."""
        for job in self._register.in_state(JobState.PUBLISHING):
            if job.id not in self._active_jobs:
                self._activate(job, now, 0, self._publish(job))
        policy = self._allowance.policy
        queued = {job.id: job for job in self._register.in_state(JobState.QUEUED) if job.id not in self._active_jobs}
        waiting = {job.id: _waiting(job) for job in queued.values() if not self._space.is_full}
        active = [_active(place) for place in self._active_jobs.values() if not place.publishing]
        used = {owner: self._usage.used(owner, now) for owner in {job.owner for job in waiting.values()}}
        planned = plan_jobs(now, waiting.values(), active, used, policy)
        for job_id in planned.stop:
            self._active_jobs[job_id].vacate()
        for job_id in planned.start:
            self._activate(
                queued[job_id], now, waiting[job_id].level(now, policy.seconds_per_level), self._attempt(queued[job_id])
            )

    def _activate(self, job: Job, now: float, level: int, work: Coroutine[Any, Any, None]) -> None:
        publishing = job.state is JobState.PUBLISHING
        device = recipe_device(job.order.recipe)
        place = self._active_jobs[job.id] = _ActiveJob(job.id, job.order.account, level, now, publishing, device)
        place.task = asyncio.create_task(self._run_task(job.id, work))

    async def _run_task(self, job_id: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except NotFound:
            log.warning("job %s does not exist any more", job_id)
        except ServerError as error:
            log.warning("job %s is tried again later: %s", job_id, error.message)
            await asyncio.sleep(_RETRY_AFTER)
        finally:
            del self._active_jobs[job_id]
            self.wake()

    # one job

    async def _attempt(self, job: Job) -> None:
        """Run a job until its process ends, store the outcome, and publish the result.

        A job that is not queued any more, or has to leave, is not run.
        """
        place = self._active_jobs[job.id]
        job = await self._register.change(job.id, lambda job: _start_if_queued(job, place.leaving))
        if job.state is not JobState.RUNNING:
            return
        try:
            ending = await self._run(job, place)
        finally:
            place.run = None
        self._usage.charge(job.order.account, ending.seconds, time.time())
        found = await asyncio.to_thread(_collect_outcome, self._register.folders, job.id)
        job = await self._change_with_retries(job.id, lambda job: after_attempt(job, ending, found, time.time()))
        log.info("job %s: %s after %.1f s, now %s", job.id, ending.end.value, ending.seconds, job.state.value)
        if job.state is JobState.PUBLISHING:
            place.publishing = True
            self.wake()
            await self._publish(job)
        elif ending.end is EndKind.CRASHED:
            await asyncio.sleep(_RETRY_PAUSES[0])

    async def _run(self, job: Job, place: _ActiveJob) -> Ending:
        folders, bounds = self._register.folders, self._allowance.bounds(job)
        try:
            async with self._datasets.hold(job.order.dataset.digest) as data:
                command, log_file = self._command(job, data.path), folders.path(job.id) / LOG
                place.run = run = Attempt(command, log_file, bounds, lambda: folders.size(job.id), self._space)
                if place.leaving:  # stopped while the dataset was being locked
                    run.stop()
                return await run.run()
        except NotFound as error:
            return Ending(EndKind.REFUSED, error.message)
        except Exception:
            log.exception("job %s: its process could not be run", job.id)
            return Ending(EndKind.CRASHED, "its process could not be run; see the server's log")

    def _command(self, job: Job, data: Path) -> list[str]:
        folder = self._register.folders.path(job.id).absolute()
        kind = self._kinds.get(job.order.kind)
        command = [kind.module, str(folder), "--dataset", str(data.absolute())]
        command += ["--threads", str(self._allowance.threads), "--keep-free", str(self._space.kept)]
        if job.order.model is not None:
            command += ["--parent", str(folder / PARENT / MODEL_FILE)]
        return command

    async def _publish(self, job: Job) -> None:
        change = await self._publish_with_retries(job)
        await self._change_with_retries(job.id, change)

    async def _publish_with_retries(self, job: Job) -> Change:
        """Publish a result; returns the change of the job: succeeded, failed or cancelled.

        A 5xx error is retried for an hour; any other error fails the job. If the server stops in between, the change
        does nothing, and the next start publishes. A cancellation takes effect only between two attempts, because an
        interrupted attempt may have published.
        """
        pauses, deadline = list(_RETRY_PAUSES), time.monotonic() + _PUBLISH_TIMEOUT
        while True:
            try:
                result = await self._publisher.finish(job, self._register.folders.path(job.id))
                return lambda job: job.end(JobState.SUCCEEDED, time.time(), result=result)
            except ServerError as error:
                if error.http_status < 500 or time.monotonic() > deadline:
                    return _fail_with(f"publishing: {error.message}")
                log.warning("job %s: publishing failed and is retried: %s", job.id, error.message)
            except Exception:
                log.exception("job %s: publishing failed", job.id)
                return _fail_with("publishing failed; see the server's log")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pauses.pop(0) if len(pauses) > 1 else pauses[0])
                return lambda job: job  # stopping: the next start publishes
            if self._register.get(job.id).cancelling:
                return lambda job: job.end(JobState.CANCELLED, time.time())

    async def _change_with_retries(self, job_id: str, change: Change) -> Job:
        """Change a job in the register, and retry while that fails; returns the changed job, raises NotFound."""
        while True:
            try:
                return await self._register.change(job_id, change)
            except NotFound:
                raise
            except ServerError as error:
                log.warning("job %s: its state cannot be stored: %s", job_id, error.message)
                await asyncio.sleep(_TICK)


def _start_if_queued(job: Job, leaving: bool) -> Job:
    """Return the job in state RUNNING if it is queued and not `leaving`, otherwise unchanged."""
    return job.start(time.time()) if job.state is JobState.QUEUED and not leaving else job


def _fail_with(reason: str) -> Change:
    return lambda job: job.end(JobState.FAILED, time.time(), error=reason)


def recipe_device(recipe: Mapping[str, Any]) -> str:
    """Return the GPU that a recipe, or the recipe inside a sweep, names, such as `cuda:0`; "" for the CPU."""
    inner = recipe.get("recipe")
    found = recipe.get("device") or (inner.get("device") if isinstance(inner, Mapping) else None)
    return canonical(found) if isinstance(found, str) and found != HOST else ""


def _waiting(job: Job) -> WaitingJob:
    order = job.order
    return WaitingJob(job.id, order.account, order.priority, job.queued, order.submitted, recipe_device(order.recipe))


def _active(place: _ActiveJob) -> ActiveJob:
    return ActiveJob(place.id, place.owner, place.level, place.since, place.leaving, place.device)


def _collect_outcome(folders: JobFolders, job_id: str) -> AttemptFiles:
    """Remove an attempt's incomplete files; returns its progress, result and metrics."""
    folders.remove_unfinished(job_id)
    result = folders.path(job_id) / RESULT
    return AttemptFiles(folders.saved_progress(job_id), result.is_dir(), metrics_for_record(result / "metrics.json"))
