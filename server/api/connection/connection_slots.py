"""Connection slots: limits the connections per client and in total, and evicts idle connections for new ones.

A client is an address here (for IPv6 a /64 network), because keys are only known once a request has arrived. When a
limit is reached, a connection that has sent no request, or the one that has been idle for longest, is closed to make
room. A connection that has shown a valid key stays. If there is none to close, the new connection gets a slot of a
small reserve, which serves only health checks: all other requests on it are refused.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from lathe.server.errors import Unavailable
from lathe.server.processes.descriptors import SPARE_CONNECTIONS

GRACE = 1.0  # seconds that a new client has for its handshake and first request before it is evicted first
SCAN_INTERVAL = 50e-6  # seconds per connection between two scans for idle ones; a scan takes a few hundredths of that
Close: TypeAlias = Callable[[], object]


class Connection(Protocol):
    """A connection that has sent a request, with the properties that decide whether it may be evicted."""

    @property
    def is_spare(self) -> bool:
        """Whether it may be evicted: its client has sent no valid key, and no answer is due.

        An answer to a request whose body stalls does not count as due.
        """
        ...

    @property
    def last_seen(self) -> float:
        """When bytes arrived last, in loop time."""
        ...


class ConnectionSlot:
    """The slot of one accepted connection, taken before any byte is read, even of a TLS handshake."""

    __slots__ = ("_slots", "client", "close", "connection", "reserved", "since")

    def __init__(self, slots: ConnectionSlots, client: str, close: Close) -> None:
        self._slots: ConnectionSlots | None = slots
        self.client = client
        self.close = close  # drops the connection
        self.connection: Connection | None = None  # set when it has sent a request
        self.reserved = False  # in the reserve, beyond the limits
        self.since = time.monotonic()

    def on_request(self, connection: Connection) -> bool:
        """Note that the head of a request has arrived; return whether the slot is a normal one (not in the reserve).

        A slot of the reserve becomes a normal one if there is room, or if another connection can be evicted; otherwise
        the next request tries again. On a connection in the reserve only health checks may be answered.
        """
        if self._slots is not None and self.connection is None:
            self._slots.heard(self, connection)
        return not self.reserved

    def refusal(self) -> Unavailable:
        """The error that refuses a request on a connection in the reserve; it is counted."""
        assert self._slots is not None
        return self._slots.refusal(self.client)

    @property
    def is_free(self) -> bool:
        """Whether the slot was given back."""
        return self._slots is None

    def free(self) -> None:
        """Give the slot back; further calls do nothing."""
        slots, self._slots = self._slots, None
        self.connection = None  # which refers to this slot
        if slots is not None:
            slots.on_freed(self)


class _Client:
    """The connections of one client, without those in the reserve."""

    __slots__ = ("silent", "spare", "taken")

    def __init__(self) -> None:
        self.taken = 0
        self.silent: dict[ConnectionSlot, None] = {}  # connections that have sent no request, oldest first
        self.spare: deque[tuple[float, ConnectionSlot]] = deque()  # idle ones at the last scan, idle for longest first


class ConnectionSlots:
    """All connection slots of one server. Used on the event loop's thread only."""

    def __init__(self, most: int, each: int) -> None:
        """`most`: connections in total; `each`: connections per client."""
        self.most = most
        self.each = each
        self.evicted = self.refused = 0  # connections closed to make room; requests refused for lack of a slot
        self._taken = 0
        self._clients: dict[str, _Client] = {}
        self._silent: dict[ConnectionSlot, None] = {}
        self._speaking: dict[ConnectionSlot, None] = {}
        self._spare: deque[tuple[float, ConnectionSlot]] = deque()
        self._reserve: dict[ConnectionSlot, None] = {}
        self._scanned = -1.0  # monotonic time of the last scan for idle connections

    @property
    def connection_count(self) -> int:
        """The number of open connections, including those in the reserve."""
        return self._taken + len(self._reserve)

    def take(self, client: str, close: Close) -> ConnectionSlot:
        """Take the slot of a connection that was just accepted; `close` closes the connection.

        May evict another connection. If there is no room, the slot belongs to the reserve, whose oldest connection is
        evicted when it is full.
        """
        slot = ConnectionSlot(self, client, close)
        if self._has_room(client):
            self._occupy(slot)
            self._silent[slot] = self._clients[client].silent[slot] = None
            return slot
        if len(self._reserve) >= SPARE_CONNECTIONS:
            self._evict(next(iter(self._reserve)))
        slot.reserved = True
        self._reserve[slot] = None
        return slot

    def refusal(self, client: str) -> Unavailable:
        """Count a request refused for lack of a slot, and return the error."""
        self.refused += 1
        known = self._clients.get(client)
        if known is not None and known.taken >= self.each:
            return Unavailable(
                f"this address has reached its limit of {self.each} connections; close some", retry_after=1
            )
        return Unavailable(f"the server has reached its limit of {self.most} connections; retry later", retry_after=1)

    def make_room(self) -> bool:
        """Evict a connection that is idle or has sent no request or, without one, the oldest in the reserve.

        Returns False if there is none of these.
        """
        victim = self._victim(None) or next(iter(self._reserve), None)
        if victim is not None:
            self._evict(victim)
        return victim is not None

    def heard(self, slot: ConnectionSlot, connection: Connection) -> None:
        """Note the first request of a connection.

        A connection in the reserve moves to a normal slot if there is room, or if another connection can be evicted.
        Otherwise nothing is noted, and its next request tries again.
        """
        if slot.reserved and self._has_room(slot.client):
            del self._reserve[slot]
            slot.reserved = False
            self._occupy(slot)
        elif slot.reserved:
            return
        else:
            del self._silent[slot], self._clients[slot.client].silent[slot]
        slot.connection = connection
        self._speaking[slot] = None

    def on_freed(self, slot: ConnectionSlot) -> None:
        """Count out a connection that has closed."""
        if slot.reserved:
            del self._reserve[slot]
            return
        self._taken -= 1
        client = self._clients[slot.client]
        client.taken -= 1
        client.silent.pop(slot, None)
        self._silent.pop(slot, None)
        self._speaking.pop(slot, None)
        if not client.taken:
            del self._clients[slot.client]

    def _occupy(self, slot: ConnectionSlot) -> None:
        self._taken += 1
        self._clients.setdefault(slot.client, _Client()).taken += 1

    def _has_room(self, name: str) -> bool:
        """Whether a client may have one more connection; evicts another one if a limit is reached and one may go."""
        client = self._clients.get(name)
        if client is not None and client.taken >= self.each:
            victim = self._victim(client)
        elif self._taken >= self.most:
            victim = self._victim(None)
        else:
            return True
        if victim is not None:
            self._evict(victim)
        return victim is not None

    def _evict(self, slot: ConnectionSlot) -> None:
        self.evicted += 1
        slot.free()
        slot.close()

    def _victim(self, client: _Client | None) -> ConnectionSlot | None:
        """The connection to evict, of one client or of all (None); None if there is none.

        A connection that sent no request within `GRACE` goes first, then the longest idle one. Last comes a connection
        that sent no request but is newer than `GRACE`: its request may be about to arrive.
        """
        silent = next(iter(self._silent if client is None else client.silent), None)
        if silent is not None and time.monotonic() - silent.since > GRACE:
            return silent
        return self._next_spare(client) or silent

    def _next_spare(self, client: _Client | None) -> ConnectionSlot | None:
        """The longest idle connection that may be evicted, of one client or of all (None); None if there is none.

        Connections are scanned at intervals that grow with their number, so an idle connection may be missed.
        """
        found = _still_spare(self._spare if client is None else client.spare)
        if found is None and time.monotonic() - self._scanned > SCAN_INTERVAL * len(self._speaking):
            self._scan()
            self._scanned = time.monotonic()
            found = _still_spare(self._spare if client is None else client.spare)
        return found

    def _scan(self) -> None:
        for client in self._clients.values():
            client.spare.clear()
        self._spare = deque(sorted(_spare_ones(self._speaking), key=lambda found: found[0]))
        for seen, slot in self._spare:
            self._clients[slot.client].spare.append((seen, slot))


def _spare_ones(slots: dict[ConnectionSlot, None]) -> Iterator[tuple[float, ConnectionSlot]]:
    for slot in slots:
        connection = slot.connection
        if connection is not None and connection.is_spare:
            yield connection.last_seen, slot


def _still_spare(found: deque[tuple[float, ConnectionSlot]]) -> ConnectionSlot | None:
    """Remove entries (last bytes at the scan, slot) up to the first that is idle since the scan, and return that slot.

    None if no entry is.
    """
    while found:
        seen, slot = found.popleft()
        connection = slot.connection
        if not slot.is_free and connection is not None and connection.last_seen == seen and connection.is_spare:
            return slot
    return None
