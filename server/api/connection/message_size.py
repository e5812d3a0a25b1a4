"""Counts the parts of one HTTP message while it arrives, and bounds those that hold no data of a request."""

from __future__ import annotations

from lathe.server.errors import BadRequest, HeaderTooLarge

FEW_CHUNKS, MEAN_CHUNK = 4096, 64  # more than 4096 chunks must have 64 bytes on average, or parsing costs too much


class MessageSize:
    """The bytes of the message that the parser reads. The checks raise an error of status 400 or 431."""

    __slots__ = ("_chunks", "_max_head", "body", "fields", "head", "wire")

    def __init__(self, max_head: int) -> None:
        """`max_head`: the most bytes of a head, and of chunk sizes and trailers."""
        self._max_head = max_head
        self._chunks = 0
        self.head = 0  # received while the head is incomplete
        self.fields = 0  # target and headers, as far as parsed; trailers count as headers
        self.body = 0
        self.wire = 0  # received since the message began, but for the data in which it began

    def begin(self) -> None:
        """Start counting a message; `head` keeps its value, since it counts the data in which the message began."""
        self.fields = self.wire = self._chunks = 0

    def end_head(self) -> None:
        """Reset the counts of head and body: the head is complete, or the message."""
        self.head = self.body = 0

    def add_field(self, size: int) -> None:
        """Count `size` bytes of the target, a header or a trailer; HeaderTooLarge beyond `max_head`."""
        self.fields += size
        self._check_head(self.fields)

    def add_chunk(self) -> None:
        """Count a chunk; BadRequest for more than `FEW_CHUNKS` of less than `MEAN_CHUNK` bytes on average."""
        self._chunks += 1
        if self._chunks > FEW_CHUNKS and self.body < self._chunks * MEAN_CHUNK:
            raise BadRequest(
                f"body: expected chunks of {MEAN_CHUNK} bytes or more on average, got {self.body // self._chunks}"
            )

    def check_head(self) -> None:
        """HeaderTooLarge if the bytes of a head that is still incomplete exceed `max_head`."""
        self._check_head(self.head)

    def check_framing(self) -> None:
        """HeaderTooLarge for too many bytes besides the body's data: chunk sizes, their extensions, trailers.

        The limit is `max_head` and `MEAN_CHUNK` per chunk.
        """
        limit = self._max_head + self._chunks * MEAN_CHUNK
        if self.wire - self.body > limit:
            raise HeaderTooLarge(f"body: expected at most {limit} bytes of chunk sizes and trailers, got more")

    def _check_head(self, size: int) -> None:
        if size > self._max_head:
            raise HeaderTooLarge(f"headers: expected at most {self._max_head} bytes, got more")
