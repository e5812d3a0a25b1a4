"""The jobs API: submit, read, cancel and delete jobs, with authorization and quotas."""

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

from lathe.core.byte_sizes import format_bytes
from lathe.server.access.authority import Caller
from lathe.server.access.scopes import Scope
from lathe.server.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    NotFound,
    QuotaExceeded,
    StorageFull,
    TooLarge,
    Unprocessable,
)
from lathe.server.jobs.dispatcher import Dispatcher
from lathe.server.jobs.folders import EVENTS, PARENT, RECIPE
from lathe.server.jobs.gate import Gate, check_metrics
from lathe.server.jobs.input_check import InputCheck
from lathe.server.jobs.interfaces import Datasets, Parents
from lathe.server.jobs.job import DatasetPin, Job, JobLimits, JobState, ModelPin, Order, PublishRequest, new_id
from lathe.server.jobs.kinds import Kinds
from lathe.server.jobs.register import Register
from lathe.server.jobs.retention import expired_jobs
from lathe.server.repository import names
from lathe.server.repository.disk_space import DiskSpace
from lathe.server.repository.manifest import MODEL_FILE
from lathe.server.repository.store import storage_errors


@dataclass(frozen=True, slots=True)
class Quotas:
    """The quotas of callers and of all jobs."""

    seconds: float  # running time of one job
    memory: int  # bytes of one job
    per_owner: int  # unfinished jobs of one owner
    storage: int  # bytes of all jobs' files, above which no job is accepted
    kept: int  # ended jobs that retention keeps
    recipe: int = 256 << 10  # bytes of JSON


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A submission, whose names are not resolved yet."""

    kind: str
    recipe: Mapping[str, Any]
    dataset: str
    model: str | None = None
    version: str = "live"  # of the model: a number or an alias
    publish: PublishRequest | None = None
    priority: int = 0
    seconds: float | None = None
    memory: int | None = None

    def fingerprint(self) -> str:
        """Return a hash of the request; equal hashes are the same request (idempotency)."""
        return hashlib.sha256(orjson.dumps(self, option=orjson.OPT_SORT_KEYS)).hexdigest()


class JobService:
    """The operations of the API.

    While the register is down all of them raise Unavailable, except `run_time`, `file` and `events`.
    """

    def __init__(
        self,
        register: Register,
        dispatcher: Dispatcher,
        kinds: Kinds,
        datasets: Datasets,
        parents: Parents,
        quotas: Quotas,
        check: InputCheck,
        space: DiskSpace | None = None,
    ) -> None:
        self.register = register
        self._dispatcher = dispatcher
        self._kinds = kinds
        self._datasets = datasets
        self._parents = parents
        self._quotas = quotas
        self._input_check = check
        self._space = space

    # reading

    def list(self, caller: Caller, state: JobState | None = None) -> list[Job]:
        """Return the jobs that a caller may see, newest first."""
        jobs = reversed(self.register.all())
        return [job for job in jobs if _may_see(caller, job) and (state is None or job.state is state)]

    def get(self, caller: Caller, job_id: str) -> Job:
        """Return a job; raises NotFound, also if the caller may not see it."""
        job = self.register.get(job_id)
        if not _may_see(caller, job):
            raise NotFound(f"there is no job {job_id[:40]!r}")
        return job

    def run_time(self, job: Job) -> float:
        """Return the running time of a job so far in seconds: of the attempts that have ended, and of the present."""
        return job.ran + self._dispatcher.running_seconds(job.id)

    def file(self, job: Job, *names: str) -> Path:
        """Return the path of a file of a job, which need not exist."""
        return self.register.folders.path(job.id).joinpath(*names)

    def events(self, job: Job) -> Path:
        """Return the path of a job's events file."""
        return self.file(job, EVENTS)

    async def datasets_needed(self) -> frozenset[str]:
        """Return the digests of the datasets that unfinished jobs need."""
        return frozenset(job.order.dataset.digest for job in self.register.all() if not job.state.is_final)

    # changes

    async def submit(self, caller: Caller, request: JobRequest, key: str | None = None) -> tuple[Job, bool]:
        """Queue a job, durable on return; returns it, and whether it was submitted before under the same key.

        Also removes the oldest ended jobs, as `tidy` does. Raises TooLarge or Unprocessable for the recipe,
        Unprocessable for a version without an ONNX model, also one that the gate compares with, or if the key was used
        for another request, BadRequest, Forbidden, NotFound, QuotaExceeded, StorageFull; also Unprocessable, Overloaded
        and others of `InputCheck.run` for a kind that checks its inputs.
        """
        self.register.check()
        fingerprint = request.fingerprint()
        if key is not None and (found := self.register.find_key(partial(_owns, caller), key)) is not None:
            return _check_fingerprint(found, fingerprint), True
        self._check(caller, request)
        await self._check_storage()
        async with self._datasets.hold(request.dataset) as data:
            pin, name = await self._pin(request), await self._datasets.name_of(request.dataset)
            await self._check_comparison(request.publish)
            await self._check_inputs(request, pin, data.path)
            order = self._order(caller, request, DatasetPin(name, data.digest), pin)
            order = replace(order, key=key, fingerprint=fingerprint)
            job = Job(order, queued=order.submitted)
            stored = await self.register.add(
                job, (lambda folder: self._link(pin, folder)) if pin else None, lambda: self._check_unfinished(caller)
            )
        self._dispatcher.wake()
        return _check_fingerprint(stored, fingerprint), stored.id != job.id

    async def cancel(self, caller: Caller, job_id: str) -> Job:
        """Cancel a job: a queued one at once, a running one after its process has stopped.

        A job whose result is being published may still succeed; a cancelled one is returned unchanged. Raises NotFound,
        or Conflict if the job has succeeded or failed.
        """
        self.get(caller, job_id)
        job = await self.register.change(job_id, _cancel)
        self._dispatcher.stop_process(job_id)
        return job

    async def delete(self, caller: Caller, job_id: str) -> Job:
        """Remove an ended job with all its files; raises NotFound, or Conflict if it has not ended."""
        job = self.get(caller, job_id)
        if not job.state.is_final:
            raise Conflict(f"job {job_id} is {job.state.value}: cancel it first")
        await self.register.remove(job_id)
        return job

    async def tidy(self) -> None:
        """Remove the oldest ended jobs beyond the number that retention keeps."""
        for job in expired_jobs(self.register.all(), self._quotas.kept):
            await self.register.remove(job.id)

    # details

    def _check(self, caller: Caller, request: JobRequest) -> None:
        """Check the recipe, the other fields, the caller's rights and the number of its unfinished jobs.

        Raises TooLarge, Unprocessable, BadRequest, Forbidden or QuotaExceeded.
        """
        quotas, kind = self._quotas, self._kinds.get(request.kind)
        if len(orjson.dumps(request.recipe)) > quotas.recipe:
            raise TooLarge(f"recipe: expected at most {quotas.recipe} bytes of JSON")
        try:
            kind.check(request.recipe)
        except ValueError as error:
            raise Unprocessable(f"recipe: {error}") from error
        reads_model = kind.reads_model(request.recipe)
        if reads_model != (request.model is not None):
            role = "to start from" if kind.needs_model else "as teacher"
            expectation = f"expected a version {role}" if reads_model else "not expected"
            raise BadRequest(f"model: {expectation} for a job of kind {request.kind}")
        if request.publish is not None and not kind.can_publish:
            raise BadRequest(f"publish: not expected for a job of kind {request.kind}, which makes no model")
        _check_rights(caller, request)
        self._check_unfinished(caller)

    def _check_unfinished(self, caller: Caller) -> None:
        unfinished = sum(_owns(caller, job) for job in self.register.all() if not job.state.is_final)
        if unfinished >= self._quotas.per_owner:
            raise QuotaExceeded(f"{unfinished} of your jobs have not ended yet, which is the limit", retry_after=60.0)

    async def _check_comparison(self, publish: PublishRequest | None) -> None:
        """Raises Unprocessable if the gate compares with a version that no job can read, such as a pipeline.

        A model or an alias that does not exist yet is no fault: the condition then holds.
        """
        if publish is None or Gate.model_validate(publish.gate or {}).not_worse_than_live is None:
            return
        try:
            await self._parents.pin(publish.model, publish.alias or names.LIVE_ALIAS)
        except NotFound:
            return
        except Unprocessable as error:
            raise Unprocessable(f"publish.gate.not_worse_than_live: {error.message}") from error

    async def _check_inputs(self, request: JobRequest, pin: ModelPin | None, dataset: Path) -> None:
        """Check the inputs of a kind that has a check for them, and that its gate names metrics that are measured."""
        module = self._kinds.get(request.kind).input_check
        if module is None or pin is None:
            return
        folders = self.register.folders
        scratch = await asyncio.to_thread(folders.make_scratch)
        try:
            with storage_errors("checking the job"):
                await asyncio.to_thread((scratch / RECIPE).write_bytes, orjson.dumps(dict(request.recipe)))
                await asyncio.to_thread(self._link, pin, scratch)
            files = (scratch / RECIPE, dataset, scratch / PARENT / MODEL_FILE)
            measured = await self._input_check.run(module, *map(Path.absolute, files))
        finally:
            await asyncio.shield(asyncio.to_thread(folders.remove_scratch, scratch))
        if request.publish is not None and request.publish.gate is not None:
            try:
                check_metrics(Gate.model_validate(request.publish.gate), measured.of_result, measured.of_version)
            except ValueError as error:
                raise Unprocessable(f"publish.gate.{error}") from error

    async def _check_storage(self) -> None:
        await self.tidy()
        if self._space is not None:
            await asyncio.to_thread(self._space.check)
        size = await asyncio.to_thread(self.register.folders.size)
        if size > self._quotas.storage:
            raise StorageFull(
                f"the files of all jobs use {format_bytes(size)}, expected at most "
                f"{format_bytes(self._quotas.storage)}: delete some"
            )

    async def _pin(self, request: JobRequest) -> ModelPin | None:
        return await self._parents.pin(request.model, request.version) if request.model is not None else None

    def _link(self, pin: ModelPin, folder: Path) -> None:
        self._parents.link(pin, folder / PARENT)

    def _order(self, caller: Caller, request: JobRequest, data: DatasetPin, model: ModelPin | None) -> Order:
        quotas, now = self._quotas, time.time()
        seconds, memory = request.seconds or quotas.seconds, request.memory or quotas.memory
        return Order(
            id=new_id(now),
            owner=caller.name,
            owner_id=caller.identity,
            kind=request.kind,
            recipe=request.recipe,
            dataset=data,
            model=model,
            publish=request.publish,
            priority=request.priority,
            limits=JobLimits(min(seconds, quotas.seconds), min(memory, quotas.memory)),
            submitted=now,
        )


