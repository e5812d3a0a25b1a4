"""Gives jobs their processes: the queue's plan carried out, endings written down, results published.

One task per job that has a place. A job's state is durable before its process starts and before anybody hears of its
end, so after a crash at any moment the register knows what to do again: run it on from its last checkpoint, or publish.
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

import orjson

from core.runtime.devices import HOST, canonical
from server.errors import NotFound, ServerError
from server.jobs.endings import Found, after
from server.jobs.folders import LOG, PARENT, RESULT, JobFolders
from server.jobs.job import Job, JobState
from server.jobs.kinds import Kinds
from server.jobs.ports import Datasets, Publisher
from server.jobs.queue import Active, Policy, Shares, Waiting, plan
from server.jobs.register import Change, Register
from server.jobs.runner import Bounds, End, Ending, Run
from server.repository.manifest import MODEL_FILE
from server.repository.space import Space

log = logging.getLogger(__name__)

_TICK = 0.5  # seconds after which the queue is looked at again, though nothing happened
_PATIENCE = 5.0  # seconds before what the disk refused is tried again
_PAUSES = (1.0, 5.0, 20.0)  # seconds before a publication that failed for a passing reason is tried again; the last on
_PUBLISHING = 3600.0  # seconds after which it is not
_METRICS = 1 << 18  # bytes of metrics that are kept with a job


@dataclass(frozen=True, slots=True)
class Allowance:
    """What jobs may take of this server."""

    policy: Policy
    threads: int  # of each job
    disk: int  # bytes of one job's files
    grace: float  # seconds from being asked to stop to being killed
    idle: bool = True  # jobs compute only while nobody else wants to

    def bounds(self, job: Job) -> Bounds:
        """Return what the next attempt at a job may take."""
        limits = job.order.limits
        return Bounds(max(0.0, limits.seconds - job.ran), limits.memory, self.disk, self.grace, self.idle)


@dataclass(slots=True)
class _Place:
    """A job at work; ``run`` is there while it has a process. One that publishes needs no slot."""

    id: str
    owner: str
    level: int
    since: float  # seconds since 1970
    publishing: bool
    device: str  # that its steps run on; "" for the processors
    leaving: bool = False
    run: Run | None = None
    task: asyncio.Task[None] | None = None

    def vacate(self) -> None:
        """Have the process stop, if there is one yet; `Dispatcher` looks at ``leaving`` when it starts one."""
        self.leaving = True
        if self.run is not None:
            self.run.stop()


class Dispatcher:
    """Runs what the register holds, until it is stopped."""

    def __init__(
        self,
        register: Register,
        kinds: Kinds,
        datasets: Datasets,
        publisher: Publisher,
        allowance: Allowance,
        space: Space,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._register = register
        self._kinds = kinds
        self._datasets = datasets
        self._publisher = publisher
        self._allowance = allowance
        self._space = space  # of the disk that jobs write to
        self._draining = draining  # whether the server is about to stop
        self._shares = Shares()
        self._places: dict[str, _Place] = {}
        self._woken = asyncio.Event()
        self._stopping = asyncio.Event()

    # life

    async def run(self) -> None:
        """Look at the queue whenever something has happened, and now and then; open the register when it is down."""
        while not (self._stopping.is_set() or self._draining()):
            self._woken.clear()
            if self._register.down is not None:
                await self._register.open(time.time())
            await asyncio.to_thread(self._space.look)
            self._turn(time.time())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _TICK)
        self._leave()

    async def stop(self, patience: float) -> None:
        """End `run`, let jobs write a checkpoint and go back to the queue; those still there in the end are killed.

        ``patience``: seconds for each of the two.
        """
        self._stopping.set()
        self.wake()
        self._leave()
        tasks = {place.task for place in self._places.values() if place.task}
        if tasks:
            _, tasks = await asyncio.wait(tasks, timeout=patience)
        for place in self._places.values():
            if place.run is not None:
                place.run.kill()
            elif place.task is not None:
                place.task.cancel()  # a publication goes on after the restart
        if tasks:
            await asyncio.wait(tasks, timeout=patience)

    def wake(self) -> None:
        """Say that something has happened."""
        self._woken.set()

    def stop_process(self, job_id: str) -> None:
        """Stop a job's process; the register knows already what is to become of the job."""
        if (place := self._places.get(job_id)) is not None:
            place.vacate()

    def _leave(self) -> None:
        for place in self._places.values():
            place.vacate()

    # the queue

    def _turn(self, now: float) -> None:
        """Start and stop what the plan says, but start nothing while the disk is full; publish what a crash left
        unpublished."""
        for job in self._register.in_state(JobState.PUBLISHING):
            if job.id not in self._places:
                self._occupy(job, now, 0, self._publish(job))
        policy = self._allowance.policy
        queued = {job.id: job for job in self._register.in_state(JobState.QUEUED) if job.id not in self._places}
        waiting = {job.id: _waiting(job) for job in queued.values() if not self._space.is_full}
        active = [_active(place) for place in self._places.values() if not place.publishing]
        used = {owner: self._shares.used(owner, now) for owner in {job.owner for job in waiting.values()}}
        decided = plan(now, waiting.values(), active, used, policy)
        for job_id in decided.stop:
            self._places[job_id].vacate()
        for job_id in decided.start:
            self._occupy(queued[job_id], now, waiting[job_id].level(now, policy.aging), self._attempt(queued[job_id]))

    def _occupy(self, job: Job, now: float, level: int, work: Coroutine[Any, Any, None]) -> None:
        publishing = job.state is JobState.PUBLISHING
        device = device_of(job.order.recipe)
        place = self._places[job.id] = _Place(job.id, job.order.account, level, now, publishing, device)
        place.task = asyncio.create_task(self._to_end(job.id, work))

    async def _to_end(self, job_id: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except NotFound:
            log.warning("job %s is gone", job_id)
        except ServerError as error:
            log.warning("job %s has to wait: %s", job_id, error.message)
            await asyncio.sleep(_PATIENCE)
        finally:
            del self._places[job_id]
            self.wake()

    # one job

    async def _attempt(self, job: Job) -> None:
        """Run a queued job until its process ends, and write down what follows from that."""
        place = self._places[job.id]
        job = await self._register.change(job.id, lambda job: _started(job, place.leaving))
        if job.state is not JobState.RUNNING:
            return
        try:
            ending = await self._run(job, place)
        finally:
            place.run = None
        self._shares.charge(job.order.account, ending.seconds, time.time())
        found = await asyncio.to_thread(_clear_up, self._register.folders, job.id)
        job = await self._insist(job.id, lambda job: after(job, ending, found, time.time()))
        log.info("job %s: %s after %.1f s, now %s", job.id, ending.end.value, ending.seconds, job.state.value)
        if job.state is JobState.PUBLISHING:
            place.publishing = True
            self.wake()
            await self._publish(job)
        elif ending.end is End.CRASHED:
            await asyncio.sleep(_PAUSES[0])

    async def _run(self, job: Job, place: _Place) -> Ending:
        folders, bounds = self._register.folders, self._allowance.bounds(job)
        try:
            async with self._datasets.hold(job.order.dataset.digest) as data:
                command, log_file = self._command(job, data.path), folders.path(job.id) / LOG
                place.run = run = Run(command, log_file, bounds, lambda: folders.size(job.id), self._space)
                if place.leaving:  # meanwhile
                    run.stop()
                return await run.to_end()
        except NotFound as error:
            return Ending(End.REFUSED, error.message)
        except Exception:
            log.exception("job %s: its process could not be run", job.id)
            return Ending(End.CRASHED, "its process could not be run; the server's log says more")

    def _command(self, job: Job, data: Path) -> list[str]:
        folder = self._register.folders.path(job.id).absolute()
        kind = self._kinds.get(job.order.kind)
        command = [kind.module, str(folder), "--dataset", str(data.absolute())]
        command += ["--threads", str(self._allowance.threads), "--keep-free", str(self._space.kept)]
        if job.order.model is not None:
            command += ["--parent", str(folder / PARENT / MODEL_FILE)]
        return command

    async def _publish(self, job: Job) -> None:
        change = await self._finish(job)
        await self._insist(job.id, change)

    async def _finish(self, job: Job) -> Change:
        """Publish a result, however often a crash or a full disk came in between; return how the job ends.

        A cancellation counts between two tries: whether one that was broken off has published is not known before.
        """
        pauses, deadline = list(_PAUSES), time.monotonic() + _PUBLISHING
        while True:
            try:
                result = await self._publisher.finish(job, self._register.folders.path(job.id))
                return lambda job: job.end(JobState.SUCCEEDED, time.time(), result=result)
            except ServerError as error:
                if error.http_status < 500 or time.monotonic() > deadline:
                    return _failing(f"publishing: {error.message}")
                log.warning("job %s: publishing failed, is tried again: %s", job.id, error.message)
            except Exception:
                log.exception("job %s: publishing failed", job.id)
                return _failing("publishing failed; the server's log says more")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pauses.pop(0) if len(pauses) > 1 else pauses[0])
                return lambda job: job  # after the restart
            if self._register.get(job.id).cancelling:
                return lambda job: job.end(JobState.CANCELLED, time.time())

    async def _insist(self, job_id: str, change: Change) -> Job:
        """Change a job, as soon as the disk lets it; raises NotFound."""
        while True:
            try:
                return await self._register.change(job_id, change)
            except NotFound:
                raise
            except ServerError as error:
                log.warning("job %s: its state cannot be written: %s", job_id, error.message)
                await asyncio.sleep(_TICK)


