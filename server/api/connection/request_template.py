"""A template of a request: of a later request that begins with the same bytes, only the tensors are read."""

from __future__ import annotations

from lathe.server.api.codec.call_head import CallHead
from lathe.server.api.codec.codec import Codec, ParsedRequest
from lathe.server.api.codec.reply import Reply
from lathe.server.api.connection.repeated_requests import RepeatedRequests
from lathe.server.api.inference.reader_threads import INLINE_BYTES
from lathe.server.serving.servable import Servable
from lathe.server.types import Tensors

MAX_PREFIX_BYTES = 4096  # of HTTP head and JSON that one template keeps: the usual head has 300, its JSON 200


class RequestTemplate:
    """The result of parsing one request, reused for later requests with the same HTTP head and the same JSON.

    The HTTP head holds the length of the body and the length of its JSON. So two requests whose head and JSON are equal
    differ only in the bytes of their tensors. Two things may change between requests and are checked for each of them:
    whether the caller may run the model, and which version serves the model's name. Connections whose requests begin
    with the same bytes share one template.
    """

    __slots__ = (
        "__weakref__",
        "codec",
        "head",
        "prefix",
        "repeated_requests",
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
        """`prefix`: the bytes of HTTP head and JSON. `size`: the number of bytes of the whole request."""
        self.prefix = prefix
        self.start = len(prefix)
        self.size = size  # 0: the template is outdated and matches no request
        self.head = head
        self.servable = servable
        self.codec = codec
        self.wire = wire
        self.rows = wire.group.rows
        self.spans = tuple(slice(self.start + slot.start, self.start + slot.start + slot.size) for slot in wire.slots)
        # Where requests that arrive together form one batch; None: each request goes through the queue on its own.
        self.repeated_requests: RepeatedRequests | None = None

    @property
    def is_plain(self) -> bool:
        """Whether requests of this template may form coalesced batches (`RepeatedRequests`).

        They then differ only in their tensors, which are views into the request, and have no timeout. Their clients
        accept no compression, and their answers are quickly written and differ only in the outputs.
        """
        wire = self.wire
        if not (self.rows and wire.views) or wire.timeout is not None or self.head.accepts:
            return False
        return wire.plain or (wire.numeric and self.codec.most(wire, self.rows) <= INLINE_BYTES)

    def reply(self, outputs: Tensors) -> Reply:
        """Return the reply (HTTP head and JSON, cached by shapes) of an answer whose outputs are all binary."""
        answer, payloads = self.codec.encode(self.wire, outputs)
        return answer.reply(payloads)
