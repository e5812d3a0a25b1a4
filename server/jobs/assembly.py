"""Builds the job service of one server process from its settings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lathe.core.runtime.host.cpus import available_cpus
from lathe.server.jobs.dispatcher import Dispatcher, JobResources
from lathe.server.jobs.event_stream import EventStreams
from lathe.server.jobs.folders import JobFolders
from lathe.server.jobs.input_check import InputCheck
from lathe.server.jobs.interfaces import Datasets, Parents, Publisher
from lathe.server.jobs.kinds import KINDS, Kinds
from lathe.server.jobs.register import Register
from lathe.server.jobs.scheduler import Policy
from lathe.server.jobs.service import JobService, Quotas
from lathe.server.processes.stage_children import Children, Limits
from lathe.server.repository.disk_space import state_space
from lathe.server.repository.fs import Fs
from lathe.server.settings import Settings

log = logging.getLogger(__name__)

_GRACE = 10.0  # seconds for writing a checkpoint when a job has to stop


@dataclass(frozen=True, slots=True)
class Interfaces:
    """The interfaces that jobs need from the server's other parts."""

    datasets: Datasets
    parents: Parents
    publisher: Publisher


@dataclass(frozen=True, slots=True)
class Jobs:
    """The objects of the job service that the server's other parts use."""

    register: Register
    service: JobService
    dispatcher: Dispatcher
    followers: EventStreams
    patience: float  # seconds that running jobs get to stop with the server

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A context manager inside which jobs run; at its end they write checkpoints and return to the queue."""
        await self.register.open(time.time())
        dispatching = asyncio.create_task(self._dispatch())
        try:
            yield
        finally:
            await self.dispatcher.stop(self.patience)
            await dispatching
            await self.register.close()

    async def _dispatch(self) -> None:
        try:
            await self.dispatcher.run()
        except Exception:
            log.exception("no more jobs are started")
            self.register.down_reason = "no more jobs are started; see the server's log"


def job_resources(settings: Settings) -> JobResources:
    """Return the resources that the settings allow for jobs."""
    return JobResources(
        Policy(settings.job_slots, settings.job_device_slots),
        settings.job_threads or available_cpus(),
        settings.max_job_files,
        min(_GRACE, settings.drain_timeout),
        settings.job_idle,
    )


def build_jobs(
    settings: Settings,
    ports: Interfaces,
    draining: Callable[[], bool],
    kinds: Kinds | None = None,
    allowance: JobResources | None = None,
    fs: Fs | None = None,
) -> Jobs:
    """Build the job service's objects; `draining` says whether the server is about to stop.

    Tests pass their own `kinds`, `allowance` (the resources that jobs may use) and `fs`.
    """
    table, allowance = kinds or Kinds(KINDS), allowance or job_resources(settings)
    register = Register(JobFolders(settings.state_folder / "jobs", fs))
    space = state_space(settings)
    dispatcher = Dispatcher(register, table, ports.datasets, ports.publisher, allowance, space, draining)
    quotas = Quotas(
        settings.max_job_seconds,
        settings.max_job_memory,
        settings.max_jobs,
        settings.max_jobs_files,
        settings.keep_jobs,
    )
    limits = Limits(settings.child_timeout, settings.child_memory, settings.child_processes)
    check = InputCheck(lambda module: Children(limits, (module,), "job"))
    service = JobService(register, dispatcher, table, ports.datasets, ports.parents, quotas, check, space)
    return Jobs(register, service, dispatcher, EventStreams(draining), allowance.grace)
