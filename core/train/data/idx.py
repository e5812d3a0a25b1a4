"""IDX, the format of MNIST (Y. LeCun, C. Cortes, C. Burges): a folder or zip of files, optionally gzipped.

A file has two zero bytes, a type, the number of axes, the sizes of the axes (32 bits, big-endian), and the numbers
(big-endian). `train-images-idx3-ubyte` is the column `images` of the part `train`; `t10k` is the test part.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import IO

import numpy as np

from lathe.core.ir.types import DType
from lathe.core.train.data.dataset import (
    ArraySource,
    Column,
    Dataset,
    LazySource,
    Source,
    Values,
    join_parts,
    layout_of,
)
from lathe.core.train.data.location import Location
from lathe.core.train.data.members import DAMAGE_ERRORS, Members, open_decompressed, part_of, read_into

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_NAME = re.compile(
    r"(?:.*[-_.])?(?P<part>[a-z0-9]+)[-_](?P<column>[a-z]+)[-.]idx\d(?:-[a-z]+)?(?:\.gz)?", re.IGNORECASE
)


def is_idx(members: Members) -> bool:
    """Whether there are files, and all of them have names of IDX files such as `train-images-idx3-ubyte`."""
    return bool(members.names) and all(_NAME.fullmatch(_base_name(name)) for name in members.names)


def open_idx(location: Location, members: Members) -> Dataset:
    """A dataset whose columns and parts are given by the names of the files, such as `train-images-idx3-ubyte`.

    Each name needs the word of a part just before the column. If only one part occurs, the dataset has no parts.

    DataError for other names or parts, for two files of the same column and part, parts with different columns, or a
    damaged header. Damage after a header may show only when values are read.
    """
    if not members.names:
        raise location.error("expected IDX files, found none")
    parts: dict[str, dict[str, Source]] = {}
    for name in members.names:
        match = _NAME.fullmatch(_base_name(name))
        if match is None:
            raise location.error(f"expected names of IDX files such as train-images-idx3-ubyte, got '{name}'")
        part, column = part_of(match["part"]), match["column"].lower()
        if part is None:
            raise location.error(f"'{name}': part: expected train, test, t10k or validation, got '{match['part']}'")
        if column in parts.setdefault(part, {}):
            raise location.error(f"'{name}': there is another file of column '{column}' in part '{part}'")
        parts[part][column] = _File(location, members, name).source(column)
    datasets = {part: Dataset(location.name, sources, location.digest, "idx") for part, sources in parts.items()}
    return join_parts(location.name, datasets, location.digest)


@dataclass(frozen=True)
class _File:
    location: Location
    members: Members
    name: str

    def source(self, name: str) -> Source:
        """The source of the file's rows as the column `name`.

        Uncompressed files outside an archive are memory-mapped, others are read on first use. DataError for a damaged
        header, or for a mapped file of the wrong size.
        """
        shape, dtype = self._read_header()
        column = Column(name, DType.from_numpy(dtype.newbyteorder("=")), shape[1:], layout_of(shape[1:]))
        path = self.members.path(self.name)
        if path is None or self.name.endswith(".gz") or 0 in shape:
            return LazySource(column, shape[0], lambda: self._read(shape, dtype))
        start = _header_size(shape)
        size = path.stat().st_size - start
        if size != _size(shape, dtype):
            raise self.location.error(f"'{self.name}': {_expectation(shape, dtype)}, but {size} follow")
        return ArraySource(column, np.memmap(path, np.uint8, "r", start).view(dtype).reshape(shape))

    def _read_header(self) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
        try:
            with open_decompressed(self.members.open(self.name)) as file:
                return _parse_header(file)
        except (*DAMAGE_ERRORS, ValueError) as error:
            raise self.location.error(f"'{self.name}' is not an IDX file: {error}") from None

    def _read(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Values:
        size = _size(shape, dtype)
        self.location.spend(size, self.name)
        flat = np.empty(size, np.uint8)
        try:
            with open_decompressed(self.members.open(self.name)) as file:
                file.read(_header_size(shape))
                read_into(file, flat)
                more = len(file.read(1))
        except (*DAMAGE_ERRORS, ValueError) as error:
            raise self.location.error(f"'{self.name}': {_expectation(shape, dtype)}: {error}") from None
        if more:
            raise self.location.error(f"'{self.name}': {_expectation(shape, dtype)}, but more follow")
        return flat.view(dtype).reshape(shape)


def _parse_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    magic = file.read(4)
    if len(magic) != 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or not magic[3]:
        known = ", ".join(f"{code:02x}" for code in _TYPES)
        raise ValueError(f"expected the bytes 00 00, a type ({known}) and a number of axes, got {magic.hex(' ')}")
    sizes = file.read(4 * magic[3])
    if len(sizes) != 4 * magic[3]:
        raise EOFError(f"the file ends within its header of {magic[3]} axes")
    return struct.unpack(f">{magic[3]}I", sizes), np.dtype(_TYPES[magic[2]])


def _header_size(shape: tuple[int, ...]) -> int:
    return 4 + 4 * len(shape)


def _size(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    return int(np.prod(shape, dtype=object)) * dtype.itemsize


def _expectation(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> str:
    return f"the header says {list(shape)} of {dtype.newbyteorder('=')}, {_size(shape, dtype)} bytes"


def _base_name(name: str) -> str:
    return name.rpartition("/")[2]