def _started(job: Job, leaving: bool) -> Job:
    """Begin a job that is still queued, unless its place is to be vacated already."""
    return job.start(time.time()) if job.state is JobState.QUEUED and not leaving else job


def _failing(reason: str) -> Change:
    return lambda job: job.end(JobState.FAILED, time.time(), error=reason)


def device_of(recipe: Mapping[str, Any]) -> str:
    """The device that a recipe, or what a sweep tries, names; "" for the processors."""
    tried = recipe.get("recipe")
    found = recipe.get("device") or (tried.get("device") if isinstance(tried, Mapping) else None)
    return canonical(found) if isinstance(found, str) and found != HOST else ""


def _waiting(job: Job) -> Waiting:
    order = job.order
    return Waiting(job.id, order.account, order.priority, job.queued, order.submitted, device_of(order.recipe))


def _active(place: _Place) -> Active:
    return Active(place.id, place.owner, place.level, place.since, place.leaving, place.device)


def _clear_up(folders: JobFolders, job_id: str) -> Found:
    """Remove what an attempt has left half written; return what it has left whole."""
    folders.remove_unfinished(job_id)
    result = folders.path(job_id) / RESULT
    return Found(folders.checkpoint(job_id), result.is_dir(), read_metrics(result / "metrics.json"))


def read_metrics(file: Path) -> dict[str, Any]:
    """Return a result's metrics; nothing when there are none that read."""
    try:
        document = orjson.loads(file.read_bytes()) if file.stat().st_size <= _METRICS else {}
    except (OSError, orjson.JSONDecodeError):
        return {}
    return document if isinstance(document, dict) else {}
