"""What the connections of one server share: limits, the inference service, remembered heads and one clock."""

from __future__ import annotations

import asyncio
from typing import Protocol

from server.api.callhead import CallHead
from server.api.hosts import served_names
from server.api.infer import InferService
from server.api.slots import Slots
from server.settings import Settings

TICK = 0.25  # seconds between sweeps; the resolution of every connection deadline
_HEADS, _HEAD_BYTES = 1024, 2048  # remembered request heads, and the longest of them


class Connection(Protocol):
    """A connection as the sweep sees it."""

    def sweep(self, now: float) -> None:
        """Close or drop the connection if a deadline passed."""
        ...


class Hub:
    """Shared by all connections; one sweep per tick stands in for a timer per request."""

    def __init__(self, settings: Settings, infer: InferService) -> None:
        self.settings = settings
        self.infer = infer
        self.hosts = served_names(settings.served_hosts, settings.host, infer.plane.authority.mode)
        self.connections: set[Connection] = set()
        self.now = 0.0  # the loop's time, at most one tick old
        self.heads: dict[bytes, CallHead] = {}
        self.ledger = infer.reading.ledger
        self.slots = Slots(settings.max_connections, settings.connections_each)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin sweeping; call on the event loop."""
        self._sweep(asyncio.get_running_loop())

    def stop(self) -> None:
        """End sweeping."""
        if self._timer is not None:
            self._timer.cancel()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time()
        self._timer = loop.call_later(TICK, self._sweep, loop)
        self.infer.plane.tick()
        for connection in tuple(self.connections):
            connection.sweep(self.now)

    def remember(self, raw: bytes, head: CallHead) -> None:
        """Keep what the parser made of these bytes.

        Only for a head without bare line feeds: it then ends at its first empty line, whoever reads it, so equal
        bytes at the start of a message mean the same request.
        """
        if len(raw) <= _HEAD_BYTES and raw.count(b"\n") == raw.count(b"\r\n") == raw.count(b"\r"):
            if len(self.heads) >= _HEADS:
                self.heads.clear()
            self.heads[raw] = head
