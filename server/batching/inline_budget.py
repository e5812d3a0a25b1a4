"""Decides which batches are short enough to run on the event loop's thread."""

from __future__ import annotations

from lathe.server.backends.base import LoadedModel, PlacedModel, as_endless
from lathe.server.batching.cost_model import CostModel
from lathe.server.scheduling.pool import WorkerPool


class InlineBudget:
    """The time limit of a batch on the event loop's thread, and a cost model of one model's batches on that thread.

    It has a cost model of its own, because the times of a worker contain waits for the interpreter lock: small models
    would seem large and stay on the workers.
    """

    __slots__ = ("_cost", "_is_host_only", "_pool", "_seconds")

    def __init__(self, model: LoadedModel, pool: WorkerPool, seconds: float) -> None:
        """`seconds`: the limit for a model whose runs always end and never need a compilation; it is 0 for others."""
        self._seconds = seconds if has_known_shapes(model) and as_endless(model) is None else 0.0
        self._pool = pool
        self._cost = CostModel()
        self._is_host_only = isinstance(model, PlacedModel) and not model.devices

    def allows(self, rows: int) -> bool:
        """Whether a batch of `rows` may run on the event loop's thread.

        Enough measurements must predict that the batch takes at most the limit. No worker may be busy (a worker's run
        could hold the compute thread pool), and no model may have a configured share of the workers' time.
        """
        pool = self._pool
        if not self._seconds or pool.busy or pool.shared:
            return False
        return self._cost.is_expected_within(rows, self._seconds)

    def add(self, rows: int, seconds: float, busy: float) -> None:
        """Learn from one execution; `busy`: the CPU seconds of its thread, which bound the time of a CPU-only model."""
        if self._seconds:
            self._cost.add(rows, min(seconds, busy) if self._is_host_only else seconds)


def has_known_shapes(model: LoadedModel) -> bool:
    """Whether no extent is dynamic but the rows of a batchable model; otherwise a new shape may need a compilation."""
    return all(-1 not in spec.shape[1 if model.batchable else 0 :] for spec in model.inputs)
