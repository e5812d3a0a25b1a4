"""The waiting requests of each client, and which client makes room in a full queue.

This is longest queue drop (Suter, Lakshman, Stiliadis, Choudhury: INFOCOM 1998), which fq_codel (RFC 8290) uses as
well. A single client may fill the whole queue. When the queue is full, the request of a client with less than an equal
part of it replaces the newest request of the client with the largest part.
"""

from __future__ import annotations

from lathe.server.batching.admission import Admission
from lathe.server.batching.entry import Entry
from lathe.server.errors import Overloaded


class Backlog:
    """Counts waiting requests and bytes by client."""

    __slots__ = ("_clients",)

    def __init__(self) -> None:
        self._clients: dict[str, list[int]] = {}  # requests and bytes

    def add(self, entry: Entry) -> None:
        """Count a request that begins to wait."""
        own = self._clients.get(entry.client)
        if own is None:
            self._clients[entry.client] = [1, entry.nbytes]
        else:
            own[0] += 1
            own[1] += entry.nbytes

    def remove(self, entry: Entry) -> None:
        """Count out a request that no longer waits."""
        own = self._clients[entry.client]
        own[0] -= 1
        own[1] -= entry.nbytes
        if not own[0]:
            del self._clients[entry.client]

    def clear(self) -> None:
        """Forget all clients: nothing waits."""
        self._clients.clear()

    def is_entitled(self, client: str, nbytes: int, admission: Admission) -> bool:
        """Whether other clients have to make room in a full queue for a request of this client, with `nbytes`.

        True if, with that request, the client has at most an equal part of the bounds, and the clients that have more
        than it can give up what is missing. Staged and running requests are not counted: they cannot be dropped.
        """
        clients = self._clients
        own = clients.get(client)
        count = len(clients) + (own is None)
        items, size = (own[0] + 1, own[1] + nbytes) if own is not None else (1, nbytes)
        if items > admission.max_items // count or size > admission.max_bytes // count:
            return False
        missing, needed = admission.missing(nbytes)
        return missing <= sum([max(0, has - items) for has, _ in clients.values()]) and needed <= sum(
            [max(0, has - size) for _, has in clients.values()]
        )

    def largest_client(self, *, by_bytes: bool) -> str:
        """The client with most requests, or most bytes. At least one request must wait."""
        return max(self._clients, key=lambda client: self._clients[client][by_bytes])


def displaced(retry_after: float) -> Overloaded:
    """The error for a request that is dropped from a full queue in favour of another client."""
    return Overloaded(
        "the queue is full, and this client, which had most of it, made room for another", retry_after=retry_after
    )
