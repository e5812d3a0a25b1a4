"""Jobs as callers know them: submitted, looked at, cancelled, deleted, each by whoever may."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from core.amounts import amount
from server.access.authority import Caller
from server.access.scopes import Scope
from server.errors import BadRequest, Conflict, Forbidden, NotFound, QuotaExceeded, StorageFull, TooLarge, Unprocessable
from server.jobs.dispatch import Dispatcher
from server.jobs.folders import EVENTS, PARENT
from server.jobs.job import DatasetPin, Job, JobLimits, JobState, ModelPin, Order, Publish, new_id
from server.jobs.kinds import Kinds
from server.jobs.ports import Datasets, Parents
from server.jobs.register import Register
from server.jobs.retention import surplus
from server.repository import names
from server.repository.space import Space


@dataclass(frozen=True, slots=True)
class Quotas:
    """What callers may ask for."""

    seconds: float  # of one job
    memory: int  # bytes of one job
    per_owner: int  # jobs of one owner that have not ended
    storage: int  # bytes of all jobs' files, beyond which nothing is taken any more
    kept: int  # jobs that have ended and are still listed
    recipe: int = 256 << 10  # bytes


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller submits; names are not resolved yet."""

    kind: str
    recipe: Mapping[str, Any]
    dataset: str
    model: str | None = None
    version: str = "live"  # of the model: a number or an alias
    publish: Publish | None = None
    priority: int = 0
    seconds: float | None = None
    memory: int | None = None

    def fingerprint(self) -> str:
        """Return what makes two requests the same."""
        return hashlib.sha256(orjson.dumps(self, option=orjson.OPT_SORT_KEYS)).hexdigest()


class JobService:
    """What the API asks. Everything raises Unavailable while the register is down."""

    def __init__(
        self,
        register: Register,
        dispatcher: Dispatcher,
        kinds: Kinds,
        datasets: Datasets,
        parents: Parents,
        quotas: Quotas,
        space: Space | None = None,
    ) -> None:
        self.register = register
        self._dispatcher = dispatcher
        self._kinds = kinds
        self._datasets = datasets
        self._parents = parents
        self._quotas = quotas
        self._space = space

    # reading

    def list(self, caller: Caller, state: JobState | None = None) -> list[Job]:
        """Return the jobs that a caller may see, newest first."""
        jobs = reversed(self.register.all())
        return [job for job in jobs if _may_see(caller, job) and (state is None or job.state is state)]

    def get(self, caller: Caller, job_id: str) -> Job:
        """Return a job; raises NotFound, also when it is somebody else's."""
        job = self.register.get(job_id)
        if not _may_see(caller, job):
            raise NotFound(f"there is no job {job_id[:40]!r}")
        return job

    def file(self, job: Job, *names: str) -> Path:
        """Return where a file of a job lies, whether it is there or not."""
        return self.register.folders.path(job.id).joinpath(*names)

    def events(self, job: Job) -> Path:
        """Return where a job's events are."""
        return self.file(job, EVENTS)

    async def datasets_needed(self) -> frozenset[str]:
        """Return the digests of the data that jobs still need."""
        return frozenset(job.order.dataset.digest for job in self.register.all() if not job.state.is_final)

    # changing

    async def submit(self, caller: Caller, asked: Request, key: str | None = None) -> tuple[Job, bool]:
        """Queue a job, durable on return; returns it, and whether the same key had made it before.

        Raises BadRequest for a recipe that cannot be run, Forbidden, NotFound, QuotaExceeded, StorageFull, Conflict.
        """
        self.register.check()
        fingerprint = asked.fingerprint()
        if key is not None and (found := self.register.find_key(partial(_owns, caller), key)) is not None:
            return _replayed(found, fingerprint), True
        self._check(caller, asked)
        await self._make_room()
        async with self._datasets.hold(asked.dataset) as data:
            pin = await self._pin(asked)
            order = self._order(caller, asked, DatasetPin(asked.dataset, data.digest), pin)
            order = replace(order, key=key, fingerprint=fingerprint)
            job = Job(order, queued=order.submitted)
            entered = await self.register.add(job, (lambda folder: self._link(pin, folder)) if pin else None)
        self._dispatcher.wake()
        return _replayed(entered, fingerprint), entered.id != job.id

    async def cancel(self, caller: Caller, job_id: str) -> Job:
        """Cancel a job: at once while it waits, as soon as its process has stopped while it runs.

        One whose result is being published may yet succeed. Raises Conflict when it has ended.
        """
        self.get(caller, job_id)
        job = await self.register.change(job_id, _cancelled)
        self._dispatcher.stop_process(job_id)
        return job

    async def delete(self, caller: Caller, job_id: str) -> Job:
        """Remove a job that has ended, with all its files; raises Conflict before."""
        job = self.get(caller, job_id)
        if not job.state.is_final:
            raise Conflict(f"job {job_id} is {job.state.value}: cancel it first")
        await self.register.remove(job_id)
        return job

    async def tidy(self) -> None:
        """Remove the oldest jobs that have ended, beyond what is kept."""
        for job in surplus(self.register.all(), self._quotas.kept):
            await self.register.remove(job.id)

    # how

    def _check(self, caller: Caller, asked: Request) -> None:
        """Raise what stands against a request, before anything is done for it."""
        quotas, kind = self._quotas, self._kinds.get(asked.kind)
        if len(orjson.dumps(asked.recipe)) > quotas.recipe:
            raise TooLarge(f"recipe: expected at most {quotas.recipe} bytes of JSON")
        try:
            kind.check(asked.recipe)
        except ValueError as error:
            raise Unprocessable(f"recipe: {error}") from error
        if kind.needs_model != (asked.model is not None):
            wanted = "expected a version to start from" if kind.needs_model else "not expected"
            raise BadRequest(f"model: {wanted} for a job of kind {asked.kind}")
        if asked.publish is not None and not kind.publishes:
            raise BadRequest(f"publish: not expected for a job of kind {asked.kind}, which makes no model")
        _check_rights(caller, asked)
        mine = sum(_owns(caller, job) for job in self.register.all() if not job.state.is_final)
        if mine >= quotas.per_owner:
            raise QuotaExceeded(f"{mine} of your jobs have not ended yet, as many as one may have", retry_after=60.0)

    async def _make_room(self) -> None:
        await self.tidy()
        if self._space is not None:
            await asyncio.to_thread(self._space.check)
        size = await asyncio.to_thread(self.register.folders.size)
        if size > self._quotas.storage:
            raise StorageFull(f"the files of all jobs take {amount(size)}, more than they may: delete some")

    async def _pin(self, asked: Request) -> ModelPin | None:
        return await self._parents.pin(asked.model, asked.version) if asked.model is not None else None

    def _link(self, pin: ModelPin, folder: Path) -> None:
        self._parents.link(pin, folder / PARENT)

    def _order(self, caller: Caller, asked: Request, data: DatasetPin, model: ModelPin | None) -> Order:
        quotas, now = self._quotas, time.time()
        seconds, memory = asked.seconds or quotas.seconds, asked.memory or quotas.memory
        return Order(
            id=new_id(now),
            owner=caller.name,
            owner_id=caller.identity,
            kind=asked.kind,
            recipe=asked.recipe,
            dataset=data,
            model=model,
            publish=asked.publish,
            priority=asked.priority,
            limits=JobLimits(min(seconds, quotas.seconds), min(memory, quotas.memory)),
            submitted=now,
        )


