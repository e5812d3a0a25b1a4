"""The body of one inference request while it arrives."""

from __future__ import annotations

from lathe.server.api.inference.memory_ledger import MemoryClaim


class BodyBuffer:
    """Collects a body, and counts its bytes in the server's memory ledger until it is taken."""

    __slots__ = ("_bytes", "_claim")

    def __init__(self, claim: MemoryClaim) -> None:
        """`claim`: an empty claim, which the first body replaces by its own."""
        self._claim = claim
        self._bytes = bytearray()

    def begin(self, claim: MemoryClaim) -> None:
        """Start a body whose bytes this claim counts."""
        self._claim = claim

    def add(self, part: bytes) -> None:
        """Append a part of the body, and count its bytes.

        Overloaded, without appending it, if the server or the client would then hold more bytes than the ledger allows.
        """
        self._claim.add(len(part))
        self._bytes += part

    def take(self) -> bytearray:
        """Return the bytes that have arrived, release their claim in the ledger, and start again without bytes."""
        body, self._bytes = self._bytes, bytearray()
        self._claim.release()
        return body
