"""The state that all connections of a server share: limits, inference service, parsed heads and one timer."""

from __future__ import annotations

import asyncio
from typing import Protocol

from lathe.server.api.codec.call_head import CallHead
from lathe.server.api.connection.connection_slots import ConnectionSlots
from lathe.server.api.connection.hosts import served_names
from lathe.server.api.inference.infer import InferService
from lathe.server.settings import Settings

TICK = 0.25  # seconds between sweeps; the resolution of every connection deadline
_MAX_HEADS, _MAX_HEAD_BYTES = 1024, 2048  # the most cached request heads, and the bytes of the longest


class Connection(Protocol):
    """A connection whose deadlines are checked in each sweep."""

    def sweep(self, now: float) -> None:
        """Act on deadlines that have passed: answer with an error, close or reset; `now` in loop time."""
        ...


class Hub:
    """What all connections share: settings, inference service, connection slots, cached request heads, and a timer.

    One sweep of all connections per `TICK` replaces a timer for each deadline.
    """

    def __init__(self, settings: Settings, infer: InferService) -> None:
        self.settings = settings
        self.infer = infer
        self.hosts = served_names(settings.served_hosts, settings.host, infer.plane.authority.mode)
        self.connections: set[Connection] = set()
        self.now = 0.0  # the loop's time, at most one tick old
        self.heads: dict[bytes, CallHead] = {}
        self.ledger = infer.reading.ledger
        self.slots = ConnectionSlots(settings.max_connections, settings.connections_per_client)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Sweep all connections now and every `TICK` seconds; call on the event loop."""
        self._sweep(asyncio.get_running_loop())

    def stop(self) -> None:
        """Stop the sweeps."""
        if self._timer is not None:
            self._timer.cancel()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time()
        self._timer = loop.call_later(TICK, self._sweep, loop)
        self.infer.plane.tick()
        for connection in tuple(self.connections):
            connection.sweep(self.now)

    def cache_head(self, raw: bytes, head: CallHead) -> None:
        """Cache the parsed head of these bytes, if they are at most `_MAX_HEAD_BYTES` and have no bare CR or LF.

        Then every parser ends the head at the first empty line, so equal bytes at the start of a message mean the same
        request. A full cache is emptied first.
        """
        if len(raw) <= _MAX_HEAD_BYTES and raw.count(b"\n") == raw.count(b"\r\n") == raw.count(b"\r"):
            if len(self.heads) >= _MAX_HEADS:
                self.heads.clear()
            self.heads[raw] = head
