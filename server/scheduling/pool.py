"""The threads that execute batches, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

from server.scheduling.tenants import Tenant, Tenants

log = logging.getLogger("lathe.workers")

Job = Callable[[], Iterator[Any]]  # its results; runs on a worker, must not raise
Result = Callable[[Any], None]
Ended = Callable[[], None]


class _Work(NamedTuple):
    loop: asyncio.AbstractEventLoop
    tenant: Tenant
    job: Job
    result: Result
    ended: Ended


class WorkerPool:
    """A fixed number of threads; each result comes back to the event loop in one call."""

    def __init__(self, threads: int) -> None:
        self.busy = 0  # jobs handed over and not yet ended; kept on the event loop
        self.shared = False  # whether any model was promised a share of the workers' time
        self._models: dict[str, Tenant] = {}
        self._tenants = Tenants(threads)
        self._compete = False  # what the tenants do, for the workers to read
        self._jobs: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"lathe-worker-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def tenant(self, model: str) -> Tenant:
        """Return what stands for a model, the same for all its versions; each of them lets it go in the end."""
        tenant = self._models.setdefault(model, Tenant(model))
        tenant.versions += 1
        return tenant

    def let_go(self, tenant: Tenant) -> None:
        """One version of a model will submit no more."""
        tenant.versions -= 1
        if not tenant.versions:
            del self._models[tenant.name]
            self._look_for_shares()

    def promise(self, tenant: Tenant, share: float | None) -> None:
        """Give a model this share of the workers' time while others want it, too; None: a part of what is left."""
        tenant.share = share
        self._look_for_shares()

    @property
    def wanted(self) -> bool:
        """Whether a job had better end after its batch: others wait for a worker, or have to have their share."""
        return self._compete or not self._jobs.empty()

    def submit(self, job: Job, result: Result, ended: Ended, tenant: Tenant | None = None) -> None:
        """Run ``job`` on a worker; on the running loop ``result`` takes each result, then ``ended`` is called."""
        self.busy += 1
        tenant = tenant or Tenant()
        self._tenants.enter(tenant, _Work(asyncio.get_running_loop(), tenant, job, result, ended))
        self._hand_out()

    def close(self, patience: float = 2.0) -> None:
        """Let the threads end after what they were given; an execution without an end is left behind in time."""
        for _ in self._threads:
            self._jobs.put(None)
        end = monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def _look_for_shares(self) -> None:
        self.shared = any(tenant.share is not None for tenant in self._models.values())

    def _hand_out(self) -> None:
        self._compete = self._tenants.compete
        while (work := self._tenants.next()) is not None:
            self._jobs.put(work)

    def _work(self) -> None:
        while (work := self._jobs.get()) is not None:
            loop = work.loop
            try:
                began = monotonic()
                for value in work.job():
                    ended = monotonic()
                    loop.call_soon_threadsafe(self._back, work, value, ended - began)
                    del value  # nothing of a batch outlives it while this thread waits
                    began = ended
                loop.call_soon_threadsafe(self._end, work)
            except RuntimeError:  # the loop closed meanwhile
                log.warning("a batch ended after the event loop had closed")
            del work, loop

    def _back(self, work: _Work, value: Any, seconds: float) -> None:
        self._tenants.charge(work.tenant, seconds)
        work.result(value)

    def _end(self, work: _Work) -> None:
        self.busy -= 1
        self._tenants.leave(work.tenant)
        work.ended()  # which may submit the next job, before others take the worker for good
        self._hand_out()
