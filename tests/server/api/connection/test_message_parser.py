"""The parser of a connection: it reports the same messages however their bytes are cut, and bounds their framing."""

from __future__ import annotations

import pytest

from lathe.server.api.connection.message_parser import MessageParser
from lathe.server.api.connection.message_size import FEW_CHUNKS, MEAN_CHUNK
from lathe.server.api.connection.request_head import RequestHead
from lathe.server.errors import BadRequest, HeaderTooLarge, ServerError, TooLarge

MAX_HEAD = 300
GET = b"GET /v2?a=1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: localhost\r\nExpect: 100-Continue\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"PUT /y HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n3;ext\r\none\r\n3\r\ntwo\r\n0\r\nTrailer: dropped\r\n\r\n"
)
UPGRADE = b"GET /z HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"


class Messages:
    """Keeps what a parser reports: heads, and the body of each that has ended."""

    def __init__(self, refusal: ServerError | None = None) -> None:
        self.heads: list[RequestHead] = []
        self.bodies: list[bytes] = []
        self._body = b""
        self._refusal = refusal

    def on_message_begin(self) -> None:
        self._body = b""

    def on_head(self, head: RequestHead) -> None:
        self.heads.append(head)

    def on_body(self, part: bytes) -> None:
        if self._refusal is not None:
            raise self._refusal
        self._body += part

    def on_message_end(self) -> None:
        self.bodies.append(self._body)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_messages_are_the_same_however_their_bytes_are_cut(step: int) -> None:
    data, found = GET + POST + CHUNKED + GET, Messages()
    parser = MessageParser(found, MAX_HEAD)
    for at in range(0, len(data), step):
        parser.feed(data[at : at + step])
    assert [(head.method, head.target, head.version) for head in found.heads] == [
        (b"GET", b"/v2?a=1", "1.1"),
        (b"POST", b"/x", "1.1"),
        (b"PUT", b"/y", "1.0"),
    ]
    assert found.heads[1].headers == [(b"host", b"localhost"), (b"expect", b"100-Continue"), (b"content-length", b"5")]
    assert [head.expects_continue for head in found.heads] == [False, True, False]
    assert [head.keep_alive for head in found.heads] == [True, True, False]  # nothing is read after the last one
    assert found.bodies == [b"", b"hello", b"onetwo"]


@pytest.mark.parametrize("step", [1, 1000])
def test_an_offer_of_another_protocol_is_ignored(step: int) -> None:
    found, data = Messages(), UPGRADE + GET
    parser = MessageParser(found, MAX_HEAD)
    for at in range(0, len(data), step):
        parser.feed(data[at : at + step])
    assert [(head.target, head.headers) for head in found.heads] == [
        (b"/z", []),
        (b"/v2?a=1", [(b"host", b"localhost")]),
    ]


def test_the_bytes_of_a_head_are_known_if_it_begins_a_read_and_is_whole() -> None:
    found = Messages()
    parser = MessageParser(found, MAX_HEAD)
    for data in (POST + GET, GET[:9], GET[9:], GET):
        parser.feed(data)
    assert [head.raw for head in found.heads] == [POST[:-5], b"", b"", GET]


def test_a_refusal_by_the_sink_reaches_the_caller() -> None:
    refusal = TooLarge("body: too large")
    with pytest.raises(TooLarge) as raised:
        MessageParser(Messages(refusal), MAX_HEAD).feed(POST)
    assert raised.value is refusal


CHUNKED_HEAD = b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("reads", "error", "message"),
    [
        ([b"GET /" + b"a" * MAX_HEAD], HeaderTooLarge, "headers: expected at most 300 bytes"),
        ([b"GET / HTTP/1.1\r\nA: ", b"b" * 150, b"c" * 150], HeaderTooLarge, "headers: expected at most 300 bytes"),
        ([CHUNKED_HEAD, b"1;" + b"e" * 400], HeaderTooLarge, "of chunk sizes and trailers"),
        ([CHUNKED_HEAD + b"0\r\n" + b"A: b\r\n" * 60], HeaderTooLarge, "headers: expected at most 300 bytes"),
        ([CHUNKED_HEAD, b"1\r\nx\r\n" * (FEW_CHUNKS + 1)], BadRequest, f"chunks of {MEAN_CHUNK} bytes or more"),
        ([CHUNKED_HEAD, b"x\r\n"], BadRequest, "body: "),
        ([b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"], BadRequest, "CONNECT is not supported"),
        ([b"nonsense\r\n\r\n"], BadRequest, "request line: "),
    ],
    ids=["target", "header", "chunk extension", "trailers", "small chunks", "chunk size", "connect", "nonsense"],
)
def test_bad_framing_is_refused(reads: list[bytes], error: type[ServerError], message: str) -> None:
    parser = MessageParser(Messages(), MAX_HEAD)
    for data in reads[:-1]:
        parser.feed(data)
    with pytest.raises(error, match=message):
        parser.feed(reads[-1])
