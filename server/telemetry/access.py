"""A line per request, for those who want one: all of them, some of them, or only what went wrong.

At most so many lines per second: a server that refuses a hundred thousand requests has better things to do than to
write that down as often. How many were left out stands in the next line.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from server.telemetry.logs import about

Choice = Literal["off", "errors", "all"]
log = logging.getLogger("lathe.access")
_GOLDEN = 0.6180339887498949  # steps of it fall evenly into [0, 1)
_LONGEST = 256  # characters of what a caller chose


@dataclass(slots=True)
class Served:
    """One request and what became of it; ``status`` is HTTP's number or gRPC's name, ``seconds`` since it was read."""

    method: str
    path: str
    status: int | str
    ok: bool
    seconds: float | None = None
    request_id: str = ""
    trace_id: str = ""
    model: str = ""
    version: str | int = ""
    client: str = ""
    code: str = ""
    error: str = ""
    fault: bool = False  # the server's


class AccessLog:
    """Writes the lines. ``share``: of the requests that went well; ``most``: lines per second."""

    def __init__(self, choice: Choice, share: float = 1.0, most: float = 100.0) -> None:
        self.every = choice == "all"
        self.errors = choice != "off"
        self._share = share
        self._most = most
        self._walk = 0.0
        self._allowed = most
        self._looked = monotonic()
        self._left_out = 0

    def wants(self, ok: bool) -> bool:
        """Whether a request shall have its line; counts it as one that has been asked about."""
        if not (self.every if ok else self.errors) or not log.isEnabledFor(logging.INFO):
            return False
        if ok and self._share < 1.0:
            self._walk = (self._walk + _GOLDEN) % 1.0
            if self._walk >= self._share:
                return False
        now = monotonic()
        self._allowed = min(self._most, self._allowed + (now - self._looked) * self._most)
        self._looked = now
        if self._allowed < 1.0:
            self._left_out += 1
            return False
        self._allowed -= 1.0
        return True

    def write(self, served: Served) -> None:
        """Write the line of a request that :meth:`wants` one."""
        left_out, self._left_out = self._left_out, 0
        fields = about(
            method=served.method,
            path=served.path[:_LONGEST],
            status=served.status,
            duration_ms=None if served.seconds is None else round(served.seconds * 1e3, 3),
            request_id=served.request_id[:_LONGEST],
            trace_id=served.trace_id,
            model=served.model[:_LONGEST],
            version=served.version,
            client=served.client,
            code=served.code,
            error=served.error,
            left_out=left_out or None,
        )
        log.log(logging.ERROR if served.fault else logging.INFO, "request", extra=fields)
