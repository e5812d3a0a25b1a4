"""Rate limits: a token bucket per client, stored as one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lathe.server.errors import QuotaExceeded

LEAST_RATE = 1e-6  # rows per second: one in 12 days; with much lower rates the times of buckets overflow
_MANY = 4096  # clients stored before those with full buckets are dropped


@dataclass(frozen=True, slots=True)
class Quota:
    """A rate limit: `rate` rows per second for each client, at least `LEAST_RATE`, and up to `burst` rows at once.

    A quota of tokens has the same form, with tokens in place of rows.
    """

    rate: float
    burst: float

    @classmethod
    def of(cls, rate: float, burst: float | None) -> Quota:
        """Return the quota; the default burst is the rows of one second, at least one row."""
        return cls(rate, burst or max(1.0, rate))

    @classmethod
    def of_tokens(cls, rate: float, burst: float | None) -> Quota:
        """Return the quota; the default burst is the tokens of one minute, at least one token."""
        return cls(rate, burst or max(1.0, 60 * rate))


class Quotas:
    """The token buckets of all clients, by the generic cell rate algorithm (ITU-T I.371).

    Only one number is stored per client: the time at which the client's bucket will be full again.
    """

    def __init__(
        self, quota: Quota | None, own: Callable[[str], Quota | None] = lambda _client: None, unit: str = "rows"
    ) -> None:
        """`own` returns the quota of a client; if it returns None, `quota` applies. Both None: no limit.

        `unit`: the name in errors of what is counted.
        """
        self.quota = quota
        self._own = own
        self._unit = unit
        self._full_at: dict[str, float] = {}
        self._sweep_at = _MANY

    def take(self, client: str, rows: int, now: float, paid: int = 0) -> None:
        """Take `rows` rows out of a client's bucket, of which an earlier call took `paid` (`now`: monotonic seconds).

        Raises QuotaExceeded if the bucket holds too few rows, and takes none then; `retry_after` is the time in seconds
        until it holds them. A request with more rows than a full bucket is admitted when the bucket is full, so that no
        request is refused for ever.
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
                f"the quota of {rate:g} {self._unit} per second and client, {burst:g} at once, is used up",
                retry_after=wait,
            )
        self._store(client, after, now)

    def spend(self, client: str, rows: int, now: float) -> None:
        """Take rows that were not known in advance out of a client's bucket, which may then hold less than none.

        `take` refuses the client's requests, also those of no rows, until the bucket has been filled up to none.
        """
        quota = self._own(client) or self.quota
        if quota is not None:
            self._store(client, max(self._full_at.get(client, 0.0), now) + rows / quota.rate, now)

    def _store(self, client: str, full_at: float, now: float) -> None:
        self._full_at[client] = full_at
        if len(self._full_at) > self._sweep_at:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Drop the clients with full buckets; the next sweep is at twice the remaining clients, at least at `_MANY`."""
        self._full_at = {client: at for client, at in self._full_at.items() if at > now}
        self._sweep_at = max(_MANY, 2 * len(self._full_at))
