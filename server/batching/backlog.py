"""What each client has waiting, and who makes room when no more may: a queue that is full is shared, too.

This is longest queue drop (Suter, Lakshman, Stiliadis, Choudhury: INFOCOM 1998), which fq_codel (RFC 8290) uses as
well: alone, a client may have all places; when there are none left, one who has less than an equal part gets the place
of the newest request of whoever has most.
"""

from __future__ import annotations

from server.batching.admission import Admission
from server.batching.entry import Entry
from server.errors import Overloaded


class Backlog:
    """Counts requests and bytes by client."""

    __slots__ = ("_clients",)

    def __init__(self) -> None:
        self._clients: dict[str, list[int]] = {}  # requests and bytes

    def add(self, entry: Entry) -> None:
        """A request waits."""
        own = self._clients.get(entry.client)
        if own is None:
            self._clients[entry.client] = [1, entry.nbytes]
        else:
            own[0] += 1
            own[1] += entry.nbytes

    def remove(self, entry: Entry) -> None:
        """It waits no longer."""
        own = self._clients[entry.client]
        own[0] -= 1
        own[1] -= entry.nbytes
        if not own[0]:
            del self._clients[entry.client]

    def clear(self) -> None:
        """Nothing waits."""
        self._clients.clear()

    def is_entitled(self, client: str, nbytes: int, admission: Admission) -> bool:
        """Whether others have to make room for one more request of this client, of so many bytes.

        So it is if the client then has at most an equal part of the requests and bytes that may be there, and those who
        have more than it then has can give what is missing. What runs, or is about to, is nobody's to give.
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

    def heaviest(self, *, by_bytes: bool) -> str:
        """Return who has most; something must wait."""
        return max(self._clients, key=lambda client: self._clients[client][by_bytes])


def put_out(retry_after: float) -> Overloaded:
    """Return what is said to a request that makes room."""
    return Overloaded(
        "the queue is full, and this client, who had most of it, made room for another", retry_after=retry_after
    )
