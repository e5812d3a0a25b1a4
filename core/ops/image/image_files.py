"""Decoders of image files to uint8 pixels [height, width, 3] in RGB order: PNG, BMP, PNM and uncompressed TIFF.

ValueError for a damaged file or more than 2**26 pixels; NotImplementedError for other formats, and for other depths,
compressions and interlacing.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

_MOST_PIXELS = 1 << 26
_LONGEST_SIDE = 1 << 17  # of a PNG, whose filters take one step for each row and column: seconds at most
_LEFT, _UP, _AVERAGE, _PAETH = range(1, 5)  # filters of PNG rows


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
    parts = dict[bytes, list[bytes]]()
    position = 8
    while position + 8 <= len(data) and b"IEND" not in parts:
        length, name = struct.unpack(">I4s", data[position : position + 8])
        parts.setdefault(name, []).append(data[position + 8 : position + 8 + length])
        position += length + 12
    chunks = {name: b"".join(each) for name, each in parts.items()}
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", chunks.get(b"IHDR", b""))
    _check_size(width, height)
    if max(width, height) > _LONGEST_SIDE:
        raise ValueError(f"the PNG is {width} x {height}, expected at most {_LONGEST_SIDE} rows and columns")
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
    kinds = rows[:, 0]
    if kinds.max() > _PAETH:
        raise ValueError(f"the PNG has filter {kinds[kinds > _PAETH][0]}, expected 0 to {_PAETH}")
    width = (rows.shape[1] - 1) // step
    done = np.zeros((len(rows) + 1, width + 1, step), np.uint8)  # before the first row and column: zeros
    done[1:, 1:] = rows[:, 1:].reshape(len(rows), width, step)
    if kinds.max() < _AVERAGE:
        for number, kind in enumerate(kinds.tolist(), start=1):
            if kind == _LEFT:
                np.cumsum(done[number], axis=0, dtype=np.uint8, out=done[number])
            elif kind == _UP:
                done[number] += done[number - 1]
    else:
        _undo_along_diagonals(done, kinds.astype(np.intp)[:, None])
    return done[1:, 1:].reshape(len(rows), -1)


def _undo_along_diagonals(done: Any, kinds: Any) -> None:
    """Add the guesses to the pixels `done` [height + 1, width + 1, bytes]; `kinds` [height, 1] are the filters of rows.

    The pixels of a diagonal depend on those of the two diagonals before, not on each other: there are height + width
    steps. In memory, the pixels of a diagonal are `width` pixels apart.
    """
    height, width, flat = len(kinds), done.shape[1] - 1, done.reshape(-1, done.shape[2])
    for diagonal in range(height + width - 1):
        top, end = max(0, diagonal - width + 1), min(height, diagonal + 1)
        first = (top + 1) * (width + 1) + diagonal - top + 1

        def neighbours(before: int, first: int = first, count: int = end - top) -> Any:
            begin = first - before
            return flat[begin : begin + (count - 1) * width + 1 : width]

        a, b, c = (neighbours(before).astype(np.int16) for before in (1, width + 1, width + 2))
        pixels = neighbours(0)
        guesses = (np.zeros_like(a), a, b, (a + b) >> 1, _paeth(a, b, c))
        np.add(pixels, np.choose(kinds[top:end], guesses), out=pixels, casting="unsafe")


def _paeth(a: Any, b: Any, c: Any) -> Any:
    """Of a, b and c, the one next to a + b - c; of equally near ones the first."""
    left, up, both = abs(b - c), abs(a - c), abs(a + b - 2 * c)
    return np.where((left <= up) & (left <= both), a, np.where(up <= both, b, c))


def _bmp(data: bytes) -> Pixels:
    start, _, width, signed_height, _, depth, compression = struct.unpack("<IIiiHHI", data[10:34])
    width, height = _check_size(width, abs(signed_height))
    if depth not in (24, 32) or compression:
        raise NotImplementedError(f"a BMP of {depth} bits with compression {compression} is not read")
    stride = (width * depth // 8 + 3) // 4 * 4
    rows = np.frombuffer(_part(data, start, stride * height), np.uint8).reshape(height, stride)
    pixels = rows[:, : width * depth // 8].reshape(height, width, -1)[..., 2::-1]
    return pixels[::-1] if signed_height > 0 else pixels


_PNM_BLANKS = rb"(?:\s|#[^\n]*+\n)++"
_PNM_HEADER = re.compile(rb"P[56]" + 3 * (_PNM_BLANKS + rb"(\d{1,9}+)"))


def _pnm(data: bytes) -> Pixels:
    """Binary PGM (P5) or PPM (P6): header numbers with comments between them, one blank, then the samples.

    Only samples of 8 bits are read: the greatest sample must be given as 255.
    """
    header = _PNM_HEADER.match(data)
    if header is None:
        raise ValueError("the PNM has a malformed header, expected width, height and the greatest sample")
    numbers, position = list(map(int, header.groups())), header.end()
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
