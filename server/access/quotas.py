"""How much each client may ask for: a token bucket per client, kept as one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.errors import QuotaExceeded

_MANY = 4096  # clients remembered before those with nothing used are forgotten


@dataclass(frozen=True, slots=True)
class Quota:
    """``rate`` rows per second for each client, and up to ``burst`` at once."""

    rate: float
    burst: float

    @classmethod
    def of(cls, rate: float, burst: float | None) -> Quota:
        """Return this quota; without a burst that of one second, one row at least."""
        return cls(rate, burst or max(1.0, rate))


class Quotas:
    """The buckets of all clients under one quota, by the generic cell rate algorithm (ITU-T I.371).

    Of each client only the time is kept at which its bucket will be full again.
    """

    def __init__(self, quota: Quota | None, own: Callable[[str], Quota | None] = lambda _client: None) -> None:
        """``quota`` is for those who have none of their ``own``; None: they may ask for as much as they like."""
        self.quota = quota
        self._own = own
        self._full_at: dict[str, float] = {}
        self._sweep_at = _MANY

    def take(self, client: str, rows: int, now: float, paid: int = 0) -> None:
        """Take rows out of a client's bucket (``now`` in monotonic seconds); ``paid`` of them were taken before.

        Raises QuotaExceeded with the time after which they will be in it. More than a bucket holds is let in when it is
        full, so that no request is refused for ever.
        """
        quota = self._own(client) or self.quota
        if quota is None:
            return
        rate, burst = quota.rate, quota.burst
        full_at = max(self._full_at.get(client, 0.0), now)
        before = full_at - paid / rate
        after = before + rows / rate
        if min(after - burst / rate, before) > now:
            wait = min(full_at + (rows - burst) / rate, full_at) - now
            raise QuotaExceeded(
                f"the quota of {rate:g} rows per second and client, {burst:g} at once, is used up", retry_after=wait
            )
        self._full_at[client] = after
        if len(self._full_at) > self._sweep_at:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Forget whose buckets are full; seldom enough to cost each request next to nothing."""
        self._full_at = {client: at for client, at in self._full_at.items() if at > now}
        self._sweep_at = max(_MANY, 2 * len(self._full_at))
