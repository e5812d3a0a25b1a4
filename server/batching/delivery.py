"""Answers the requests of executed batches, and records what the batches took."""

from __future__ import annotations

import logging
from time import monotonic, time

from lathe.server.batching.admission import DrainRate
from lathe.server.batching.cost_model import CostModel
from lathe.server.batching.entry import Entry
from lathe.server.batching.execution import BatchResult
from lathe.server.batching.inline_budget import InlineBudget
from lathe.server.errors import ServerError
from lathe.server.telemetry.logs import log_fields
from lathe.server.telemetry.statistics import Statistics

log = logging.getLogger("lathe.batching")


class Delivery:
    """Passes the outcomes of batches to their requests; statistics and cost models learn from the measurements."""

    __slots__ = ("_budget", "_counts_rows", "_drain", "cost", "stats")

    def __init__(
        self, stats: Statistics, cost: CostModel, budget: InlineBudget, drain: DrainRate, counts_rows: bool
    ) -> None:
        """`counts_rows`: the work of a batch is its number of rows; otherwise the sum of its requests' work."""
        self.stats = stats
        self.cost = cost
        self._budget = budget
        self._drain = drain
        self._counts_rows = counts_rows

    def answer(self, batch: list[Entry], ran: BatchResult) -> None:
        """Record a batch, and finish each request with its outcome."""
        work = None if self._counts_rows else sum([entry.work for entry in batch])
        self.record(ran, [entry.since for entry in batch], work, not batch[0].group.optional)
        for entry, outcome in zip(batch, ran.outcomes, strict=True):
            entry.ran = ran
            if isinstance(outcome, Exception):
                self._log_failure(entry, outcome)
            try:
                entry.finish(outcome)
            except Exception:
                log.exception("an answer could not be delivered")
        self._drain.add(len(batch), ran.scattered)

    def record(self, ran: BatchResult, since: list[float], work: int | None = None, is_usual: bool = True) -> None:
        """Count a batch whose requests were queued at these times (`since`, monotonic seconds).

        `work` defaults to the rows. The cost models learn only from usual batches without failures: an unusual one may
        contain a compilation.
        """
        stats = self.stats
        failed = 0
        for outcome in ran.outcomes:
            if isinstance(outcome, Exception):
                failed += 1
                stats.failures[_code(outcome)] += 1
        stats.last_inference_ms = int(time() * 1000)
        stats.ran(ran, [ran.started - came for came in since], failed)
        work = ran.rows if work is None else work
        stats.work += work
        if not failed and is_usual:
            seconds = monotonic() - ran.started  # until now: callers also wait for a busy event loop
            self.cost.add(ran.rows, seconds, work)
            self._budget.add(ran.rows, seconds, ran.busy)

    def _log_failure(self, entry: Entry, error: Exception) -> None:
        ref = self.stats.ref
        fields = log_fields(**ref.fields, request_id=entry.id, trace_id=entry.trace, code=_code(error))
        log.warning("%s: %s", ref, error, exc_info=error.__cause__, extra=fields)


def _code(error: Exception) -> str:
    return error.code if isinstance(error, ServerError) else "internal"
