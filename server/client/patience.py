"""Whether a request is made again, and when: a pure rule over what came of it."""

from __future__ import annotations

import random

import httpx

from server.client.errors import retry_after

_AGAIN = frozenset({429, 503})  # with `Retry-After`: refused at the door, and nothing was done
_FIRST, _LONGEST = 0.1, 2.0  # seconds before the second attempt, and at most before one
_CLOSED = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError)


class Patience:
    """How long one request is tried for: ``seconds`` of waiting in all.

    Made again is a refusal that says when to come back, and a connection that was closed before the answer came, as a
    server does that restarts; both only if the request ``is_repeatable``. A connection that was refused is tried again
    only where a server ``has_answered`` before: it may be restarting. Nothing was sent then, so any request may be.
    """

    def __init__(self, seconds: float, *, is_repeatable: bool, has_answered: bool) -> None:
        self._left = seconds
        self._is_repeatable = is_repeatable
        self._has_answered = has_answered
        self._pause = _FIRST

    def before_next(self, outcome: httpx.Response | httpx.HTTPError) -> float | None:
        """Return the seconds to wait before the next attempt; None if this is what comes of the request."""
        pause = self._wanted(outcome)
        if pause is None or pause > self._left:
            return None
        self._left -= pause
        return pause

    def _wanted(self, outcome: httpx.Response | httpx.HTTPError) -> float | None:
        if isinstance(outcome, httpx.Response):
            after = retry_after(outcome) if outcome.status_code in _AGAIN and self._is_repeatable else None
            return after if after is None else max(after, _FIRST)
        if isinstance(outcome, httpx.ConnectError):
            return self._longer() if self._has_answered else None
        return self._longer() if isinstance(outcome, _CLOSED) and self._is_repeatable else None

    def _longer(self) -> float:
        """Twice the last pause, give or take a quarter: clients that lost a server together come back apart."""
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST)
        return pause * random.uniform(0.75, 1.25)
