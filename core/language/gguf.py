"""Reads GGUF files: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.

A file is a header with counts, metadata (pairs of key and typed value), descriptions of the tensors, and their bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.language.gguf_blocks import BLOCK_TYPES, can_decode, decode_blocks
from lathe.core.language.mapped_file import check_ranges, mapped_bytes
from lathe.core.language.stored_tensor import StoredTensor, element_count

# Bounds of what a file may ask for, so that a damaged file costs little time and memory. The largest published models
# have 260,000 tokens, 500,000 merges and 10,000 tensors.
_MOST_ENTRIES = 1 << 16  # of metadata, or tensors
_MOST_STRINGS = 1 << 22  # in an array
_LONGEST_KEY = 65_535  # bytes; by the specification
_LONGEST_STRING = 1 << 26  # bytes
_MOST_AXES = 4  # GGML_MAX_DIMS

_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufFile:
    """The content of a GGUF file: `metadata` by key, and the tensors by name.

    A value of metadata is a bool, int, float, str, a list of strings, or an array of numbers.
    """

    name: str
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """The content of a GGUF file; the tensors stay mapped into memory.

    ModelError for a damaged file: sizes, counts and offsets that do not fit the file, tensors that overlap, names that
    occur twice, text that is not UTF-8. UnsupportedError for big-endian files, other versions, and unknown types.
    """
    data = mapped_bytes(path)
    cursor = _Cursor(data, path.name)
    if cursor.take(4) != b"GGUF":
        raise ModelError("expected a GGUF file, whose first four bytes are 'GGUF'", where=path.name)
    version = cursor.number("<u4")
    if version not in (2, 3):
        raise UnsupportedError(f"expected GGUF version 2 or 3, little-endian, got {version}", where=path.name)
    tensors, entries = cursor.count("tensors", _MOST_ENTRIES), cursor.count("metadata", _MOST_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text(_LONGEST_KEY, "a key of metadata")
        if key in metadata:
            raise ModelError(f"metadata '{key}' occurs twice", where=path.name)
        metadata[key] = cursor.value(key)
    found: dict[str, StoredTensor] = {}
    for tensor in _tensors(cursor, tensors, metadata, data):
        if tensor.name in found:
            raise ModelError(f"tensor '{tensor.name}' occurs twice", where=path.name)
        found[tensor.name] = tensor
    return GgufFile(path.name, metadata, found)


class _Cursor:
    """Reads values one after the other. ModelError where the file ends too early, or a count is too large."""

    def __init__(self, data: NDArray[np.uint8], where: str) -> None:
        self.at, self.where = 0, where
        self._data = data

    def take(self, size: int) -> bytes:
        return self._data[self._pass(size) : self.at].tobytes()

    def number(self, dtype: str) -> Any:
        return self.numbers(dtype, 1)[0].item()

    def numbers(self, dtype: str, count: int) -> NDArray[Any]:
        """An array of `count` numbers: a view of the file."""
        start = self._pass(count * np.dtype(dtype).itemsize)
        return np.frombuffer(self._data[start : self.at], dtype)

    def count(self, what: str, most: int) -> int:
        number: int = self.number("<u8")
        if number > most:
            raise ModelError(f"{what}: expected a count of at most {most}, got {number}", where=self.where)
        return number

    def text(self, longest: int, what: str) -> str:
        (size,) = struct.unpack("<Q", self.take(8))
        if size > longest:
            raise ModelError(f"{what}: expected at most {longest} bytes, got {size}", where=self.where)
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise ModelError(f"{what}: expected UTF-8", where=self.where) from None

    def value(self, key: str) -> Any:
        """A typed value of metadata."""
        kind, what = self.number("<u4"), f"metadata '{key}'"
        if kind == _STRING:
            return self.text(_LONGEST_STRING, what)
        if kind != _ARRAY:
            return self.number(self._dtype(kind, what))
        element = self.number("<u4")
        if element == _STRING:
            return [self.text(_LONGEST_STRING, what) for _ in range(self.count(what, _MOST_STRINGS))]
        return self.numbers(self._dtype(element, what), self.number("<u8"))

    def _dtype(self, kind: int, what: str) -> str:
        if kind not in _NUMBERS:
            raise UnsupportedError(f"{what}: value type {kind} is not supported", where=self.where)
        return _NUMBERS[kind]

    def _pass(self, size: int) -> int:
        """Moves past the next `size` bytes, and returns where they begin."""
        left = len(self._data) - self.at
        if size > left:
            raise ModelError(f"ends too early: byte {self.at} begins {size} bytes, {left} are left", where=self.where)
        self.at += size
        return self.at - size


def _tensors(cursor: _Cursor, count: int, metadata: Mapping[str, Any], data: NDArray[np.uint8]) -> list[StoredTensor]:
    """The tensors that the descriptions at the cursor describe, the last part of the file before their bytes."""
    places = [_description(cursor) for _ in range(count)]
    start = cursor.at + -cursor.at % _alignment(metadata, cursor.where)
    body = data[min(start, len(data)) :]
    check_ranges([(place.start, place.end, place.name) for place in places], len(body), cursor.where)
    return [
        StoredTensor(
            place.name, place.kind, place.shape, body[place.start : place.end], decode_blocks, can_decode(place.kind)
        )
        for place in places
    ]


@dataclass(frozen=True)
class _Place:
    """Type and shape of a tensor, and its range of bytes, counted from the begin of the data."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


def _description(cursor: _Cursor) -> _Place:
    name = cursor.text(_LONGEST_KEY, "the name of a tensor")
    axes = cursor.number("<u4")
    if axes > _MOST_AXES:
        raise ModelError(f"tensor '{name}': expected at most {_MOST_AXES} axes, got {axes}", where=cursor.where)
    shape = tuple(reversed(cursor.numbers("<u8", axes).tolist()))  # the file has the axis of the rows first
    kind, start = cursor.number("<u4"), cursor.number("<u8")
    if kind not in BLOCK_TYPES:
        raise UnsupportedError(f"tensor '{name}' has type {kind}, which is unknown", where=cursor.where)
    type_, elements = BLOCK_TYPES[kind], element_count(shape, name, cursor.where)
    if (axes and shape[-1] % type_.elements) or (not axes and type_.elements > 1):
        message = f"tensor '{name}': expected rows of a multiple of {type_.elements} elements, got {list(shape)}"
        raise ModelError(message, where=cursor.where)
    return _Place(name, type_.name, shape, start, start + elements // type_.elements * type_.size)


def _alignment(metadata: Mapping[str, Any], where: str) -> int:
    """The multiple of bytes at which the data begin. ModelError unless it is a power of two of at most 64 KiB."""
    found = metadata.get("general.alignment", 32)
    if type(found) is not int or not 0 < found <= 1 << 16 or found & (found - 1):
        raise ModelError(f"general.alignment: expected a power of two up to 65536, got {found!r}", where=where)
    return found
