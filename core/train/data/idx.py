"""IDX, the format of MNIST (Y. LeCun, C. Cortes, C. Burges): a folder or zip of files, gzip or not.

A file is two zero bytes, a type, the number of axes, the sizes of the axes (32 bits, big-endian), and the numbers
(big-endian). `train-images-idx3-ubyte` is the column images of the part train; `t10k` is the test part.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import IO

import numpy as np

from core.ir.types import DType
from core.train.data.dataset import ArraySource, Column, Dataset, LazySource, Source, Values, joined, layout_of
from core.train.data.given import Given
from core.train.data.members import DAMAGE, Members, decompressed, fill, part_of

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_NAME = re.compile(
    r"(?:.*[-_.])?(?P<part>[a-z0-9]+)[-_](?P<column>[a-z]+)[-.]idx\d(?:-[a-z]+)?(?:\.gz)?", re.IGNORECASE
)


def is_idx(members: Members) -> bool:
    """Whether the files are named as IDX files are."""
    return bool(members.names) and all(_NAME.fullmatch(_base(name)) for name in members.names)


def open_idx(given: Given, members: Members) -> Dataset:
    """Columns and parts as the names of the files say."""
    if not members.names:
        raise given.error("holds no IDX files")
    parts: dict[str, dict[str, Source]] = {}
    for name in members.names:
        found = _NAME.fullmatch(_base(name))
        if found is None:
            raise given.error(f"'{name}' is not named as IDX files are: train-images-idx3-ubyte, say")
        part, column = part_of(found["part"]), found["column"].lower()
        if part is None:
            raise given.error(f"'{name}': the part is '{found['part']}', expected train, test, t10k or validation")
        if column in parts.setdefault(part, {}):
            raise given.error(f"'{name}': there is another file of column '{column}' in part '{part}'")
        parts[part][column] = _File(given, members, name).source(column)
    datasets = {part: Dataset(given.name, sources, given.digest, "idx") for part, sources in parts.items()}
    return joined(given.name, datasets, given.digest)


@dataclass(frozen=True)
class _File:
    given: Given
    members: Members
    name: str

    def source(self, name: str) -> Source:
        """The column, its numbers read when they are asked for; a file on its own is mapped instead."""
        shape, dtype = self._opened()
        column = Column(name, DType.from_numpy(dtype.newbyteorder("=")), shape[1:], layout_of(shape[1:]))
        path = self.members.path(self.name)
        if path is None or self.name.endswith(".gz") or 0 in shape:
            return LazySource(column, shape[0], lambda: self._read(shape, dtype))
        start = _header_size(shape)
        there = path.stat().st_size - start
        if there != _size(shape, dtype):
            raise self.given.error(f"'{self.name}': {_expected(shape, dtype)}, but {there} follow")
        return ArraySource(column, np.memmap(path, np.uint8, "r", start).view(dtype).reshape(shape))

    def _opened(self) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
        try:
            with decompressed(self.members.open(self.name)) as file:
                return _header(file)
        except (*DAMAGE, ValueError) as error:
            raise self.given.error(f"'{self.name}' is no IDX file: {error}") from None

    def _read(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Values:
        size = _size(shape, dtype)
        self.given.spend(size, self.name)
        flat = np.empty(size, np.uint8)
        try:
            with decompressed(self.members.open(self.name)) as file:
                file.read(_header_size(shape))
                fill(file, flat)
                more = len(file.read(1))
        except (*DAMAGE, ValueError) as error:
            raise self.given.error(f"'{self.name}': {_expected(shape, dtype)}: {error}") from None
        if more:
            raise self.given.error(f"'{self.name}': {_expected(shape, dtype)}, but more follow")
        return flat.view(dtype).reshape(shape)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    magic = file.read(4)
    if len(magic) != 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or not magic[3]:
        known = ", ".join(f"{code:02x}" for code in _TYPES)
        raise ValueError(f"it begins with {magic.hex(' ')}, expected 00 00, a type ({known}) and a number of axes")
    sizes = file.read(4 * magic[3])
    if len(sizes) != 4 * magic[3]:
        raise EOFError(f"it ends in its header of {magic[3]} axes")
    return struct.unpack(f">{magic[3]}I", sizes), np.dtype(_TYPES[magic[2]])


def _header_size(shape: tuple[int, ...]) -> int:
    return 4 + 4 * len(shape)


def _size(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    return int(np.prod(shape, dtype=object)) * dtype.itemsize


def _expected(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> str:
    return f"the header says {list(shape)} of {dtype.newbyteorder('=')}, {_size(shape, dtype)} bytes"


def _base(name: str) -> str:
    return name.rpartition("/")[2]
