"""A request that says what the one before it on its connection said: only its tensors are read."""

from __future__ import annotations

from server.api.callhead import CallHead
from server.api.codec import Codec, Head
from server.scheduling.servable import Servable

LONGEST = 4096  # bytes of head and JSON that a connection keeps


class Lane:
    """What was found out about a request, for those that begin with the same bytes: HTTP head and JSON.

    The head holds the lengths of the body and of its JSON, so equal bytes mean an equal request but for its tensors.
    What may change between two requests is looked at each time: who may run the model, and what answers for its name.
    """

    __slots__ = ("codec", "head", "prefix", "servable", "size", "start", "wire")

    def __init__(self, prefix: bytes, size: int, head: CallHead, servable: Servable, codec: Codec, wire: Head) -> None:
        """``size``: bytes of the whole request."""
        self.prefix = prefix
        self.start = len(prefix)
        self.size = size
        self.head = head
        self.servable = servable
        self.codec = codec
        self.wire = wire
