"""Content codings: decompresses request bodies within limits, and compresses answers for callers that ask for it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from lathe.server.errors import BadRequest, TooLarge, UnsupportedMedia
from lathe.server.steps import Steps

_WINDOW: Final = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_READ, _WRITE = 1 << 16, 1 << 18  # the most input and output bytes of one call of zlib
FREE_BYTES, MAX_RATIO = 1 << 20, 100  # zip bomb limit: beyond 1 MiB, a body may inflate to at most 100 times its size
MAX_MEMBERS = 16  # the most gzip members of one body


def inflate(
    body: bytes | bytearray | memoryview, encoding: bytes, limit: int, hold: Callable[[int], None] | None = None
) -> bytearray:
    """Decompress a whole body. `hold` is called with the size of each chunk before it is stored, and may raise.

    `encoding` is gzip, x-gzip or deflate (zlib); UnsupportedMedia for others. TooLarge before the result exceeds
    `limit` bytes or, beyond `FREE_BYTES`, `MAX_RATIO` times the size of the body. BadRequest for data that are invalid,
    end early or continue after the last stream. The time is linear in the sizes of input and output.
    """
    window = _WINDOW.get(encoding)
    if window is None:
        raise UnsupportedMedia(f"content-encoding: expected gzip or deflate, got {encoding.decode('latin-1')!r}")
    out, view = bytearray(), memoryview(body)
    at = 0
    for _ in range(1 if encoding == b"deflate" else MAX_MEMBERS):  # RFC 1952 allows several members, RFC 1950 does not
        try:
            for chunk, end in _member(view, at, window):
                _check_size(len(out) + len(chunk), len(view), limit)
                if hold is not None:
                    hold(len(chunk))
                out += chunk
                at = end
        except zlib.error as error:
            raise BadRequest(f"body: expected {encoding.decode()} data, got something else ({error})") from None
        except EOFError:
            raise BadRequest(f"body: expected complete {encoding.decode()} data, got a truncated stream") from None
        if at == len(view):
            return out
    expected = "one stream" if encoding == b"deflate" else f"at most {MAX_MEMBERS} members"
    raise BadRequest(f"body: expected {expected} of {encoding.decode()} data, got {len(view) - at} bytes more")


def _member(view: memoryview, at: int, window: int) -> Iterator[tuple[bytes, int]]:
    """Decompress the gzip member or zlib stream at `view[at]`; yields each chunk with the offset of the unread input.

    `window` is zlib's `wbits`, which tells the formats apart. zlib.error for invalid data, EOFError if they end early.
    """
    engine = zlib.decompressobj(window)
    while not engine.eof:
        given: bytes | memoryview = engine.unconsumed_tail
        if not given:
            given = view[at : at + _READ]
            at += len(given)
        chunk = engine.decompress(given, _WRITE)
        if not given and not chunk and not engine.eof:
            raise EOFError
        yield chunk, at - len(engine.unused_data)


def _check_size(size: int, sent: int, limit: int) -> None:
    if size > limit:
        raise TooLarge(f"body: expected at most {limit} bytes once inflated, got more")
    if size > max(FREE_BYTES, MAX_RATIO * sent):
        raise TooLarge(f"body: expected at most {MAX_RATIO} times its {sent} bytes once inflated, got more")


def deflate_steps(parts: Sequence[bytes | memoryview], encoding: bytes) -> Steps[bytes]:
    """The concatenation of the parts, compressed at zlib's fastest level; `encoding` is gzip or deflate."""
    engine = zlib.compressobj(1, zlib.DEFLATED, _WINDOW[encoding])
    out: list[bytes] = []
    for part in parts:
        for at in range(0, len(part), _WRITE):
            out.append(engine.compress(part[at : at + _WRITE]))
            yield
    out.append(engine.flush())
    return b"".join(out)


def accepted_coding(header: bytes) -> tuple[bytes, bool]:
    """Parse Accept-Encoding: the coding for the answer, and whether the caller accepts only that one.

    The coding is gzip or, if the header does not list gzip, deflate; empty if it lists neither. A coding with `q=0` and
    `*` do not count.

    HTTP libraries send a list of codings by default, which does not mean that small answers should be compressed. A
    single coding was chosen by the caller.
    """
    offers = [offer.strip().lower() for offer in header.split(b",") if offer.strip()]
    names = [name.strip() for name, _, weight in (o.partition(b";") for o in offers) if not _refused(weight)]
    for coding in (b"gzip", b"deflate"):
        if coding in names:
            return coding, names == [coding]
    return b"", False


def _refused(weight: bytes) -> bool:
    name, _, value = weight.strip().partition(b"=")
    return name.strip() == b"q" and not value.strip().strip(b"0.")
