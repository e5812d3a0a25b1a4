"""Limits gRPC connections per client address and in total, and shuts down those beyond the limits.

The limits are those of HTTP (`lathe.server.api.connection.connection_slots`); `Connection.rank` says which connections
go first, those with running calls last. gRPC accepts connections itself and passes on only calls, so a connection
without calls would be invisible. Therefore the connections are found among the file descriptors of this process, a few
times per second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lathe.server.access.addresses import client_of, parse_peer
from lathe.server.api.connection.connection_slots import GRACE
from lathe.server.api.grpc.sockets import Peer, peers, shut_down

T = TypeVar("T")
TICK, FLOODED = 0.25, 0.02  # seconds between two scans: usually, and while connections exceed the limits
SHARE = 0.05  # the most of one processor's time that scanning may take


class Connection:
    """The state of a connection, by its socket and its calls."""

    __slots__ = ("calls", "came", "client", "has_key", "idle_since")

    def __init__(self, client: str, now: float) -> None:
        self.client = client
        self.calls = 0  # running calls
        self.came = self.idle_since = now
        self.has_key = False  # its latest call had a valid key

    def begin(self, *, has_key: bool) -> None:
        """Count a call that begins."""
        self.calls += 1
        self.has_key = has_key

    def end(self) -> None:
        """Count a call that has ended."""
        self.calls -= 1
        self.idle_since = time.monotonic()

    def rank(self, now: float) -> tuple[int, float]:
        """The sort key of eviction: the connection with the lowest is shut down first (`now`: monotonic seconds).

        Idle connections older than `GRACE` come first, the longest idle in front; then newer idle ones; then those with
        running calls or a valid key, the newest in front.
        """
        if self.calls or self.has_key:
            return 2, -self.came
        return (0 if now - self.came > GRACE else 1), self.idle_since


class Connections:
    """All gRPC connections of one server. Used on the event loop's thread only; sockets are scanned on another."""

    def __init__(self, most: int, each: int) -> None:
        """`most`: connections in total; `each`: connections per client address."""
        self.most = most
        self.each = each
        self.evicted = 0  # connections that were shut down
        self._found: dict[Peer, Connection] = {}
        self._watching: asyncio.Task[None] | None = None

    @property
    def connection_count(self) -> int:
        """The number of connections at the last scan."""
        return len(self._found)

    def of(self, peer: str) -> Connection:
        """The connection of a call with this peer string (`context.peer()`); recorded now if no scan has found it.

        A peer without an IP address gets a new connection of the client "", which is not recorded.
        """
        found = parse_peer(peer)
        now = time.monotonic()
        if found is None:
            return Connection("", now)
        known = self._found.get(Peer(*found))
        if known is None:  # newer than the last scan
            known = self._found[Peer(*found)] = Connection(client_of(found[0]), now)
        return known

    def start(self, port: int) -> None:
        """Start to scan the connections to the gRPC port; call on the event loop."""
        self._watching = asyncio.ensure_future(self._watch(port))

    def stop(self) -> None:
        """Stop scanning."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "lathe-grpc-sockets") as thread:
            while True:
                began = time.monotonic()
                found, took = await loop.run_in_executor(thread, _timed, peers, port)
                victims = self.look(found, began)
                if victims:
                    pairs = [(peer, found[peer]) for peer in victims]
                    took += (await loop.run_in_executor(thread, _timed, shut_down, port, pairs))[1]
                await asyncio.sleep(max(FLOODED if victims else TICK, took / SHARE))

    def look(self, found: Iterable[Peer], began: float) -> list[Peer]:
        """Record the connections that a scan found, which began at `began` (monotonic); return those beyond the limits.

        Recorded connections that the scan did not find are dropped, unless they have running calls or are newer.
        """
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
        """The connections beyond the limit of their client, or of the server, those of the lowest `rank`."""
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
        """Split connections by their `rank` into those to shut down and the (at most) `most` that stay."""
        if len(of) <= most:
            return [], of
        ordered = sorted(of, key=lambda peer: self._found[peer].rank(now))
        return ordered[: len(of) - most], ordered[len(of) - most :]


def _timed(work: Callable[..., T], *arguments: Any) -> tuple[T, float]:
    """Run `work`; return its result and the seconds of processor time that it took.

    Elapsed time would grow while other threads want the processor, and a flood would make scans rare.
    """
    began = time.thread_time()
    return work(*arguments), time.thread_time() - began