def _may_see(caller: Caller, job: Job) -> bool:
    """Whether a caller submitted the job or is an administrator."""
    return _owns(caller, job) or caller.is_allowed(Scope.ADMIN)


def _owns(caller: Caller, job: Job) -> bool:
    """Whether a caller submitted a job; jobs submitted without a key belong to all callers without one.

    Jobs of releases without identities have only a name. Their owner is the key of that name, if it is the only one of
    that name and older than the job.
    """
    order = job.order
    if order.owner_id or not order.owner:
        return order.account == caller.identity
    key = caller.key
    return key is not None and caller.sole and key.name == order.owner and key.created <= order.submitted


def _check_rights(caller: Caller, request: JobRequest) -> None:
    """Raises Forbidden if the job would do what the caller may not: read or write models, promote, or take priority.

    Raises BadRequest for an invalid name of a model or alias.
    """
    if request.model is not None:
        caller.check(Scope.READ, request.model)
    if request.publish is not None:
        caller.check(Scope.WRITE, names.check_model(request.publish.model))
        if request.publish.alias is not None:
            names.check_alias(request.publish.alias)
            caller.check(Scope.PROMOTE, request.publish.model)
    if request.priority > 0 and not caller.is_allowed(Scope.ADMIN):
        raise Forbidden(f"priority: expected at most 0 without scope {Scope.ADMIN.value!r}, got {request.priority}")


def _check_fingerprint(found: Job, fingerprint: str) -> Job:
    if found.order.fingerprint != fingerprint:
        raise Unprocessable(f"Idempotency-Key {found.order.key!r} was used before with another request")
    return found


def _cancel(job: Job) -> Job:
    match job.state:
        case JobState.QUEUED:
            return job.end(JobState.CANCELLED, time.time())
        case JobState.RUNNING | JobState.PUBLISHING:
            return replace(job, cancelling=True)
        case JobState.CANCELLED:
            return job
    raise Conflict(f"job {job.id} has {job.state.value}: there is nothing to cancel")
