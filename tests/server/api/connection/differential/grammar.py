"""Streams of HTTP/1 requests: well-formed ones, and ones made ambiguous by a mutation of a known kind.

The kinds follow the literature on request smuggling (RFC 9112, section 11.2; Linhart et al., 2005; Kettle, 2019; the
HTTP Garden, 2024): everything that two parsers have been seen to read differently."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

CRLF = b"\r\n"
PATHS = (
    b"/v2",
    b"/v2/models/doubler/infer",
    b"/v2/models/doubler/infer",
    b"/a/b?c=d",
    b"/a%20b",
    b"/v2/repository/index",
)
INFER = b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
BODIES = (b"", b"{}", b"[1, 2]", INFER, INFER, b"0\r\n\r\n", b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n")


@dataclass
class Message:
    """One request in its parts, each of which may be malformed."""

    method: bytes
    target: bytes
    version: bytes
    headers: list[bytes]
    body: list[bytes]  # as sent over the wire
    chunked: bool = False
    gaps: list[bytes] = field(default_factory=lambda: [b" ", b" "])
    before: bytes = b""
    ends: dict[int, bytes] = field(default_factory=dict)  # line ends by line, where they are not CRLF

    def bytes(self) -> bytes:
        line = self.method + self.gaps[0] + self.target + self.gaps[1] + self.version
        lines = [line, *self.headers, b""]
        head = b"".join(line + self.ends.get(i, CRLF) for i, line in enumerate(lines))
        return self.before + head + b"".join(self.body)


@dataclass(frozen=True)
class Case:
    """A stream, and the mutations that made it."""

    data: bytes
    kinds: tuple[str, ...]


def make_case(seed: int) -> Case:
    """Up to three requests, of which each has up to two mutations."""
    rng = random.Random(seed)
    messages, kinds = [], []
    for _ in range(rng.choice((1, 2, 2, 3))):
        message = well_formed(rng)
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            kind = rng.choice(list(MUTATIONS))
            MUTATIONS[kind](message, rng)
            kinds.append(kind)
        messages.append(message)
    data = b"".join(message.bytes() for message in messages)
    if rng.random() < 0.05:
        data = data[: rng.randrange(1, len(data))]
        kinds.append("cut off")
    return Case(data, tuple(kinds))


def well_formed(rng: random.Random) -> Message:
    """A request that every parser accepts."""
    body = rng.choice(BODIES)
    if not body and rng.random() < 0.6:
        return Message(b"GET", rng.choice(PATHS), b"HTTP/1.1", [b"Host: localhost"], [])
    message = Message(b"POST", rng.choice(PATHS), b"HTTP/1.1", [b"Host: localhost", b"X-Other: 1"], [])
    if rng.random() < 0.5:
        message.headers.append(b"Content-Length: %d" % len(body))
        message.body = [body]
    else:
        message.headers.insert(rng.randint(0, 2), b"Transfer-Encoding: chunked")
        message.chunked, message.body = True, chunks(body, rng)
    return message


def chunks(body: bytes, rng: random.Random) -> list[bytes]:
    """A chunked body, in parts: sizes, data and line ends."""
    parts = []
    while body:
        size = rng.randint(1, len(body))
        parts += [b"%x" % size, CRLF, body[:size], CRLF]
        body = body[size:]
    return [*parts, b"0", CRLF, CRLF]


Mutation = Callable[[Message, random.Random], None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(kind: str) -> Callable[[Mutation], Mutation]:
    def register(function: Mutation) -> Mutation:
        MUTATIONS[kind] = function
        return function

    return register


def put_header(message: Message, line: bytes, rng: random.Random) -> None:
    message.headers.insert(rng.randint(0, len(message.headers)), line)


# -- lengths ----------------------------------------------------------------------------------------------------------


@mutation("odd length")
def _(message: Message, rng: random.Random) -> None:
    size = sum(map(len, message.body))
    forms = (
        b"+%d", b"-%d", b"0%d", b"0000000000%d", b"%d ", b" %d", b"%d,", b"%d, %d", b"%d,%d", b"0x%x", b"%d.0",
        b"1_%d", b"%d\t", b"\x0b%d", b"%d;x", b'"%d"', b"", b"99999999999999999999%d", b"%d\x00", b"\xb2%d",
        b"%de0",
    )  # fmt: skip
    form = rng.choice(forms)
    value = form % ((size,) * form.count(b"%"))
    message.headers = [line for line in message.headers if not line.startswith((b"Content-Length", b"Transfer-Enc"))]
    put_header(message, b"Content-Length:" + rng.choice((b" ", b"", b"\t", b"  ")) + value, rng)


@mutation("a second length")
def _(message: Message, rng: random.Random) -> None:
    size = sum(map(len, message.body))
    put_header(message, b"Content-Length: %d" % (size + rng.choice((0, 0, -1, 1, 5))), rng)
    if rng.random() < 0.5:
        put_header(
            message, rng.choice((b"content-length: %d", b"CONTENT-LENGTH: %d", b"Content-Length: %d")) % size, rng
        )


@mutation("a wrong length")
def _(message: Message, rng: random.Random) -> None:
    message.headers = [line for line in message.headers if not line.startswith(b"Content-Length")]
    put_header(
        message, b"Content-Length: %d" % max(0, sum(map(len, message.body)) + rng.choice((-2, -1, 1, 2, 40))), rng
    )


@mutation("no length")
def _(message: Message, rng: random.Random) -> None:
    message.headers = [line for line in message.headers if not line.startswith((b"Content-Length", b"Transfer-Enc"))]


# -- codings ----------------------------------------------------------------------------------------------------------

CODINGS = (
    b"chunked", b"Chunked", b"CHUNKED", b"chunked ", b"\tchunked", b"chunked,", b",chunked",
    b"chunked, chunked", b"identity",
    b"gzip, chunked", b"chunked, gzip", b"gzip,chunked", b"identity, chunked", b"xchunked", b"chunked;q=1",
    b'"chunked"',
    b"\x0bchunked", b"chunked\x0b", b"\x0cchunked", b"chun ked", b"chunked\x00", b"", b"\xa0chunked",
    b"chunked\x85", b"chunke",
)  # fmt: skip


@mutation("a coding")
def _(message: Message, rng: random.Random) -> None:
    message.headers = [line for line in message.headers if not line.startswith((b"Content-Length", b"Transfer-Enc"))]
    put_header(message, b"Transfer-Encoding:" + rng.choice((b" ", b"", b"  ")) + rng.choice(CODINGS), rng)


@mutation("a coding more")
def _(message: Message, rng: random.Random) -> None:
    put_header(message, b"Transfer-Encoding: " + rng.choice(CODINGS), rng)


@mutation("a coding's name")
def _(message: Message, rng: random.Random) -> None:
    names = (
        b"Transfer-Encoding : ", b"Transfer-Encoding\t: ", b" Transfer-Encoding: ", b"Transfer_Encoding: ",
        b"Transfer-Encoding\x00: ", b"Transfer-Encoding\r: ", b"Transfer Encoding: ", b"transfer-encoding:",
        b"TRANSFER-ENCODING: ", b"Transfer-Encoding", b": ", b"X: a\rTransfer-Encoding: ",
        b"X: a\nTransfer-Encoding: ", b"X: a\r\n\tTransfer-Encoding: ", b"\xffTransfer-Encoding: ",
        b"Content-Length : 3", b"Content-Length\x0b: 3", b"Content_Length: 3", b"\tContent-Length: 3",
    )  # fmt: skip
    name = rng.choice(names)
    put_header(message, name + (b"" if name.endswith(b"3") else b"chunked"), rng)


# -- chunks -----------------------------------------------------------------------------------------------------------

EXTENSIONS = (
    b";a", b";a=b", b';a="b"', b';a="b;c"', b'; a = "b"', b" ;a", b"\t;a", b";", b";;", b";a=", b"; ", b';a="b',
    b";a=\n", b";a\rb", b";\r",
    b";a=b\x00", b";a=\xff", b";a=b;c=d", b";a b", b" a", b",a", b";a=\x7f", b";" + b"a" * 300, b';a="\\"',
    b';a="\r\n"',
)  # fmt: skip
SIZES = (
    b"+%x", b"-%x", b"0x%x", b"0X%x", b"0%x", b"000000000000000000%x", b"%x_", b"0_%x", b" %x", b"%x ", b"%x\t",
    b"\t%x", b"%x\x0b", b"%x\x00",
    b"%xg", b"g%x", b"", b"FFFFFFFFFFFFFFFF%x", b"10000000000000000%x", b"100000000%x", b"%x.0", b"\n%x",
    b"\r\n%x", b"%x\r",
    b"7FFFFFFFFFFFFFFF", b"8000000000000000", b"FFFFFFFF", b"\xef\xbc\x91",
)  # fmt: skip


def _sizes(message: Message) -> list[int]:
    """The positions of the sizes in a chunked body."""
    return [*range(0, len(message.body) - 3, 4), len(message.body) - 3]


@mutation("an extension")
def _(message: Message, rng: random.Random) -> None:
    if message.chunked:
        message.body[rng.choice(_sizes(message))] += rng.choice(EXTENSIONS)


@mutation("a size")
def _(message: Message, rng: random.Random) -> None:
    if message.chunked:
        at, form = rng.choice(_sizes(message)), rng.choice(SIZES)
        digits = message.body[at]
        if digits.isalnum():
            message.body[at] = form % int(digits, 16) if b"%" in form else form


@mutation("a wrong size")
def _(message: Message, rng: random.Random) -> None:
    if message.chunked and message.body[0].isalnum():
        message.body[0] = b"%x" % max(0, int(message.body[0], 16) + rng.choice((-1, 1, 2, -2, 7)))


@mutation("a chunk's end")
def _(message: Message, rng: random.Random) -> None:
    if message.chunked:
        at = rng.choice([i for i, part in enumerate(message.body) if part == CRLF] or [0])
        message.body[at] = rng.choice((b"\n", b"\r", b"", b"\r\r\n", b"\n\r", b"\r\n\r\n", b" \r\n", b"x\r\n"))


@mutation("trailers")
def _(message: Message, rng: random.Random) -> None:
    if message.chunked:
        lines = (
            b"X: y", b"X: y", b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Host: other",
            b"Authorization: Bearer x", b"X : y", b" X: y", b"X: a\r\n b", b"X: a\rb", b"X: a\nb", b"X", b": y",
            b"X:", b"X\x00: y", b"X: \x00", b"Trailer: X", b"X: \xff", b"GET / HTTP/1.1", b"0",
            b"X: " + b"y" * 500,
        )  # fmt: skip
        end = rng.choice((CRLF, CRLF, CRLF, CRLF, b"\n", b"\r"))
        message.body[-1:] = [rng.choice(lines) + end for _ in range(rng.randint(1, 3))] + [
            rng.choice((CRLF, CRLF, CRLF, b"\n", b""))
        ]


# -- lines ------------------------------------------------------------------------------------------------------------


@mutation("a line's end")
def _(message: Message, rng: random.Random) -> None:
    message.ends[rng.randint(0, len(message.headers) + 1)] = rng.choice(
        (b"\n", b"\r", b"\r\r\n", b"\n\r", b" \r\n", b"\x0b\r\n", b"\x00\r\n", b"\r\n\n")
    )


@mutation("all lines' ends")
def _(message: Message, rng: random.Random) -> None:
    end = rng.choice((b"\n", b"\r", b"\r\r\n"))
    message.ends = dict.fromkeys(range(len(message.headers) + 2), end)


@mutation("a folded line")
def _(message: Message, rng: random.Random) -> None:
    put_header(
        message,
        rng.choice(
            (b" b", b"\tb", b" ", b"\t", b" Content-Length: 3", b"\tTransfer-Encoding: chunked", b" : x", b"\x0b b")
        ),
        rng,
    )


@mutation("a byte of a header")
def _(message: Message, rng: random.Random) -> None:
    odd = rng.choice(
        (
            b"\x00",
            b"\r",
            b"\n",
            b"\x01",
            b"\x1b",
            b"\x7f",
            b"\x80",
            b"\xff",
            b"\x0b",
            b"\x0c",
            b"\x85",
            b"\t",
            b" ",
            b"\x08",
        )
    )
    name, value = rng.choice(
        (
            (b"X", b"a" + odd + b"b"),
            (b"X" + odd, b"a"),
            (odd + b"X", b"a"),
            (b"X", odd),
            (b"X", b"a" + odd),
            (b"X" + odd + b"Y", b"a"),
        )
    )
    put_header(message, name + b": " + value, rng)


@mutation("a line that is no header")
def _(message: Message, rng: random.Random) -> None:
    put_header(
        message,
        rng.choice(
            (
                b"X",
                b":",
                b": x",
                b"::",
                b"X:",
                b"X::",
                b"X:y",
                b"X: y: z",
                b"GET / HTTP/1.1",
                b'"X": y',
                b"X(y): z",
                b"X=y",
                b"@: x",
            )
        ),
        rng,
    )


@mutation("lines before")
def _(message: Message, rng: random.Random) -> None:
    message.before = rng.choice(
        (CRLF, CRLF, CRLF * 2, b"\n", b"\r", b"\n\n", b" \r\n", b"\r\r\n", b"\x00", b" ", b"\t", CRLF * 20)
    )


@mutation("many headers")
def _(message: Message, rng: random.Random) -> None:
    for number in range(rng.choice((20, 60, 90, 120, 400))):
        message.headers.append(b"X-%d: y" % number)


@mutation("a long line")
def _(message: Message, rng: random.Random) -> None:
    size = rng.choice((1000, 4000, 8000, 8200, 20_000, 40_000))
    if rng.random() < 0.7:
        put_header(message, b"X-Long: " + b"y" * size, rng)
    else:
        message.target += b"?" + b"q" * size


# -- the request line -------------------------------------------------------------------------------------------------


@mutation("a target")
def _(message: Message, rng: random.Random) -> None:
    message.target = rng.choice((
        b"http://localhost/v2", b"HTTP://LOCALHOST/v2", b"http://localhost", b"http://localhost?q",
        b"http://localhost/a?b#c", b"http://other/v2",
        b"http://localhost:80/v2", b"http://a@localhost/v2", b"https://localhost/v2", b"ftp://localhost/v2",
        b"http:/v2", b"http:localhost", b"*", b"//a/b",
        b"//", b"/", b"", b"a", b"a:1", b"localhost:80", b"/a b", b"/a\tb", b"/a#b", b"#", b"?q", b"/?q",
        b"/\x00", b"/\x80", b"/\xff", b"/\x7f", b"/\x01", b"/a\rb",
        b"/a\nb", b"/%00", b"/%", b"/%zz", b"/a\\b", b'/"', b"/<>", b"/{}|^`", b"/../..", b"/./", b"/a;b",
        b"/v2/models/doubler/infer/", b"/v2/models/doubler/infer?",
        b"/v2/models/doubler/infer#", b"/v2//models/doubler/infer", b"/v2/models/doubler%2Finfer",
        b"/v2/models/doubler/versions/1/infer", b"/v2/models/%64oubler/infer",
    ))  # fmt: skip


@mutation("a version")
def _(message: Message, rng: random.Random) -> None:
    message.version = rng.choice((
        b"HTTP/1.0", b"HTTP/1.0", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/1.2", b"HTTP/1.9", b"HTTP/2.0", b"HTTP/3",
        b"http/1.1", b"Http/1.1", b"HTTP/1.1 ", b"HTTP/11", b"",
        b"HTTP/01.1", b"HTTP/1.01", b"HTTP/1.10", b"HTTP/1,1", b"HTTP/1.1x", b"HTTP 1.1", b"HTTP/1.",
        b"HTTP/.1", b"HTTP/-1.1", b"HTTP/+1.1", b"HTTPS/1.1", b"ICE/1.0",
        b"RTSP/1.0", b"HTTP/1.1\x00", b"HTTP/1.1\t",
    ))  # fmt: skip


@mutation("HTTP/1.0 that stays")
def _(message: Message, rng: random.Random) -> None:
    message.version = b"HTTP/1.0"
    put_header(
        message,
        rng.choice(
            (
                b"Connection: keep-alive",
                b"Connection: Keep-Alive",
                b"Connection: close",
                b"Proxy-Connection: keep-alive",
            )
        ),
        rng,
    )


@mutation("a method")
def _(message: Message, rng: random.Random) -> None:
    message.method = rng.choice((
        b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT", b"get", b"Post", b"POST\x00",
        b"", b"BREW", b"PRI", b"G", b"GE T", b"G@T", b"M-SEARCH",
        b"PROPFIND", b"SOURCE", b"QUERY", b"GETGET", b"POSTX", b"\xffGET", b"GET\t", b"LINK", b"SEARCH",
        b"FLUSH", b"SETUP",
    ))  # fmt: skip


@mutation("a gap")
def _(message: Message, rng: random.Random) -> None:
    message.gaps[rng.randint(0, 1)] = rng.choice(
        (b"  ", b"\t", b"\x0b", b"", b"\r", b" \t", b"\x00", b"\n", b"\xa0", b"\x0c", b"   ")
    )


@mutation("HTTP/0.9")
def _(message: Message, rng: random.Random) -> None:
    message.gaps[1] = message.version = b""


# -- the connection
# -----------------------------------------------------------------------------------------------------


@mutation("the connection")
def _(message: Message, rng: random.Random) -> None:
    put_header(message, b"Connection: " + rng.choice((
        b"close", b"Close", b"CLOSE", b"keep-alive", b"close, keep-alive", b"keep-alive, close", b"close,",
        b",close", b"x, close", b"close;x", b"close close", b"closex",
        b"xclose", b'"close"', b"close\t", b"\tclose", b"", b"upgrade", b"close, upgrade", b"TE",
        b"Content-Length", b"Host", b"Transfer-Encoding", b"te, close",
    )), rng)  # fmt: skip


@mutation("an offer")
def _(message: Message, rng: random.Random) -> None:
    message.headers.append(
        b"Upgrade: " + rng.choice((b"h2c", b"websocket", b"TLS/1.0", b"", b"a, b", b"h2c, websocket"))
    )
    if rng.random() < 0.8:
        put_header(
            message,
            rng.choice(
                (
                    b"Connection: Upgrade",
                    b"Connection: upgrade",
                    b"Connection: keep-alive, Upgrade",
                    b"Connection: close, upgrade",
                    b"Connection: Upgrade, HTTP2-Settings",
                )
            ),
            rng,
        )
    if rng.random() < 0.3:
        put_header(message, b"HTTP2-Settings: AAMAAABkAAQAAP__", rng)


@mutation("an expectation")
def _(message: Message, rng: random.Random) -> None:
    put_header(
        message,
        b"Expect: "
        + rng.choice(
            (b"100-continue", b"100-Continue", b"100-continue, x", b"x", b"", b"100-continue;x", b" 100-continue ")
        ),
        rng,
    )


@mutation("a host")
def _(message: Message, rng: random.Random) -> None:
    message.headers = [line for line in message.headers if not line.startswith(b"Host")]
    for line in rng.choice(
        (
            (),
            (b"Host: a", b"Host: b"),
            (b"Host:",),
            (b"Host: a b",),
            (b"Host: a/b",),
            (b"Host: a@b",),
            (b"Host : localhost",),
            (b"HOST: localhost",),
            (b"Host: localhost:99999",),
            (b"Host: a,b",),
            (b"Host: [::1]",),
            (b"Host: localhost", b"Host: localhost"),
        )
    ):
        put_header(message, line, rng)
