"""The worker threads that execute batches outside of the event loop's thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

from lathe.server.scheduling.tenants import Tenant, Tenants

log = logging.getLogger("lathe.workers")

Job = Callable[[], Iterator[Any]]  # runs on a worker and yields its results; must not raise
Result = Callable[[Any], None]
Ended = Callable[[], None]


class _Work(NamedTuple):
    loop: asyncio.AbstractEventLoop
    tenant: Tenant
    job: Job
    result: Result
    ended: Ended


class WorkerPool:
    """A fixed number of worker threads; each result is passed to the event loop by one callback."""

    def __init__(self, threads: int) -> None:
        self.busy = 0  # jobs submitted and not yet ended; used on the event loop only
        self.shared = False  # whether any model has a configured share of the workers' time
        self._models: dict[str, Tenant] = {}
        self._tenants = Tenants(threads)
        self._compete = False  # a copy of `Tenants.is_contended` for the workers
        self._jobs: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"lathe-worker-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def tenant(self, model: str) -> Tenant:
        """Return a model's tenant, one for all its versions; each version must call `let_go` when it is closed."""
        tenant = self._models.setdefault(model, Tenant(model))
        tenant.versions += 1
        return tenant

    def let_go(self, tenant: Tenant) -> None:
        """Count out one version of a tenant's model, which submits no further jobs; the last one removes the tenant."""
        tenant.versions -= 1
        if not tenant.versions:
            del self._models[tenant.name]
            self._update_shared()

    def promise(self, tenant: Tenant, share: float | None) -> None:
        """Set a model's share (0 to 1) of the workers' time under contention; None: an equal part of the remainder."""
        tenant.share = share
        self._update_shared()

    @property
    def wanted(self) -> bool:
        """Whether a job should end after its batch: other jobs wait for a worker, or models with shares compete."""
        return self._compete or not self._jobs.empty()

    def submit(self, job: Job, result: Result, ended: Ended, tenant: Tenant | None = None) -> None:
        """Run `job`, which yields results, on a worker thread, for a tenant (default: one of its own).

        On the running event loop, `result` is called with each result, and `ended` after the last one. `job` must not
        raise an exception.
        """
        self.busy += 1
        tenant = tenant or Tenant()
        self._tenants.enter(tenant, _Work(asyncio.get_running_loop(), tenant, job, result, ended))
        self._hand_out()

    def close(self, patience: float = 2.0) -> None:
        """Stop the threads after their submitted jobs; returns after `patience` seconds even if one does not end."""
        for _ in self._threads:
            self._jobs.put(None)
        end = monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def _update_shared(self) -> None:
        self.shared = any(tenant.share is not None for tenant in self._models.values())

    def _hand_out(self) -> None:
        self._compete = self._tenants.is_contended
        while (work := self._tenants.next()) is not None:
            self._jobs.put(work)

    def _work(self) -> None:
        while (work := self._jobs.get()) is not None:
            loop = work.loop
            try:
                began = monotonic()
                for value in work.job():
                    ended = monotonic()
                    loop.call_soon_threadsafe(self._on_result, work, value, ended - began)
                    del value  # a waiting thread must not keep the arrays of its last batch alive
                    began = ended
                loop.call_soon_threadsafe(self._on_end, work)
            except RuntimeError:  # the event loop closed meanwhile
                log.warning("a batch ended after the event loop had closed")
            del work, loop

    def _on_result(self, work: _Work, value: Any, seconds: float) -> None:
        self._tenants.charge(work.tenant, seconds)
        work.result(value)

    def _on_end(self, work: _Work) -> None:
        self.busy -= 1
        self._tenants.leave(work.tenant)
        work.ended()  # before `_hand_out`, since it may submit the model's next job, which then competes for the worker
        self._hand_out()
