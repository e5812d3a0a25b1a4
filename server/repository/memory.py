"""What models may take of the server's memory. Each claims what it can come to need before it is loaded.

A claim is a bound, not a measurement: weights, what all batches that may run at once compute in, and what may wait in
the queue and stay in the response cache. The last three follow the configuration while the model is in memory; a change
there is the owner's will, and is never refused, but what is loaded after it finds less room.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.amounts import amount
from server.backends.base import Needs
from server.errors import OutOfMemory
from server.repository.modelconfig import CONFIG, ModelConfig


class Owner(Protocol):
    """Whose configuration a model follows."""

    @property
    def config(self) -> ModelConfig: ...


class MemoryBudget:
    """All claims together, against what there is; usable from any thread."""

    def __init__(self, limit: int | None = None, queue_bytes: int = 0, workers: int = 1) -> None:
        """``limit``: bytes, or None for no bound; the others are the server's settings."""
        self.limit = limit
        self._queue_bytes = queue_bytes
        self._workers = workers
        self._claims: set[Claim] = set()
        self._lock = threading.Lock()

    @property
    def claimed(self) -> int:
        """Bytes that models in memory can come to need."""
        with self._lock:
            return sum(claim.nbytes for claim in self._claims)

    def claim(self, needs: Needs, owner: Owner) -> Claim:
        """Set memory aside for a model until the claim is released; raises OutOfMemory, and then claims nothing."""
        claim = Claim(self, needs, owner)
        most = owner.config.max_memory_bytes
        if most is not None and claim.nbytes > most:
            raise OutOfMemory(f"the model can take {claim}; its {CONFIG} allows {amount(most)} (max_memory_bytes)")
        with self._lock:
            others = sum(other.nbytes for other in self._claims)
            if self.limit is not None and others + claim.nbytes > self.limit:
                raise OutOfMemory(
                    f"the model can take {claim}; of the {amount(self.limit)} for all models {amount(others)} are "
                    "claimed: unload or delete others, bound its queue, or give the server a larger max_memory"
                )
            self._claims.add(claim)
        return claim

    def release(self, claim: Claim) -> None:
        """Harmless when repeated."""
        with self._lock:
            self._claims.discard(claim)

    def shares(self, needs: Needs, config: ModelConfig) -> dict[str, int]:
        """Return the parts of a claim, in bytes."""
        return {
            "weights": needs.weights,
            "batches": needs.run * min(config.instances, self._workers),
            "queue": config.queue.max_queue_bytes or self._queue_bytes,
            "response cache": config.response_cache.max_bytes,
        }


class Claim:
    """What one model has been promised."""

    def __init__(self, budget: MemoryBudget, needs: Needs, owner: Owner) -> None:
        self._budget = budget
        self._needs = needs
        self._owner = owner

    @property
    def nbytes(self) -> int:
        """As its configuration is now."""
        return sum(self._shares.values())

    def release(self) -> None:
        """The model is gone."""
        self._budget.release(self)

    @property
    def _shares(self) -> dict[str, int]:
        return self._budget.shares(self._needs, self._owner.config)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {amount(nbytes)}" for name, nbytes in self._shares.items() if nbytes)
        return f"{amount(self.nbytes)} of memory ({parts})"


class MemoryMetrics(Collector):
    """The budget in the metrics."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        claimed = self._budget.claimed
        yield GaugeMetricFamily("lathe_memory_claimed_bytes", "Memory that loaded models can come to need", claimed)
        if self._budget.limit is not None:
            yield GaugeMetricFamily("lathe_memory_limit_bytes", "Memory for all models", self._budget.limit)
