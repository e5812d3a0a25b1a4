"""The retry policy of requests: a pure function of their outcomes, without a clock."""

from __future__ import annotations

import random

import httpx

from lathe.server.client.errors import retry_after

_RETRIED = frozenset({429, 503})  # statuses of requests that were not admitted, if they have `Retry-After`
_FIRST, _LONGEST = 0.1, 2.0  # seconds before the second attempt, and before any later one at most
_RETRIES_BEFORE_ANY_ANSWER = 2  # a wrong address is reported after about 0.3 s instead of the whole patience
_CLOSED = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError)


class RetryPolicy:
    """The retries of one request, which wait for at most `seconds` in all.

    A request that `is_repeatable` is retried after a 429 or 503 with Retry-After, and after a connection that was
    closed before the answer, as a restarting server does. A refused connection is retried if the server `has_answered`
    before, since it may be restarting; nothing was sent then, so every request may be retried. A server that closes
    connections and has never answered may be of another kind, or expect TLS: then there are at most 2 retries.
    """

    def __init__(self, seconds: float, *, is_repeatable: bool, has_answered: bool) -> None:
        self._left = seconds
        self._is_repeatable = is_repeatable
        self._has_answered = has_answered
        self._pause = _FIRST
        self._closed = 0  # connections that were closed before the answer

    def pause_before_next(self, outcome: httpx.Response | httpx.HTTPError) -> float | None:
        """Return the seconds to wait before the next attempt; None for no further attempt.

        No attempt follows if the outcome is not to be retried, or if the pause would exceed the rest of `seconds`.
        """
        pause = self._pause_after(outcome)
        if pause is None or pause > self._left:
            return None
        self._left -= pause
        return pause

    def _pause_after(self, outcome: httpx.Response | httpx.HTTPError) -> float | None:
        if isinstance(outcome, httpx.Response):
            after = retry_after(outcome) if outcome.status_code in _RETRIED and self._is_repeatable else None
            return after if after is None else max(after, _FIRST)
        if isinstance(outcome, httpx.ConnectError):
            return self._next_pause() if self._has_answered else None
        if not (isinstance(outcome, _CLOSED) and self._is_repeatable):
            return None
        self._closed += 1
        return self._next_pause() if self._has_answered or self._closed <= _RETRIES_BEFORE_ANY_ANSWER else None

    def _next_pause(self) -> float:
        """Return the next pause of an exponential backoff; 25% jitter keeps clients from reconnecting together."""
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST)
        return pause * random.uniform(0.75, 1.25)
