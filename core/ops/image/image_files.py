"""Decoders of image files to uint8 pixels [height, width, 3] in RGB order: PNG, BMP, PNM and uncompressed TIFF.

ValueError for a damaged file or more than 2**26 pixels; NotImplementedError for other formats, and for other depths,
compressions and interlacing.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

_MOST_PIXELS = 1 << 26


def decode(data: bytes) -> Pixels:
    """The pixels of an image file [height, width, 3]. The format follows from its first bytes.

    ValueError for a damaged file or too many pixels, NotImplementedError for a format or variant that is not read.
    """
    for signature, reader in _READERS.items():
        if data.startswith(signature):
            try:
                return reader(data)
            except (struct.error, IndexError, zlib.error) as error:
                raise ValueError(f"the image ends too early or is damaged: {error}") from None
    raise NotImplementedError(f"an image that starts with {data[:8]!r} is not read, expected PNG, BMP, PNM or TIFF")


def _check_size(width: int, height: int) -> tuple[int, int]:
    if not (width > 0 and height > 0 and width * height <= _MOST_PIXELS):
        raise ValueError(f"the image is {width} x {height}, expected 1 to {_MOST_PIXELS} pixels")
    return width, height


def _pixels(data: bytes, height: int, width: int, channels: int) -> Pixels:
    """Rows of 8-bit samples as RGB pixels: gray is repeated, alpha is dropped. ValueError for too few bytes."""
    if len(data) < height * width * channels:
        raise ValueError(f"the image has {len(data)} bytes, expected {height * width * channels}")
    samples = np.frombuffer(data, np.uint8, height * width * channels).reshape(height, width, channels)
    return np.repeat(samples[..., :1], 3, axis=2) if channels < 3 else samples[..., :3]


def _png(data: bytes) -> Pixels:
    chunks = dict[bytes, bytes]()
    position = 8
    while position + 8 <= len(data) and b"IEND" not in chunks:
        length, name = struct.unpack(">I4s", data[position : position + 8])
        chunks[name] = chunks.get(name, b"") + data[position + 8 : position + 8 + length]
        position += length + 12
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", chunks.get(b"IHDR", b""))
    _check_size(width, height)
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(kind)
    if depth != 8 or channels is None or interlaced:
        raise NotImplementedError(f"a PNG of {depth} bits, kind {kind}, interlacing {interlaced} is not read")
    size = height * (1 + width * channels)
    raw = zlib.decompressobj().decompress(chunks.get(b"IDAT", b""), size)
    if len(raw) != size:
        raise ValueError(f"the PNG has {len(raw)} bytes of rows, expected {size}")
    rows = _undo_filters(np.frombuffer(raw, np.uint8).reshape(height, -1), channels)
    if kind == 3:
        palette = np.frombuffer(chunks.get(b"PLTE", b""), np.uint8).reshape(-1, 3)
        return palette[rows]
    return _pixels(rows.tobytes(), height, width, channels)


def _undo_filters(rows: Any, step: int) -> Any:
    """The samples of PNG rows, each of which begins with the number of its filter. ValueError for an unknown filter.

    In a filtered row, bytes are differences from a guess: a function of the left (a), upper (b) and upper left (c)
    neighbours, where left is `step` bytes before.
    """
    done = np.zeros((len(rows) + 1, rows.shape[1] - 1 + step), np.int64)
    for number, row in enumerate(rows):
        above, line = done[number], done[number + 1]
        if row[0] > 4:
            raise ValueError(f"the PNG has filter {row[0]}, expected 0 to 4")
        for i, value in enumerate(row[1:].tolist(), start=step):
            guess = _FILTERS[row[0]](int(line[i - step]), int(above[i]), int(above[i - step]))
            line[i] = (value + guess) & 255
    return done[1:, step:].astype(np.uint8)


def _paeth(a: int, b: int, c: int) -> int:
    distances = (abs(b - c), abs(a - c), abs(a + b - 2 * c))
    return (a, b, c)[distances.index(min(distances))]


_FILTERS: tuple[Callable[[int, int, int], int], ...] = (
    lambda a, b, c: 0,
    lambda a, b, c: a,
    lambda a, b, c: b,
    lambda a, b, c: (a + b) // 2,
    _paeth,
)


def _bmp(data: bytes) -> Pixels:
    start, _, width, signed_height, _, depth, compression = struct.unpack("<IIiiHHI", data[10:34])
    width, height = _check_size(width, abs(signed_height))
    if depth not in (24, 32) or compression:
        raise NotImplementedError(f"a BMP of {depth} bits with compression {compression} is not read")
    stride = (width * depth // 8 + 3) // 4 * 4
    rows = np.frombuffer(_part(data, start, stride * height), np.uint8).reshape(height, stride)
    pixels = rows[:, : width * depth // 8].reshape(height, width, -1)[..., 2::-1]
    return pixels[::-1] if signed_height > 0 else pixels


def _pnm(data: bytes) -> Pixels:
    """Binary PGM (P5) or PPM (P6): header numbers with comments between them, one blank, then the samples.

    Only samples of 8 bits are read: the greatest sample must be given as 255.
    """
    numbers, position = list[int](), 2
    while len(numbers) < 3:
        if data[position : position + 1] == b"#":
            position = data.index(b"\n", position)
        digits = data[position : position + 16].split(maxsplit=1)[0] if data[position : position + 1].isdigit() else b""
        numbers += [int(digits)] if digits else []
        position += max(len(digits), 1)
        if position > len(data):
            raise ValueError("the PNM ends in its header")
    width, height = _check_size(*numbers[:2])
    if numbers[2] != 255:
        raise NotImplementedError(f"a PNM with samples up to {numbers[2]} is not read, expected 255")
    return _pixels(data[position + 1 :], height, width, 3 if data[1:2] == b"6" else 1)


_SIZE_TAGS = {256: "ImageWidth", 257: "ImageLength"}


def _tiff(data: bytes) -> Pixels:
    """The first image of a TIFF file with 8-bit samples in uncompressed strips; NotImplementedError for others."""
    order = "<" if data[:2] == b"II" else ">"
    tags = _tiff_tags(data, order)
    width, height = _check_size(tags[256][0], tags[257][0])
    channels, compression = tags.get(277, (1,))[0], tags.get(259, (1,))[0]
    plain = compression == 1 and set(tags.get(258, (1,))) == {8} and tags.get(284, (1,))[0] == 1
    if not plain or tags.get(262, (0,))[0] not in (1, 2) or channels not in (1, 3, 4) or 273 not in tags:
        raise NotImplementedError(f"a TIFF of compression {compression} and {channels} samples is not read")
    samples = bytearray()
    for start, size in zip(tags[273], tags.get(279, (height * width * channels,)), strict=False):
        samples += _part(data, start, min(size, height * width * channels - len(samples)))
    return _pixels(bytes(samples), height, width, channels)


def _tiff_tags(data: bytes, order: str) -> dict[int, tuple[int, ...]]:
    """The values of tags by number, for tags of bytes, or 16-bit or 32-bit numbers. ValueError if there is no size."""
    (start,) = struct.unpack(f"{order}I", data[4:8])
    (count,) = struct.unpack(f"{order}H", data[start : start + 2])
    tags: dict[int, tuple[int, ...]] = {}
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        tag, kind, length = struct.unpack(f"{order}HHI", data[entry : entry + 8])
        code = {1: "B", 3: "H", 4: "I"}.get(kind)
        if code is None or length > len(data):
            continue
        size = struct.calcsize(code) * length
        place = entry + 8 if size <= 4 else struct.unpack(f"{order}I", data[entry + 8 : entry + 12])[0]
        tags[tag] = struct.unpack(f"{order}{length}{code}", _part(data, place, size))
    missing = [f"{name} ({tag})" for tag, name in _SIZE_TAGS.items() if tag not in tags]
    if missing:
        raise ValueError(f"expected tags ImageWidth and ImageLength in the TIFF; missing: {', '.join(missing)}")
    return tags


def _part(data: bytes, start: int, size: int) -> bytes:
    part = data[start : start + size]
    if len(part) != size:
        raise ValueError(f"the image has {len(data)} bytes, expected {start + size}")
    return part


_READERS: dict[bytes, Callable[[bytes], Pixels]] = {
    b"\x89PNG\r\n\x1a\n": _png,
    b"BM": _bmp,
    b"P5": _pnm,
    b"P6": _pnm,
    b"II*\x00": _tiff,
    b"MM\x00*": _tiff,
}
