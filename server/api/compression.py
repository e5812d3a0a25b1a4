"""Compressed bodies: inflating with a cap, and compressing answers for callers that asked."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from server.errors import BadRequest, TooLarge, UnsupportedMedia
from server.steps import Steps

_WINDOW: Final = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_READ, _WRITE = 1 << 16, 1 << 18  # bytes that go into, and come out of, one call of zlib
FREE, RATIO = 1 << 20, 100  # beyond so many bytes a body may grow to so many times its size
MEMBERS = 16  # of gzip in one body


def inflate(
    body: bytes | bytearray | memoryview, encoding: bytes, limit: int, hold: Callable[[int], None] | None = None
) -> bytearray:
    """Inflate a whole body. ``hold`` is told of bytes before they are there, and may raise.

    Raises TooLarge before more than ``limit`` bytes are held, or so many that no honest body has grown to them,
    BadRequest on broken data. The time it takes is bounded by the sizes of what goes in and comes out.
    """
    window = _WINDOW.get(encoding)
    if window is None:
        raise UnsupportedMedia(f"content-encoding: expected gzip or deflate, got {encoding.decode('latin-1')!r}")
    out, view = bytearray(), memoryview(body)
    at = 0
    for _ in range(1 if encoding == b"deflate" else MEMBERS):  # RFC 1952 allows several members, RFC 1950 does not
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
            raise BadRequest(f"body: the {encoding.decode()} data ends early") from None
        if at == len(view):
            return out
    few = "one stream" if encoding == b"deflate" else f"at most {MEMBERS} members"
    raise BadRequest(f"body: expected {few} of {encoding.decode()} data, got {len(view) - at} bytes more")


def _member(view: memoryview, at: int, window: int) -> Iterator[tuple[bytes, int]]:
    """Yield what the member that begins at ``view[at]`` consists of, with the place up to which it was read."""
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
    if size > max(FREE, RATIO * sent):
        raise TooLarge(f"body: expected at most {RATIO} times its {sent} bytes once inflated, got more")


def deflating(parts: Sequence[bytes | memoryview], encoding: bytes) -> Steps[bytes]:
    """Compress what these parts are together, at the level that costs least; ``encoding`` is gzip or deflate."""
    engine = zlib.compressobj(1, zlib.DEFLATED, _WINDOW[encoding])
    out: list[bytes] = []
    for part in parts:
        for at in range(0, len(part), _WRITE):
            out.append(engine.compress(part[at : at + _WRITE]))
            yield
    out.append(engine.flush())
    return b"".join(out)


def accepted(header: bytes) -> tuple[bytes, bool]:
    """Read Accept-Encoding: the coding to answer in (empty: none), and whether it is the only one asked for.

    A library's standing list of codings is no wish to have small answers compressed; one coding alone is.
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
