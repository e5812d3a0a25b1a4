"""The access log: one line per request, for all requests, a sample of them, or only the failed ones.

The number of lines per second is limited, so that a server that refuses 100,000 requests does not spend its time on
logging. The next line has the number of omitted lines.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from lathe.server.telemetry.logs import log_fields

Choice = Literal["off", "errors", "all"]
log = logging.getLogger("lathe.access")
_GOLDEN = 0.6180339887498949  # 1 / golden ratio: multiples of it modulo 1 are evenly spread over [0, 1)
_LONGEST = 256  # characters of a field that the client chooses


@dataclass(slots=True)
class ServedRequest:
    """A request and its outcome; `status` is HTTP's number or gRPC's name, `seconds` the duration (None: unknown)."""

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
    fault: bool = False  # whether the error is the server's fault


class AccessLog:
    """Writes the access log. `share`: the sampled share, 0 to 1, of successful requests; `most`: lines per second."""

    def __init__(self, choice: Choice, share: float = 1.0, most: float = 100.0) -> None:
        self.every = choice == "all"
        self.errors = choice != "off"
        self._share = share
        self._most = most
        self._walk = 0.0
        self._allowed = most
        self._refilled = monotonic()
        self._left_out = 0

    def wants(self, ok: bool) -> bool:
        """Whether to log a request. Call it once per request: it counts for the sample and the rate limit."""
        if not (self.every if ok else self.errors) or not log.isEnabledFor(logging.INFO):
            return False
        if ok and self._share < 1.0:
            self._walk = (self._walk + _GOLDEN) % 1.0
            if self._walk >= self._share:
                return False
        now = monotonic()
        self._allowed = min(self._most, self._allowed + (now - self._refilled) * self._most)
        self._refilled = now
        if self._allowed < 1.0:
            self._left_out += 1
            return False
        self._allowed -= 1.0
        return True

    def write(self, served: ServedRequest) -> None:
        """Write the line of a request for which `wants` returned true."""
        left_out, self._left_out = self._left_out, 0
        fields = log_fields(
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
