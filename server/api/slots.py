"""Connection slots: how many connections there may be, of one client and of all, and which of them make room.

A client is an address here: nobody shows a key before a request is there. Where a client or the server has as many
connections as it may, the one that has been idle for longest is closed to make room for a new one. Where none is idle,
the new one gets a slot of a small reserve, which is for health checks: whatever else it asks for is refused.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from server.errors import Unavailable

RESERVE = 64  # connections beyond the limit
GRACE = 1.0  # seconds in which a client should have shaken hands and begun to speak
LOOKING = 50e-6  # seconds between two looks at the connections, for each of them: they take a few hundredths of that
Close: TypeAlias = Callable[[], object]


class Connection(Protocol):
    """A connection that has sent a request, as the limits see it."""

    @property
    def is_spare(self) -> bool:
        """Whether it may be closed to make room: nothing is under way, and its client has shown no key."""
        ...

    @property
    def last_seen(self) -> float:
        """When bytes came last, in loop time."""
        ...


class Slot:
    """One accepted connection. Taken before any byte is read, a TLS handshake included."""

    __slots__ = ("_slots", "client", "close", "connection", "reserved", "since")

    def __init__(self, slots: Slots, client: str, close: Close) -> None:
        self._slots: Slots | None = slots
        self.client = client
        self.close = close  # drops the connection
        self.connection: Connection | None = None  # once it has sent a request
        self.reserved = False  # beyond the limits
        self.since = time.monotonic()

    def speak(self, connection: Connection) -> bool:
        """Note that the head of a request is there; returns False if only health may be asked for."""
        if self._slots is not None and self.connection is None:
            self._slots.heard(self, connection)
        return not self.reserved

    def refusal(self) -> Unavailable:
        """Return what is answered where there is no room for a request."""
        assert self._slots is not None
        return self._slots.refusal(self.client)

    @property
    def is_free(self) -> bool:
        """Whether it was given back."""
        return self._slots is None

    def free(self) -> None:
        """Give the slot back; may be called again."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.freed(self)


class _Client:
    """The connections of one client, those in the reserve aside."""

    __slots__ = ("silent", "spare", "taken")

    def __init__(self) -> None:
        self.taken = 0
        self.silent: dict[Slot, None] = {}  # which have sent no request, oldest first
        self.spare: deque[tuple[float, Slot]] = deque()  # as last looked at, idle for longest first


class Slots:
    """All slots of one server. For the event loop's thread alone."""

    def __init__(self, most: int, each: int) -> None:
        """``most`` connections at once, ``each`` of one client."""
        self.most = most
        self.each = each
        self.evicted = self.refused = 0  # connections closed to make room; requests for which there was none
        self._taken = 0
        self._clients: dict[str, _Client] = {}
        self._silent: dict[Slot, None] = {}
        self._speaking: dict[Slot, None] = {}
        self._spare: deque[tuple[float, Slot]] = deque()
        self._reserve: dict[Slot, None] = {}
        self._looked = -1.0  # when the spare ones were looked for last

    @property
    def taken(self) -> int:
        """Connections that are there, those in the reserve included."""
        return self._taken + len(self._reserve)

    def take(self, client: str, close: Close) -> Slot:
        """Return the slot of a connection that was accepted just now; ``close`` drops it."""
        slot = Slot(self, client, close)
        if self._has_room(client):
            self._seat(slot)
            self._silent[slot] = self._clients[client].silent[slot] = None
            return slot
        if len(self._reserve) >= RESERVE:
            self._evict(next(iter(self._reserve)))
        slot.reserved = True
        self._reserve[slot] = None
        return slot

    def refusal(self, client: str) -> Unavailable:
        """Return why there is no room for a request of this client."""
        self.refused += 1
        known = self._clients.get(client)
        if known is not None and known.taken >= self.each:
            return Unavailable(f"this address has its {self.each} connections; close some", retry_after=1)
        return Unavailable(f"the server has its {self.most} connections; come back later", retry_after=1)

    def make_room(self) -> bool:
        """Close the connection that has been idle for longest; says whether there was one."""
        victim = self._victim(None) or next(iter(self._reserve), None)
        if victim is not None:
            self._evict(victim)
        return victim is not None

    def heard(self, slot: Slot, connection: Connection) -> None:
        """A connection has sent its first request: one in the reserve moves to where there is room by now."""
        if slot.reserved and self._has_room(slot.client):
            del self._reserve[slot]
            slot.reserved = False
            self._seat(slot)
        elif slot.reserved:
            return
        else:
            del self._silent[slot], self._clients[slot.client].silent[slot]
        slot.connection = connection
        self._speaking[slot] = None

    def freed(self, slot: Slot) -> None:
        """A connection is gone."""
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

    def _seat(self, slot: Slot) -> None:
        self._taken += 1
        self._clients.setdefault(slot.client, _Client()).taken += 1

    def _has_room(self, name: str) -> bool:
        """Whether a client may have one connection more, if need be instead of one that is idle."""
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

    def _evict(self, slot: Slot) -> None:
        self.evicted += 1
        slot.free()
        slot.close()

    def _victim(self, client: _Client | None) -> Slot | None:
        """Return which connection makes room, of one client or of all: one that has been silent since it came, but
        only just came only if no other is idle; it may be about to speak."""
        silent = next(iter(self._silent if client is None else client.silent), None)
        if silent is not None and time.monotonic() - silent.since > GRACE:
            return silent
        return self._next_spare(client) or silent

    def _next_spare(self, client: _Client | None) -> Slot | None:
        """Return the spare connection that has been idle for longest, of one client or of all."""
        found = _still_spare(self._spare if client is None else client.spare)
        if found is None and time.monotonic() - self._looked > LOOKING * len(self._speaking):
            self._look()
            self._looked = time.monotonic()
            found = _still_spare(self._spare if client is None else client.spare)
        return found

    def _look(self) -> None:
        for client in self._clients.values():
            client.spare.clear()
        self._spare = deque(sorted(_spare_ones(self._speaking), key=lambda found: found[0]))
        for seen, slot in self._spare:
            self._clients[slot.client].spare.append((seen, slot))


def _spare_ones(slots: dict[Slot, None]) -> Iterator[tuple[float, Slot]]:
    for slot in slots:
        connection = slot.connection
        if connection is not None and connection.is_spare:
            yield connection.last_seen, slot


def _still_spare(found: deque[tuple[float, Slot]]) -> Slot | None:
    """Return the first connection of these that has done nothing since it was looked at."""
    while found:
        seen, slot = found.popleft()
        connection = slot.connection
        if not slot.is_free and connection is not None and connection.last_seen == seen and connection.is_spare:
            return slot
    return None