def _may_see(caller: Caller, job: Job) -> bool:
    """Whoever submitted it, and administrators."""
    return _owns(caller, job) or caller.may(Scope.ADMIN)


def _owns(caller: Caller, job: Job) -> bool:
    """Whether a caller submitted a job.

    Of a job that has no more than a name (one of a release before there were identities) only a key is the owner that
    was there then, and is the only one of that name now.
    """
    order = job.order
    if order.owner_id or not order.owner:
        return order.account == caller.identity
    key = caller.key
    return key is not None and caller.sole and key.name == order.owner and key.created <= order.submitted


def _check_rights(caller: Caller, asked: Request) -> None:
    """A job can do no more than whoever submits it; raises Forbidden."""
    if asked.model is not None:
        caller.check(Scope.READ, asked.model)
    if asked.publish is not None:
        caller.check(Scope.WRITE, names.check_model(asked.publish.model))
        if asked.publish.alias is not None:
            names.check_alias(asked.publish.alias)
            caller.check(Scope.PROMOTE, asked.publish.model)
    if asked.priority > 0 and not caller.may(Scope.ADMIN):
        raise Forbidden(f"priority: expected at most 0 without scope {Scope.ADMIN.value!r}, got {asked.priority}")


def _replayed(found: Job, fingerprint: str) -> Job:
    if found.order.fingerprint != fingerprint:
        raise Unprocessable(f"Idempotency-Key {found.order.key!r} was used before with another request")
    return found


def _cancelled(job: Job) -> Job:
    match job.state:
        case JobState.QUEUED:
            return job.end(JobState.CANCELLED, time.time())
        case JobState.RUNNING | JobState.PUBLISHING:
            return replace(job, cancelling=True)
        case JobState.CANCELLED:
            return job
    raise Conflict(f"job {job.id} has {job.state.value}: there is nothing to cancel")
