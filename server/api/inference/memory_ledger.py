"""Accounts for the memory of requests that are being received or read, over all transports and clients."""

from __future__ import annotations

from threading import Lock
from types import TracebackType

from lathe.server.errors import Overloaded


class MemoryLedger:
    """Counts the bytes of requests being received, decompressed and read, up to a bound; one client may hold half.

    A client is a key, or an address if no key is used. May be used from any thread.
    """

    def __init__(self, most: int) -> None:
        """`most`: the bytes that all requests together may hold."""
        self.most = most
        self.held = 0
        self._clients: dict[str, int] = {}
        self._lock = Lock()

    def claim(self, client: str, size: int = 0) -> MemoryClaim:
        """Open the account of one request of this client, with `size` bytes at first; may raise Overloaded."""
        claim = MemoryClaim(self, client)
        claim.add(size)
        return claim

    def of(self, client: str) -> int:
        """The bytes that a client holds."""
        return self._clients.get(client, 0)

    def _take(self, client: str, size: int) -> None:
        with self._lock:
            own = self._clients.get(client, 0) + size
            if self.held + size > self.most:
                raise Overloaded(
                    f"the server holds {self.most} bytes of unfinished requests, its limit; retry later", retry_after=1
                )
            if own > self.most // 2:
                raise Overloaded(
                    f"the server holds {self.most // 2} bytes of this client's unfinished requests, the limit of one "
                    "client; retry later",
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


class MemoryClaim:
    """The bytes that one request holds. A context manager: leaving the block releases them."""

    __slots__ = ("_ledger", "client", "size")

    def __init__(self, ledger: MemoryLedger, client: str) -> None:
        self._ledger = ledger
        self.client = client
        self.size = 0

    def add(self, size: int) -> None:
        """Hold `size` more bytes; Overloaded beyond the ledger's or the client's bound, and nothing is held then."""
        self._ledger._take(self.client, size)
        self.size += size

    def release(self) -> None:
        """Release all bytes; further calls do nothing."""
        size, self.size = self.size, 0
        self._ledger._give_back(self.client, size)

    def __enter__(self) -> MemoryClaim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
