"""The connections of gRPC: how many one client address has, and which of them make room.

The rules are those of HTTP (:mod:`server.api.slots`). gRPC accepts its connections itself, and hands over calls only,
so a connection that makes none would never be seen here. They are found among the descriptors of this process instead,
a few times a second, and those beyond the limits are shut.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from server.access.addresses import address_of_peer, client_of
from server.api.grpc.sockets import Peer, peers, shut
from server.api.slots import GRACE

TICK, FLOODED = 0.25, 0.02  # seconds between two looks, and while there are more than may be
SHARE = 0.05  # of one thread's time that looking may take


class Connection:
    """A connection, as its socket and its calls tell of it."""

    __slots__ = ("calls", "came", "client", "idle_since", "is_known")

    def __init__(self, client: str, now: float) -> None:
        self.client = client
        self.calls = 0  # under way
        self.came = self.idle_since = now
        self.is_known = False  # its latest call showed a key

    def begin(self, *, has_key: bool) -> None:
        """A call begins."""
        self.calls += 1
        self.is_known = has_key

    def end(self) -> None:
        """A call has ended."""
        self.calls -= 1
        self.idle_since = time.monotonic()

    def rank(self, now: float) -> tuple[int, float]:
        """Return a number that is less for one that makes room before another: who has been idle for longest, but who
        only just came only if no other is idle; last the newest of those that are not idle, for whom there is no room.
        """
        if self.calls or self.is_known:
            return 2, -self.came
        return (0 if now - self.came > GRACE else 1), self.idle_since


class Connections:
    """All of one server's; for the event loop's thread alone, but for what looks at sockets."""

    def __init__(self, most: int, each: int) -> None:
        """``most`` connections at once, ``each`` of one client address."""
        self.most = most
        self.each = each
        self.evicted = 0  # shut to keep to that
        self._found: dict[Peer, Connection] = {}
        self._watching: asyncio.Task[None] | None = None

    @property
    def taken(self) -> int:
        """Connections that are there, as last looked at."""
        return len(self._found)

    def of(self, peer: str) -> Connection:
        """Return the connection of a call whose context says this of its peer."""
        found = address_of_peer(peer)
        now = time.monotonic()
        if found is None:
            return Connection("", now)
        known = self._found.get(Peer(*found))
        if known is None:  # not looked at yet
            known = self._found[Peer(*found)] = Connection(client_of(found[0]), now)
        return known

    def start(self, port: int) -> None:
        """Begin to look at the connections to gRPC's port; call on the event loop."""
        self._watching = asyncio.ensure_future(self._watch(port))

    def stop(self) -> None:
        """End no more of them."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "lathe-grpc-sockets") as thread:
            while True:
                began = time.monotonic()
                found = await loop.run_in_executor(thread, peers, port)
                victims = self.look(found, began)
                if victims:
                    await loop.run_in_executor(thread, shut, port, [(peer, found[peer]) for peer in victims])
                took = time.monotonic() - began
                await asyncio.sleep(max(FLOODED if victims else TICK, took / SHARE))

    def look(self, found: Iterable[Peer], began: float) -> list[Peer]:
        """Take in which connections there were (monotonic time ``began``); return those that have to make room."""
        there = dict.fromkeys(found)
        for peer in there:
            if peer not in self._found:
                self._found[peer] = Connection(client_of(peer.address), began)
        gone = [peer for peer, one in self._found.items() if peer not in there and not one.calls and one.came < began]
        for peer in gone:
            del self._found[peer]
        victims = self._surplus(there, began)
        self.evicted += len(victims)
        return victims

    def _surplus(self, there: Iterable[Peer], now: float) -> list[Peer]:
        """Return which of these connections are too many, of one client or of all."""
        clients: dict[str, list[Peer]] = {}
        for peer in there:
            clients.setdefault(self._found[peer].client, []).append(peer)
        found: list[Peer] = []
        left: list[Peer] = []
        for own in clients.values():
            victims, kept = self._split(own, self.each, now)
            found += victims
            left += kept
        return found + self._split(left, self.most, now)[0]

    def _split(self, of: list[Peer], most: int, now: float) -> tuple[list[Peer], list[Peer]]:
        """Return which make room so that at most so many are left, and those."""
        if len(of) <= most:
            return [], of
        ordered = sorted(of, key=lambda peer: self._found[peer].rank(now))
        return ordered[: len(of) - most], ordered[len(of) - most :]
