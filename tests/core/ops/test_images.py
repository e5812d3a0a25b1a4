"""ImageDecoder: files written here byte by byte decode to their pixels; damaged files are refused."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import FeedError
from tests.core.ops.cases import case
from tests.core.ops.harness import run_lathe

IMAGE = np.random.default_rng(4).integers(0, 256, (6, 5, 3)).astype(np.uint8)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I4s", len(data), name) + data + struct.pack(">I", zlib.crc32(name + data))


def predicted(kind: int, a: int, b: int, c: int) -> int:
    """A PNG filter's prediction of a byte from its left, upper and upper-left neighbours."""
    paeth = min((a, b, c), key=lambda x: abs(a + b - c - x))
    return (0, a, b, (a + b) // 2, paeth)[kind]


def png(image: Any) -> bytes:
    """Every filter in turn."""
    height, width, channels = image.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = np.pad(image.reshape(height, -1).astype(int), [(1, 0), (channels, 0)])
    raw = bytearray()
    for y in range(1, height + 1):
        raw.append(y % 5)
        for x in range(channels, rows.shape[1]):
            guess = predicted(y % 5, rows[y, x - channels], rows[y - 1, x], rows[y - 1, x - channels])
            raw.append((rows[y, x] - guess) % 256)
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    data = zlib.compress(bytes(raw))
    parts = chunk(b"IHDR", header), chunk(b"IDAT", data[:9]), chunk(b"IDAT", data[9:]), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bmp(image: Any, sign: int = 1) -> bytes:
    height, width, _ = image.shape
    padding = bytes(-3 * width % 4)
    rows = [row[:, ::-1].tobytes() + padding for row in (image[::-1] if sign > 0 else image)]
    header = struct.pack("<2sIIIIiiHHIIIIII", b"BM", 0, 0, 54, 40, width, sign * height, 1, 24, 0, 0, 0, 0, 0, 0)
    return header + b"".join(rows)


def pnm(image: Any) -> bytes:
    return b"P6 # made here\n%d %d\n255\n" % (image.shape[1], image.shape[0]) + image.tobytes()


def tiff(image: Any, order: str = "<") -> bytes:
    """Two strips, after the tags."""
    height, width, _ = image.shape
    half, data = len(image.tobytes()) // 2, 8 + 2 + 12 * 7 + 4
    lists = struct.pack(f"{order}HHHIIII", 8, 8, 8, data + 22, data + 22 + half, half, half)
    entries = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 3, data), (262, 3, 1, 2), (277, 3, 1, 3),
               (273, 4, 2, data + 6), (279, 4, 2, data + 14)]  # fmt: skip
    packed = b""
    for tag, kind, count, value in entries:
        inline = "HH" if (kind, count) == (3, 1) else "I"
        packed += struct.pack(f"{order}HHI{inline}", tag, kind, count, value, *([0] if inline == "HH" else []))
    mark = b"II*\x00" if order == "<" else b"MM\x00*"
    head = mark + struct.pack(f"{order}IH", 8, len(entries)) + packed + bytes(4)
    return head + lists + image.tobytes()


def decoded(data: bytes, pixel_format: str = "RGB") -> Any:
    return run_lathe(case("ImageDecoder", np.frombuffer(data, np.uint8), pixel_format=pixel_format))[0]


@pytest.mark.parametrize(
    "write",
    [png, bmp, lambda x: bmp(x, -1), pnm, tiff, lambda x: tiff(x, ">")],
    ids=["png", "bmp", "bmp from the top", "pnm", "tiff", "tiff, big-endian"],
)
def test_files_decode_to_their_pixels(write: Callable[[Any], bytes]) -> None:
    np.testing.assert_array_equal(decoded(write(IMAGE)), IMAGE)
    np.testing.assert_array_equal(decoded(write(IMAGE), "BGR"), IMAGE[..., ::-1])
    gray = decoded(write(IMAGE), "Grayscale")
    assert gray.shape == (6, 5, 1)
    np.testing.assert_allclose(gray[..., 0], IMAGE @ [0.299, 0.587, 0.114], atol=0.51)


def test_gray_is_repeated_and_transparency_dropped() -> None:
    gray = IMAGE[..., :1]
    np.testing.assert_array_equal(decoded(png(gray)), np.repeat(gray, 3, axis=2))
    opaque = np.concatenate([IMAGE, gray], axis=2)
    np.testing.assert_array_equal(decoded(png(opaque)), IMAGE)


@pytest.mark.parametrize("write", [png, bmp, pnm, tiff])
def test_refuses_a_file_cut_anywhere(write: Callable[[Any], bytes]) -> None:
    data = write(IMAGE)
    end = len(data) - (16 if write is png else 3 if write is bmp else 1)  # the rest of the file has no pixels
    for length in range(8, end, 7):
        with pytest.raises(FeedError):
            decoded(data[:length])


@pytest.mark.parametrize("shape", [(1, 40, 3), (40, 1, 4), (17, 5, 1), (5, 17, 4), (2, 2, 3), (1, 1, 1)])
def test_filters_of_png_rows_of_other_shapes(shape: tuple[int, int, int]) -> None:
    image = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    expected = image[..., :3] if shape[2] > 1 else np.repeat(image, 3, axis=2)
    np.testing.assert_array_equal(decoded(png(image)), expected)


def blank_png(width: int, height: int, kind: int) -> bytes:
    """A PNG of zeros whose rows have the filter `kind`."""
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 0] = kind
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes())), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("kind", range(5))
def test_a_large_png_is_decoded_in_array_operations(kind: int) -> None:
    """3 million bytes; a step of Python for each took 4 seconds. One diagonal of 1000 pixels takes 0.1 ms."""
    begin = time.process_time()
    assert decoded(blank_png(1000, 1000, kind)).shape == (1000, 1000, 3)
    assert time.process_time() - begin < 2


def test_pngs_of_one_long_row_or_of_many_chunks() -> None:
    with pytest.raises(FeedError, match="the PNG is 131073 x 1, expected at most 131072 rows and columns"):
        decoded(blank_png(131_073, 1, 3))
    whole = blank_png(3, 3, 4)
    at = whole.index(b"IDAT") - 4
    (size,) = struct.unpack(">I", whole[at : at + 4])
    pieces = b"".join(chunk(b"IDAT", whole[i : i + 1]) for i in range(at + 8, at + 8 + size))
    assert not decoded(whole[:at] + pieces + whole[at + 12 + size :]).any()


def test_a_pnm_with_a_long_header() -> None:
    assert decoded(b"P5" + b" # c\n" * 1000 + b"1 1 \n 255 \x07").tolist() == [[[7, 7, 7]]]
    with pytest.raises(FeedError, match="malformed header"):
        decoded(b"P5" + b" " * 100_000)


def test_a_tiff_without_a_size_is_refused() -> None:
    width, unknown = struct.pack("<HHII", 256, 4, 1, 5), struct.pack("<HHII", 700, 4, 1, 5)
    with pytest.raises(FeedError, match=r"missing: ImageWidth \(256\)"):
        decoded(tiff(IMAGE).replace(width, unknown))


def test_refuses_unknown_formats_and_large_images() -> None:
    with pytest.raises(FeedError, match="expected PNG, BMP, PNM or TIFF"):
        decoded(b"\xff\xd8\xff\xe0 a JPEG")
    with pytest.raises(FeedError, match="pixels"):
        decoded(b"P6\n99999 99999\n255\n")
