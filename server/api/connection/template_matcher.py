"""Which request a connection probably sends next: its templates, made after two equal requests in a row."""

from __future__ import annotations

from lathe.server.api.codec.codec import ParsedRequest
from lathe.server.api.connection.json_template import JsonTemplate
from lathe.server.api.connection.request_template import RequestTemplate
from lathe.server.api.inference.infer import InferCall


class TemplateMatcher:
    """The templates of one connection. The connection compares them with the bytes of each read."""

    __slots__ = ("_previous", "json_template", "request_template")

    def __init__(self) -> None:
        self.request_template: RequestTemplate | None = None  # matches a request with equal head and JSON
        self.json_template: JsonTemplate | None = None  # matches a request whose numbers may differ
        self._previous: ParsedRequest | None = None

    def observe(self, call: InferCall, data: bytes, start: int, end: int) -> None:
        """Note a request, which is `data[:end]`, with the body from `start` on.

        The second of two requests in a row with the same parsed request (`call.wire`) sets the templates: a third one
        is likely. A template that the request cannot have is None.
        """
        parsed = call.wire if call.entry is not None else None
        if parsed is not None and parsed is self._previous:
            self.request_template = call.request_template(data[: start + (call.head.json_bytes or 0)], end)
            self.json_template = call.json_template(data[:end], start)
        self._previous = parsed
