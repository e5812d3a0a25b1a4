"""How models divide the workers' time while several want it: a pure rule over what each was given, without a clock.

Start-time fair queueing, as between the clients of one queue, but in a worker's seconds over the model's weight; what a
batch costs is charged once it has run. Whoever is least far along is next. On several workers that alone is not
enough, as one is free for everybody: so a model that is further along than another by more than a batch of its own
waits, even while a worker rests. Who is furthest behind never does, and who is alone has all there is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from server.batching.shares import Shares

MOST = 5.0  # seconds charged for one batch: what takes longer has waited, most likely for its code to be compiled
LEFT = 0.01  # of the time for those who were promised nothing, however much is promised to others


@dataclass(eq=False, slots=True)
class Tenant:
    """One model, all its versions together, among those that the workers run for."""

    name: str = ""
    share: float | None = None  # of the time while others want it, too; None: an equal part of what is left
    versions: int = 0  # that are in memory
    waiting: deque[Any] = field(default_factory=deque)  # its jobs that no worker may take yet
    running: int = 0  # its jobs that workers have, or may take
    latest: float = 0.0  # what its latest batch cost, in seconds over its weight

    @property
    def wants(self) -> bool:
        """Whether it has anything to run."""
        return bool(self.waiting or self.running)


class Tenants:
    """Those who want the workers now. ``workers``: how many there are."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._running = 0
        self._turns = Shares()
        self._active: dict[Tenant, None] = {}  # in the order they came

    @property
    def compete(self) -> bool:
        """Whether several want the workers, and one of them was promised a share."""
        return len(self._active) > 1 and any(tenant.share is not None for tenant in self._active)

    @property
    def waiting(self) -> bool:
        """Whether somebody waits who may not run yet."""
        return any(tenant.waiting for tenant in self._active)

    def enter(self, tenant: Tenant, job: Any) -> None:
        """Note a job that wants a worker."""
        if not tenant.wants:
            self._turns.enter(tenant.name)
            self._active[tenant] = None
        tenant.waiting.append(job)

    def charge(self, tenant: Tenant, seconds: float) -> None:
        """Note what a batch took."""
        tenant.latest = min(seconds, MOST) / self._weight(tenant)
        self._turns.charge(tenant.name, tenant.latest)
        self._turns.begin(min(self._active, key=self._turn).name)

    def leave(self, tenant: Tenant) -> None:
        """Note that a job has ended."""
        tenant.running -= 1
        self._running -= 1
        if not tenant.wants:
            del self._active[tenant]

    def next(self) -> Any | None:
        """Return a job that a worker shall take now; None: none."""
        compete = self.compete
        if compete and self._running >= self._workers:
            return None  # who is next is decided when there is a worker
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
        promised = [one.share for one in self._active if one.share is not None]
        return max(LEFT, 1.0 - sum(promised)) / (len(self._active) - len(promised))
