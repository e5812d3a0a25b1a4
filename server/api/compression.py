"""Compressed bodies: inflating with a cap, and compressing answers for callers that asked."""

from __future__ import annotations

import gzip
import zlib
from typing import Final

from server.errors import BadRequest, TooLarge, UnsupportedMedia

_WINDOW: Final = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_STEP = 1 << 20


def inflate(body: bytes | bytearray | memoryview, encoding: bytes, limit: int) -> bytearray:
    """Inflate a whole body; raises TooLarge before more than ``limit`` bytes are held, BadRequest on broken data."""
    window = _WINDOW.get(encoding)
    if window is None:
        raise UnsupportedMedia(f"content-encoding: expected gzip or deflate, got {encoding.decode('latin-1')!r}")
    out = bytearray()
    pending = bytes(body)
    try:
        while pending:
            engine = zlib.decompressobj(window)  # gzip allows several members in a row
            while not engine.eof:
                chunk = engine.decompress(pending, _STEP)
                if not chunk and not engine.eof and not engine.unconsumed_tail:
                    raise BadRequest(f"body: the {encoding.decode()} data ends early")
                out += chunk
                if len(out) > limit:
                    raise TooLarge(f"body: expected at most {limit} bytes once inflated, got more")
                pending = engine.unconsumed_tail
            pending = engine.unused_data
    except zlib.error as error:
        raise BadRequest(f"body: expected {encoding.decode()} data, got something else ({error})") from None
    return out


def deflate(body: bytes, encoding: bytes) -> bytes:
    """Compress at the level that costs least; ``encoding`` is gzip or deflate."""
    return gzip.compress(body, 1, mtime=0) if encoding == b"gzip" else zlib.compress(body, 1)


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
