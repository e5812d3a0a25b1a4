"""The batching settings of one model. The defaults need no tuning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, takewhile


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How one model's requests are batched; names and meanings follow Triton's `dynamic_batching`.

    Priorities count from 1, the most urgent, to `priority_levels`; 0 levels: all requests are equal. A request that
    has waited for `starvation` seconds counts as most urgent, so that no request waits for ever.
    """

    max_rows: int | None = None  # the most rows of a batch; None: what the model was compiled for
    preferred: tuple[int, ...] = ()  # preferred batch sizes, in rows
    max_delay: float = 0.0  # seconds that an idle model may hold a request back to collect further ones
    latency_target: float | None = None  # seconds from arrival to answer that batches are sized for; None: none
    priority_levels: int = 0
    default_priority: int = 0
    starvation: float = 1.0
    instances: int = 1  # batches that may run at once
    delay_target: float | None = None  # seconds a request may wait in a standing queue; None: no load shedding
    compute_share: float | None = None  # of the workers' time under contention; None: an equal part of the rest
    delay_interval: float = 0.1  # seconds without being empty after which a queue counts as standing

    @property
    def needs_no_checks(self) -> bool:
        """Whether requests need no check of their expected wait, of load shedding or of their priority level."""
        return (
            self.latency_target is None
            and self.delay_target is None
            and not self.default_priority + self.priority_levels
        )

    @property
    def has_delay(self) -> bool:
        """Whether an idle model may hold requests back to collect further ones."""
        return self.max_delay > 0.0

    def level(self, asked: int) -> int:
        """The level of a request that asks for this priority; the default level if `asked` is 0 or no level."""
        return asked if 1 <= asked <= self.priority_levels else self.default_priority

    def is_large_enough(self, rows: int, limit: int) -> bool:
        """Whether `rows` waiting rows reach the smallest preferred size or `limit`, the most rows of one batch."""
        return rows >= min(*self.preferred, limit) if self.preferred else rows >= limit

    def most(self, waiting: Iterable[int], limit: int) -> int:
        """The most rows of the next batch. `waiting`: the rows of each waiting request, in their order.

        The result is the largest preferred size that a prefix of the requests fills exactly; `limit` if none does.
        """
        sizes = takewhile(lambda rows: rows <= limit, accumulate(waiting))
        return max((rows for rows in sizes if rows in self.preferred), default=limit)
