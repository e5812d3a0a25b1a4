"""HTTP parsing of one connection: bytes become heads and bodies. The callbacks of `httptools` are here."""

from __future__ import annotations

from enum import Enum, auto
from typing import NoReturn, Protocol

import httptools

from lathe.server.api.connection.framing import parser_error
from lathe.server.api.connection.message_size import MessageSize
from lathe.server.api.connection.request_head import RequestHead
from lathe.server.errors import BadRequest, ServerError

_UPGRADING = (b"upgrade", b"connection", b"http2-settings")  # headers that offer another protocol


class MessageSink(Protocol):
    """Takes the messages that a parser has read. `on_head` and `on_body` may raise ServerError: a refusal."""

    def on_message_begin(self) -> None:
        """Take the first byte of a message."""
        ...

    def on_head(self, head: RequestHead) -> None:
        """Take a complete head."""
        ...

    def on_body(self, part: bytes) -> None:
        """Take a part of the body."""
        ...

    def on_message_end(self) -> None:
        """Take the end of the message."""
        ...


class _Part(Enum):
    """The part of a message that the parser reads: NONE -> HEAD -> BODY -> NONE.

    HEAD also goes to NONE, when a head that offers another protocol is read again without that offer.
    """

    NONE = auto()
    HEAD = auto()
    BODY = auto()


_NONE, _HEAD, _BODY = _Part  # in Python 3.11 a look-up in the class takes ten times as long


class MessageParser:
    """Reads messages, bounds their heads and framing, and hands them to a sink."""

    __slots__ = ("_expects_continue", "_headers", "_part", "_raw", "_reader", "_refusal", "_sink", "_size", "target")

    def __init__(self, sink: MessageSink, max_head: int) -> None:
        """`max_head`: the most bytes of a head, and of chunk sizes and trailers."""
        self._sink = sink
        self._size = MessageSize(max_head)
        self._part = _NONE
        self._reader = self._new_reader()
        self._refusal: ServerError | None = None
        self._raw = b""  # the beginning of the data up to the first empty line, if a head began there
        self.target = b""  # of the latest message, as far as received
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False

    def close(self) -> None:
        """End the references to this object, so that it is freed without the garbage collector. It parses no more."""
        del self._reader, self._sink

    def feed(self, data: bytes) -> None:
        """Parse further bytes; ServerError for a message that is refused. Nothing can be parsed after that."""
        size = self._size
        self._raw = b""
        if self._part is _NONE:
            self._raw = data[: data.find(b"\r\n\r\n") + 4]
            size.head = 0
        if self._part is not _BODY:
            size.head += len(data)
        size.wire += len(data)
        try:
            self._read(data)
        except httptools.HttpParserError as error:
            reason, in_head = str(error.args[0]) if error.args else "", self._part is not _BODY
            raise self._refusal or parser_error(reason, data, self._headers, in_head=in_head) from None
        if self._part is _HEAD:
            size.check_head()
        elif self._part is _BODY:
            size.check_framing()

    def _read(self, data: bytes) -> None:
        """Let `httptools` read all of `data`; BadRequest for CONNECT.

        `httptools` stops after a head that offers another protocol (Upgrade). A new parser then reads the head again,
        without that offer, and the rest.
        """
        rest = memoryview(data)
        while True:
            try:
                self._reader.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                if self._reader.get_method() == b"CONNECT":
                    raise BadRequest("request line: CONNECT is not supported") from None
                head = self._head_without_offer()
                self._reader = self._new_reader()  # the old parser may assume that nothing follows
                self._part = _NONE
                self._raw = b""
                self._reader.feed_data(head)

    def _new_reader(self) -> httptools.HttpRequestParser:
        reader = httptools.HttpRequestParser(self)
        reader.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: such data is ignored
        return reader

    def _head_without_offer(self) -> bytes:
        """The bytes of the head that was just read, without the protocol that it offers (Upgrade).

        The connection stays open after it, or closes, as after the original head.
        """
        version = self._reader.get_http_version()
        lines = [b"%b %b HTTP/%b" % (self._reader.get_method(), self.target, version.encode())]
        lines += [b"%b: %b" % header for header in self._headers if header[0] not in _UPGRADING]
        if self._reader.should_keep_alive() != (version == "1.1"):
            lines.append(b"connection: close" if version == "1.1" else b"connection: keep-alive")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _refuse(self, error: ServerError) -> NoReturn:
        self._refusal = error  # `httptools` wraps whatever its callbacks raise
        raise error

    # callbacks of httptools

    def on_message_begin(self) -> None:
        """Called at the first byte of a message."""
        self._part = _HEAD
        self._size.begin()
        self.target = b""
        self._headers = []
        self._expects_continue = False
        self._sink.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Called with a part of the request target."""
        try:
            self._size.add_field(len(url))
        except ServerError as error:
            self._refuse(error)
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called with a header or a trailer; a trailer is counted and dropped (RFC 9110, section 6.5.1)."""
        try:
            self._size.add_field(len(name) + len(value) + 4)
        except ServerError as error:
            self._refuse(error)
        if self._part is _HEAD:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self._expects_continue = True
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called at the end of a head: hands it to the sink.

        A head that offers another protocol is not handed on: `_read` parses it again without that offer.
        """
        reader = self._reader
        if reader.should_upgrade():
            return  # the parser stops here; see `_read`
        self._part = _BODY
        self._size.end_head()
        head = RequestHead(
            reader.get_method(),
            self.target,
            reader.get_http_version(),
            self._headers,
            reader.should_keep_alive(),
            self._expects_continue,
            self._raw,
        )
        try:
            self._sink.on_head(head)
        except ServerError as error:
            self._refuse(error)

    def on_chunk_header(self) -> None:
        """Called at the beginning of a chunk."""
        try:
            self._size.add_chunk()
        except ServerError as error:
            self._refuse(error)

    def on_body(self, body: bytes) -> None:
        """Called with a part of the body."""
        self._size.body += len(body)
        try:
            self._sink.on_body(body)
        except ServerError as error:
            self._refuse(error)

    def on_message_complete(self) -> None:
        """Called at the end of a message."""
        if self._reader.should_upgrade():
            return
        self._part = _NONE
        self._size.end_head()
        self._raw = b""  # a further head in the same data does not begin where the data did
        self._sink.on_message_end()
