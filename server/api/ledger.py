"""Bytes of requests that are neither queued nor answered yet, whoever sent them and whatever way they came."""

from __future__ import annotations

from threading import Lock
from types import TracebackType

from server.errors import Overloaded


class Ledger:
    """Counts what is being received, inflated and read, against one bound; one client may have half of it.

    A client is a key, or an address where there are no keys. May be used from any thread.
    """

    def __init__(self, most: int) -> None:
        """``most``: bytes that all requests together may hold."""
        self.most = most
        self.held = 0
        self._clients: dict[str, int] = {}
        self._lock = Lock()

    def claim(self, client: str, size: int = 0) -> Claim:
        """Return what one request of this client holds, ``size`` bytes to begin with; raises Overloaded."""
        claim = Claim(self, client)
        claim.add(size)
        return claim

    def of(self, client: str) -> int:
        """Return how many bytes a client holds."""
        return self._clients.get(client, 0)

    def _take(self, client: str, size: int) -> None:
        with self._lock:
            own = self._clients.get(client, 0) + size
            if self.held + size > self.most:
                raise Overloaded(
                    f"the server holds {self.most} bytes of unfinished requests; come back later", retry_after=1
                )
            if own > self.most // 2:
                raise Overloaded(
                    f"the server holds {self.most // 2} bytes of this client's unfinished requests, which is half of "
                    "what it holds of all clients; come back later",
                    retry_after=1,
                )
            self.held += size
            self._clients[client] = own

    def _give_back(self, client: str, size: int) -> None:
        with self._lock:
            self.held -= size
            left = self._clients.get(client, 0) - size
            if left:
                self._clients[client] = left
            else:
                self._clients.pop(client, None)


class Claim:
    """What one request holds; leaving the block gives it back."""

    __slots__ = ("_ledger", "client", "size")

    def __init__(self, ledger: Ledger, client: str) -> None:
        self._ledger = ledger
        self.client = client
        self.size = 0

    def add(self, size: int) -> None:
        """Hold so many bytes more; raises Overloaded, and then holds what it did before."""
        self._ledger._take(self.client, size)
        self.size += size

    def release(self) -> None:
        """Give everything back; may be called again."""
        size, self.size = self.size, 0
        self._ledger._give_back(self.client, size)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
