"""A request that says what the one before it on its connection said: only its tensors are read."""

from __future__ import annotations

from lathe.server.api.codec.call_head import CallHead
from lathe.server.api.codec.codec import Codec, ParsedRequest
from lathe.server.api.codec.reply import Reply
from lathe.server.api.connection.repeated_requests import Repeats
from lathe.server.api.inference.reader_threads import INLINE_BYTES
from lathe.server.serving.servable import Servable
from lathe.server.types import Tensors

LONGEST = 4096  # bytes of head and JSON that a connection keeps


class Lane:
    """What was found out about a request, for those that begin with the same bytes: HTTP head and JSON.

    The head holds the lengths of the body and of its JSON, so equal bytes mean an equal request but for its tensors.
    What may change between two requests is looked at each time: who may run the model, and what answers for its name.
    Connections that say the same share one.
    """

    __slots__ = (
        "__weakref__",
        "codec",
        "head",
        "prefix",
        "round",
        "rows",
        "servable",
        "size",
        "spans",
        "start",
        "wire",
    )

    def __init__(
        self, prefix: bytes, size: int, head: CallHead, servable: Servable, codec: Codec, wire: ParsedRequest
    ) -> None:
        """`size`: bytes of the whole request."""
        self.prefix = prefix
        self.start = len(prefix)
        self.size = size  # 0: of no use any more
        self.head = head
        self.servable = servable
        self.codec = codec
        self.wire = wire
        self.rows = wire.group.rows
        self.spans = tuple(slice(self.start + slot.start, self.start + slot.start + slot.size) for slot in wire.slots)
        self.round: Repeats | None = None  # where requests run with what comes at the same time; None: nowhere

    @property
    def is_plain(self) -> bool:
        """Whether requests differ in the elements of their rows alone, and so do the answers."""
        wire = self.wire
        if not (self.rows and wire.views) or wire.timeout is not None or self.head.accepts:
            return False
        return wire.plain or (wire.numeric and self.codec.most(wire, self.rows) <= INLINE_BYTES)

    def reply(self, outputs: Tensors) -> Reply:
        """Return what an answer with these outputs, all of them binary, says before their bytes."""
        answer, payloads = self.codec.encode(self.wire, outputs)
        return answer.reply(payloads)
