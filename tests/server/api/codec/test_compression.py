"""Decompression: what it accepts, and the limits on what a small body can become."""

from __future__ import annotations

import gzip
import zlib

import numpy as np
import pytest

from lathe.server.api.codec.compression import FREE_BYTES, MAX_MEMBERS, MAX_RATIO, inflate
from lathe.server.errors import BadRequest, Overloaded, TooLarge

MOST = 1 << 28
NOISE = np.random.default_rng(0).bytes(300_000)  # larger than one call of the decompressor takes


@pytest.mark.parametrize("members", [1, 2, MAX_MEMBERS])
def test_consecutive_members_are_one_body(members: int) -> None:
    assert inflate(gzip.compress(NOISE) * members, b"gzip", MOST) == NOISE * members


@pytest.mark.parametrize(
    ("body", "encoding", "message"),
    [
        (
            gzip.compress(b"") * (MAX_MEMBERS + 1),
            b"gzip",
            f"at most {MAX_MEMBERS} members of gzip data, got 20 bytes more",
        ),
        (gzip.compress(b"") * 50_000, b"x-gzip", "at most 16 members"),
        (zlib.compress(b"a") * 2, b"deflate", "one stream of deflate data, got 9 bytes more"),
        (zlib.compress(b"") * 100_000, b"deflate", "one stream of deflate data"),
        (gzip.compress(NOISE)[:-1], b"gzip", "expected complete gzip data, got a truncated stream"),
        (gzip.compress(NOISE)[:100_000], b"gzip", "expected complete gzip data, got a truncated stream"),
        (gzip.compress(NOISE) + b"\x1f", b"gzip", "expected complete gzip data, got a truncated stream"),
        (gzip.compress(NOISE) + b"xxx", b"gzip", "something else"),
        (b"", b"gzip", "expected complete gzip data, got a truncated stream"),
    ],
)
def test_invalid_compressed_data_are_refused(body: bytes, encoding: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        inflate(body, encoding, MOST)


def test_members_are_not_copied() -> None:
    """Each member costs the same wherever it is in the body: zlib gets a slice, never the whole remainder."""
    given: list[int] = []

    class Counted:
        def __init__(self, window: int) -> None:
            self._engine = real(window)

        def decompress(self, data: bytes, most: int) -> bytes:
            given.append(len(data))
            return self._engine.decompress(data, most)

        def __getattr__(self, name: str) -> object:
            return getattr(self._engine, name)

    real = zlib.decompressobj
    body = gzip.compress(b"") * 8 + gzip.compress(NOISE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zlib, "decompressobj", Counted)
        assert inflate(body, b"gzip", MOST) == NOISE
    assert max(given) <= 1 << 16
    assert sum(given) < 3 * len(body) + 8 * (1 << 16)


@pytest.mark.parametrize("wrap", [gzip.compress, zlib.compress])
def test_a_bomb_stops_at_a_ratio_that_no_real_body_reaches(wrap: object) -> None:
    encoding = b"gzip" if wrap is gzip.compress else b"deflate"
    held: list[int] = []
    with pytest.raises(TooLarge, match=f"at most {MAX_RATIO} times its"):
        inflate(wrap(bytes(64 << 20)), encoding, MOST, held.append)  # type: ignore[operator]
    assert sum(held) <= MAX_RATIO * 66_000
    zeros = bytes(FREE_BYTES)
    assert inflate(wrap(zeros), encoding, MOST) == zeros  # type: ignore[operator]


def test_output_is_counted_before_it_is_stored() -> None:
    def hold(size: int) -> None:
        held.append(size)
        if sum(held) > 100_000:
            raise Overloaded("full")

    held: list[int] = []
    with pytest.raises(Overloaded):
        inflate(gzip.compress(NOISE), b"gzip", MOST, hold)
