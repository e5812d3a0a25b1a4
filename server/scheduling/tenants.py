"""Fair shares of the workers' time between models: a pure rule over the time each model has used, without a clock.

Start-time fair queueing, as between the clients of one queue, with worker seconds over the model's weight as cost; a
batch is charged after it has run. The model with the least virtual time is next. With several workers that is not
enough, since each model would find a free worker. So a model that is ahead of the last one by more than its latest
batch waits, even if a worker is idle. The model that is furthest behind never waits, and a single model gets all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lathe.server.scheduling.fair_share import FairShares

MAX_CHARGE = (
    5.0  # seconds charged for one batch at most: a longer one has probably waited for the compilation of its code
)
MIN_REMAINDER = 0.01  # least share of the time for models without a configured share, together


@dataclass(eq=False, slots=True)
class Tenant:
    """One model, with all its versions, as a user of the workers."""

    name: str = ""
    share: float | None = None  # of the time while models compete; None: an equal part of the remainder
    versions: int = 0  # in memory
    waiting: deque[Any] = field(default_factory=deque)  # its jobs that workers may not take yet
    running: int = 0  # its jobs that run or that workers may take
    latest: float = 0.0  # the cost of its latest batch, in seconds over its weight

    @property
    def wants(self) -> bool:
        """Whether it has waiting or running jobs."""
        return bool(self.waiting or self.running)


class Tenants:
    """The tenants with jobs, and the choice of the next job. `workers` is the number of worker threads."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._running = 0
        self._turns = FairShares()
        self._active: dict[Tenant, None] = {}  # in the order of arrival

    @property
    def is_contended(self) -> bool:
        """Whether several tenants have jobs, and at least one of them has a configured share."""
        return len(self._active) > 1 and any(tenant.share is not None for tenant in self._active)

    @property
    def waiting(self) -> bool:
        """Whether any job waits that no worker may take yet."""
        return any(tenant.waiting for tenant in self._active)

    def enter(self, tenant: Tenant, job: Any) -> None:
        """Add a waiting job of a tenant."""
        if not tenant.wants:
            self._turns.enter(tenant.name)
            self._active[tenant] = None
        tenant.waiting.append(job)

    def charge(self, tenant: Tenant, seconds: float) -> None:
        """Charge a batch that ran for this time to a tenant: at most `MAX_CHARGE` seconds, over the tenant's weight."""
        tenant.latest = min(seconds, MAX_CHARGE) / self._weight(tenant)
        self._turns.charge(tenant.name, tenant.latest)
        self._turns.begin(min(self._active, key=self._turn).name)

    def leave(self, tenant: Tenant) -> None:
        """Remove a job that has ended."""
        tenant.running -= 1
        self._running -= 1
        if not tenant.wants:
            del self._active[tenant]

    def next(self) -> Any | None:
        """Return the next job for a worker, which counts as running from now on; None if no job may run now."""
        compete = self.is_contended
        if compete and self._running >= self._workers:
            return None  # the next tenant is chosen when a worker is free
        waiting = [tenant for tenant in self._active if tenant.waiting]
        if compete:
            waiting = [tenant for tenant in waiting if self._may_run(tenant)]
        if not waiting:
            return None
        tenant = min(waiting, key=self._turn)
        tenant.running += 1
        self._running += 1
        return tenant.waiting.popleft()

    def _turn(self, tenant: Tenant) -> float:
        return self._turns.turn(tenant.name)

    def _may_run(self, tenant: Tenant) -> bool:
        return self._turn(tenant) <= min(map(self._turn, self._active)) + tenant.latest

    def _weight(self, tenant: Tenant) -> float:
        if tenant.share is not None:
            return tenant.share
        shares = [active.share for active in self._active if active.share is not None]
        return max(MIN_REMAINDER, 1.0 - sum(shares)) / (len(self._active) - len(shares))
