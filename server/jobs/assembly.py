"""Builds the job service of one server process from its settings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.runtime.cpus import available_cpus
from server.jobs.dispatch import Allowance, Dispatcher
from server.jobs.folders import JobFolders
from server.jobs.follow import Followers
from server.jobs.kinds import KINDS, Kinds
from server.jobs.ports import Datasets, Parents, Publisher
from server.jobs.queue import Policy
from server.jobs.register import Register
from server.jobs.service import JobService, Quotas
from server.repository.fs import Fs
from server.repository.space import state_space
from server.settings import Settings

log = logging.getLogger(__name__)

_GRACE = 10.0  # seconds a job gets to write a checkpoint when it has to stop


@dataclass(frozen=True, slots=True)
class Ports:
    """The neighbours."""

    datasets: Datasets
    parents: Parents
    publisher: Publisher


@dataclass(frozen=True, slots=True)
class Jobs:
    """The objects that others need."""

    register: Register
    service: JobService
    dispatcher: Dispatcher
    followers: Followers
    patience: float  # seconds that running jobs get to stop with the server

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run jobs until left; then they write checkpoints and go back to the queue."""
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
            self.register.down = "no more jobs are started; the server's log says more"


def allowance_of(settings: Settings) -> Allowance:
    """Return what jobs may take of this server."""
    return Allowance(
        Policy(settings.job_slots, settings.job_device_slots),
        settings.job_threads or available_cpus(),
        settings.max_job_files,
        min(_GRACE, settings.drain_timeout),
        settings.job_idle,
    )


def build_jobs(
    settings: Settings,
    ports: Ports,
    draining: Callable[[], bool],
    kinds: Kinds | None = None,
    allowance: Allowance | None = None,
    fs: Fs | None = None,
) -> Jobs:
    """Wire the objects; ``kinds``, ``allowance`` and ``fs`` are for tests that put others in their place."""
    rows, allowance = kinds or Kinds(KINDS), allowance or allowance_of(settings)
    register = Register(JobFolders(settings.state_folder / "jobs", fs))
    space = state_space(settings)
    dispatcher = Dispatcher(register, rows, ports.datasets, ports.publisher, allowance, space, draining)
    quotas = Quotas(
        settings.max_job_seconds,
        settings.max_job_memory,
        settings.max_jobs,
        settings.max_jobs_files,
        settings.keep_jobs,
    )
    service = JobService(register, dispatcher, rows, ports.datasets, ports.parents, quotas, space)
    return Jobs(register, service, dispatcher, Followers(draining), allowance.grace)
