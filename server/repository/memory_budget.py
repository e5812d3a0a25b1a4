"""The memory budget of the server. Each model claims the most memory it can need before it is loaded.

A claim is an upper bound, not a measurement: the weights, the working memory of all batches that may run at once, the
queue and the response cache. The last three follow the configuration while the model is loaded. A change of the
configuration is never refused, even if it exceeds the limit; models that are loaded after it may be.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lathe.core.byte_sizes import format_bytes
from lathe.server.backends.base import MemoryNeeds
from lathe.server.errors import OutOfMemory
from lathe.server.repository.model_config import CONFIG, ModelConfig


class Owner(Protocol):
    """The model whose configuration applies."""

    @property
    def config(self) -> ModelConfig: ...


class MemoryBudget:
    """All claims against the limit; usable from any thread."""

    def __init__(self, limit: int | None = None, queue_bytes: int = 0, workers: int = 1) -> None:
        """`limit`: in bytes, None for no limit. `queue_bytes` and `workers` are the server's settings."""
        self.limit = limit
        self._queue_bytes = queue_bytes
        self._workers = workers
        self._claims: set[MemoryClaim] = set()
        self._lock = threading.Lock()

    @property
    def claimed_bytes(self) -> int:
        """The most bytes that the loaded models can need."""
        with self._lock:
            return sum(claim.nbytes for claim in self._claims)

    def claim(self, needs: MemoryNeeds, owner: Owner) -> MemoryClaim:
        """Claim memory for a model until the claim is released.

        Raises OutOfMemory beyond `limit` or the model's `max_memory_bytes`, and then claims nothing.
        """
        claim = MemoryClaim(self, needs, owner)
        most = owner.config.max_memory_bytes
        if most is not None and claim.nbytes > most:
            raise OutOfMemory(
                f"the model can need {claim}; its {CONFIG} allows {format_bytes(most)} (max_memory_bytes)"
            )
        with self._lock:
            others = sum(other.nbytes for other in self._claims)
            if self.limit is not None and others + claim.nbytes > self.limit:
                raise OutOfMemory(
                    f"the model can need {claim}; of the {format_bytes(self.limit)} for all models "
                    f"{format_bytes(others)} are claimed: unload or delete others, bound its queue, or give the "
                    "server a larger max_memory"
                )
            self._claims.add(claim)
        return claim

    def release(self, claim: MemoryClaim) -> None:
        """End a claim; idempotent."""
        with self._lock:
            self._claims.discard(claim)

    def shares(self, needs: MemoryNeeds, config: ModelConfig) -> dict[str, int]:
        """Return the bytes of a claim by purpose: weights, batches, queue, response cache."""
        return {
            "weights": needs.weights,
            "batches": needs.run * min(config.instances, self._workers),
            "queue": config.queue.max_queue_bytes or self._queue_bytes,
            "response cache": config.response_cache.max_bytes,
        }


class MemoryClaim:
    """The memory claimed by one model."""

    def __init__(self, budget: MemoryBudget, needs: MemoryNeeds, owner: Owner) -> None:
        self._budget = budget
        self._needs = needs
        self._owner = owner

    @property
    def nbytes(self) -> int:
        """The claimed bytes under the present configuration."""
        return sum(self._parts.values())

    def release(self) -> None:
        """End the claim: the model is no longer in memory."""
        self._budget.release(self)

    @property
    def _parts(self) -> dict[str, int]:
        return self._budget.shares(self._needs, self._owner.config)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self._parts.items() if nbytes)
        return f"{format_bytes(self.nbytes)} of memory ({parts})"


class MemoryMetrics(Collector):
    """Exports the budget as Prometheus metrics."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        claimed = self._budget.claimed_bytes
        yield GaugeMetricFamily("lathe_memory_claimed_bytes", "Memory that loaded models can come to need", claimed)
        if self._budget.limit is not None:
            yield GaugeMetricFamily("lathe_memory_limit_bytes", "Memory for all models", self._budget.limit)
