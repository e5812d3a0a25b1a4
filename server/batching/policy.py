"""How one model's requests become batches, where its owner has a say. The defaults need none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, takewhile


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Overrides of what is otherwise derived; names and meaning as in Triton's ``dynamic_batching``.

    Priorities count from 1, the most urgent, to ``priority_levels``; 0 levels: all requests are equal. A request that
    has waited for ``starvation`` seconds goes before all others, so that none waits for ever.
    """

    max_rows: int | None = None  # of a batch; None: what the model was compiled for
    preferred: tuple[int, ...] = ()  # sizes to wait for
    max_delay: float = 0.0  # seconds a request may wait for others to join it although nothing runs
    latency_target: float | None = None  # seconds from arrival to answer that batches are sized for
    priority_levels: int = 0
    default_priority: int = 0
    starvation: float = 1.0
    instances: int = 1  # batches that may run at once
    delay_target: float | None = None  # seconds to wait at most in a queue that does not empty; None: for any time
    compute_share: float | None = None  # of the workers' time while others want it; None: part of what is left
    delay_interval: float = 0.1  # seconds after which a queue that has not been empty is one that does not empty

    @property
    def takes_all(self) -> bool:
        """Whether it does not matter what a request is like and how long it will wait. Then levels are all 0."""
        return (
            self.latency_target is None
            and self.delay_target is None
            and not self.default_priority + self.priority_levels
        )

    @property
    def waits(self) -> bool:
        """Whether an idle model may hold requests back."""
        return self.max_delay > 0.0

    def level(self, asked: int) -> int:
        """Return the level of a request that asks for this priority; 0, or what there is none of, is the default."""
        return asked if 1 <= asked <= self.priority_levels else self.default_priority

    def is_enough(self, rows: int, limit: int) -> bool:
        """Whether so many waiting rows need not wait for more; ``limit`` is what fits into one batch."""
        return rows >= min(*self.preferred, limit) if self.preferred else rows >= limit

    def most(self, waiting: Iterable[int], limit: int) -> int:
        """Return how many rows the next batch may have, of requests that wait with so many rows each, in their order.

        It is the largest preferred size that the first of them make up; where they make up none, all that fit.
        """
        sizes = takewhile(lambda rows: rows <= limit, accumulate(waiting))
        return max((rows for rows in sizes if rows in self.preferred), default=limit)
